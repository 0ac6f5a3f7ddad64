"""The weights stage: attach what is kept; else load by the engine's own path, publish, and go on with the same memory.

One start, step by step::

    connect      to the keeper (mode=daemon starts one)
    look         editions with this fingerprint on this GPU: whose checkpoint is the same?
    attach       map, verify, bind, prove                                        -> path=attached
    claim        on a miss one launch loads, and the others wait for what it publishes
    make room    evict unleased editions of this GPU that stand in the way
    load         the engine's own pipeline
    publish      move into slabs, hand the descriptors to the keeper             -> path=loaded

With several ranks every decision is taken together (``Engine.agree``), so that no rank waits in a collective that
another rank never enters.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from fer.errors import (
    CheckpointError,
    FerBug,
    FerError,
    KeeperError,
    MemoryFault,
    Miss,
    OutOfMemory,
    PublishRefused,
    WaitTimeout,
)
from fer.memory.open import open_ahead, open_backend
from fer.memory.patience import lacks_memory, patiently
from fer.report import Report
from fer.stages import Stage
from fer.weights import checkpoint, quantization, room
from fer.weights.background import Digests
from fer.weights.connect import connect, ends_with_us
from fer.weights.edition import Published, Workshop, skeleton_of
from fer.weights.lookup import Lookup
from fer.weights.pauses import without_gc
from fer.weights.votes import together

if TYPE_CHECKING:
    from torch import nn

    from fer.engines.base import Engine, EngineIdentity
    from fer.stages import Start
    from fer.weights.attach import Attached
    from fer.weights.client import KeeperClient

log = logging.getLogger("fer")


class WeightsStage(Stage):
    """Stage one."""

    name = "weights"

    def __init__(self) -> None:
        self._skeleton: nn.Module | None = None

    def imagine(self, engine: Engine) -> None:
        """The empty module. What is wrong is told when it is built for use."""
        with suppress(Exception), without_gc():
            self._skeleton = skeleton_of(engine, Report())

    def begin(self, start: Start) -> None:
        """Make the device's context and reserve its addresses, beside the imports.

        What goes wrong here is told when the device is opened for use.
        """
        if _opens_early(start):
            open_ahead(start.engine.device, start.options.transport)

    def prepare(self, start: Start) -> None:
        """The same, to its end, before communicators map memory of their own."""
        if _opens_early(start) and not start.engine.alone():
            with suppress(FerError), start.report.step("open device"):
                open_backend(start.engine.device, start.options.transport)

    def ahead(self, start: Start) -> None:
        """The empty module, while the device is being opened: a start that attaches has use for it."""
        if not _opens_early(start) or not start.engine.alone():
            return
        with start.report.step("identity"):
            identity = start.engine.identity()
        quantization.check(identity.quantization, identity.quantization_config)
        if self._skeleton is None:
            with suppress(Exception), without_gc():  # what is wrong is told when it is built for use
                self._skeleton = skeleton_of(start.engine, start.report)

    def run(self, start: Start) -> None:
        """Leave the engine with its module, attached or loaded."""
        engine, options = start.engine, start.options
        if not options.weights or options.mode == "off":
            engine.adopt(engine.load())
            start.report.stage("weights", path="off", why="mode=off" if options.weights else "weights=false")
            return
        with start.report.step("identity"):
            identity = engine.identity()
        quantization.check(identity.quantization, identity.quantization_config)
        with start.report.step("connect"):
            label = f"{identity.engine} {identity.model}"
            client, note = together(engine, lambda: connect(options, label=label), "connecting to its keeper")
        if not engine.agree(client is not None):
            if client is not None:
                client.close()
            _load_unkept(start, note if client is None else "another rank of this launch has no keeper")
            return
        assert client is not None
        kept = False
        try:
            workshop, why = _open(start, self._skeleton)
            self._skeleton = None
            if not engine.agree(workshop is not None):
                _load_unkept(start, why or "another rank of this launch cannot open its device for FER")
                return
            assert workshop is not None
            with without_gc():
                attempt = together(
                    engine, lambda: _Attempt(start, identity, client, note, workshop), "reading its checkpoint"
                )
            attempt.run()
            kept = attempt.kept
        finally:
            if not kept:
                client.close()


def _opens_early(start: Start) -> bool:
    options, device = start.options, start.engine.device
    if not options.weights or options.mode == "off" or device == "cpu":
        return False
    # Else which card is this rank's is not settled yet.
    return ":" in device or int(os.environ.get("WORLD_SIZE", "1")) == 1


def _open(start: Start, skeleton: nn.Module | None) -> tuple[Workshop | None, str]:
    """The engine's device, opened for slabs; or None and why that cannot be (no driver bindings, no sharing)."""
    try:
        return Workshop(start.engine, start.options, start.report, skeleton), ""
    except MemoryFault as error:
        log.warning("the device cannot be opened for kept weights: %s", error)
        return None, str(error)


def _load_unkept(start: Start, why: str) -> None:
    """The engine's own path, where there is no keeper to speak to, or no memory that it could keep."""
    if start.options.on_miss == "fail":
        raise Miss("the weights cannot be attached", why=why, fix="Run fer doctor, or set on_miss=load", reasons=[why])
    start.engine.adopt(start.engine.load())
    start.report.stage("weights", path="loaded", why=why, published=False)


class _Attempt:
    """One run of the stage with a keeper.

    The keeper may go away for good at any point. Then the engine goes on alone, as if there never had been one, and
    the report says so; it never fails for want of FER. What a rank finds out alone is voted on before it is acted on.

    Attributes:
        kept: True once the connection, and with it the lease, belongs to a living module.
        alone: this launch must not publish: the keeper is gone, another launch has the part, or what it would publish
            is kept already, and memory to attach it with is lacking.
        gone: the keeper is.
    """

    def __init__(
        self, start: Start, identity: EngineIdentity, client: KeeperClient, note: str, workshop: Workshop
    ) -> None:
        self.engine, self.options, self.report = start.engine, start.options, start.report
        self.identity, self.client, self.note = identity, client, note
        self.kept = self.timed_out = self.alone = self.gone = False
        self.workshop = workshop
        with self.report.step("fingerprint"):
            self.lookup = Lookup(client, identity, self.workshop.backend)
        self.alone = bool(self.lookup.unknown)

    def run(self) -> None:
        deadline = time.monotonic() + self.options.wait_s
        while (outcome := self._attach()) != "attached":
            if outcome == "tried":
                continue  # another edition may fit; what could not be attached is not chosen again
            why = "; ".join(self.lookup.reasons)
            if self.options.on_miss == "fail":
                raise Miss(
                    "no kept edition fits",
                    why=why,
                    fix="Run fer explain for the differing fields, publish with fer load, or set on_miss=load",
                    reasons=list(self.lookup.reasons),
                )
            outcome = self._claim(deadline)
            if outcome == "look_again":
                continue
            if outcome == "claimed":
                self._load_and_publish()
            else:
                self._load_alone()
            return

    def _gone(self, error: KeeperError) -> None:
        """The keeper refuses or is gone: say so, and go on without it."""
        log.warning("going on without the keeper: %s", error)
        self.lookup.reasons.append(str(error))
        self.alone = self.gone = True

    # --- attach ---

    def _attach(self) -> str:
        """Attach on all ranks or on none: ``"attached"``, ``"tried"`` (in vain) or ``"miss"``."""
        engine, lookup = self.engine, self.lookup
        candidate = None
        try:
            with self.report.step("look"), without_gc():
                candidate = lookup.choose()
        except KeeperError as error:
            self._gone(error)
        except CheckpointError as error:  # a file changed while it was compared
            lookup.reasons.append(str(error))
        if not engine.agree(candidate is not None):
            if candidate is not None:
                lookup.reasons.append("another rank of this launch has no edition that fits")
            return "miss"
        assert candidate is not None
        attached = self._try_attach(candidate.edition)
        if not engine.agree(attached is not None):
            if attached is not None:
                why = "another rank of this launch could not attach its edition"
                lookup.passed_over(candidate.edition, why, sound=True)
                with suppress(KeeperError):
                    self.client.release(candidate.edition)
            return "tried"
        assert attached is not None
        engine.adopt(attached.module)
        self._keep(attached.module)
        with suppress(KeeperError):  # only saves the next start some reading
            lookup.refresh(candidate)
        self.report.stage(
            "weights",
            path="attached",
            why=self._with_note(lookup.why),
            edition=candidate.edition,
            bytes=attached.bytes,
            slabs=len(attached.manifest.slabs),
            moved=attached.moved,
            verified=attached.verified,
            copied=attached.copied,
            transport=attached.transport,
            **self._keepers_end(),
        )
        return "attached"

    def _try_attach(self, edition: str) -> Attached | None:
        try:
            return patiently(lambda: self._attach_once(edition))
        except OutOfMemory as error:
            log.warning("edition %s could not be attached: %s", edition, error)
            self.lookup.lacked(edition, error)
            self.alone = True
        except FerError as error:
            log.warning("edition %s could not be attached: %s", edition, error)
            self.lookup.broken(edition, error)
        except Exception as error:  # a bug of ours must not take down an engine that can load
            log.exception("attaching edition %s failed", edition)
            bug = FerBug(f"{type(error).__name__}: {error}", fix="Please report it with the log")
            self.lookup.broken(edition, bug)
        return None

    def _attach_once(self, edition: str) -> Attached:
        """Raises OutOfMemory, without a lease: where an engine is dying, there may be enough in a moment."""
        try:
            return self.workshop.attach_edition(self.client, edition)
        except (FerError, MemoryError, RuntimeError) as error:  # the driver says it through torch in many words
            if not lacks_memory(error):
                raise
            with suppress(KeeperError):
                self.client.release(edition)
            if isinstance(error, OutOfMemory):
                raise
            raise OutOfMemory(
                "there is no memory to check or copy kept weights with",
                why=str(error).partition("\n")[0],
                fix="End what else uses the device's memory.",
            ) from error

    def _keep(self, module: nn.Module, digests: Digests | None = None) -> None:
        """Tie the lease to the module's life: it stands while the module is used, and ends with it."""
        self.kept = True
        weakref.finalize(module, _let_go, self.client, digests)

    # --- miss ---

    def _claim(self, deadline: float) -> str:
        """What all ranks do next: ``"claimed"`` (load and publish), ``"look_again"`` or ``"alone"`` (only load)."""
        engine = self.engine
        outcome = "alone" if self.alone else self._claim_alone(deadline)
        nobody_looks_again = engine.agree(outcome != "look_again")
        all_claimed = engine.agree(outcome == "claimed")
        if all_claimed:
            return "claimed"
        if outcome == "claimed":
            with suppress(KeeperError):
                self.client.unclaim()
        # A rank whose keeper is gone cannot look again, and no rank may look without it.
        everybody_can = engine.agree(not self.alone)
        return "look_again" if everybody_can and not nobody_looks_again else "alone"

    def _claim_alone(self, deadline: float) -> str:
        wait_s = max(0.0, deadline - time.monotonic())
        try:
            with self.report.step("wait for another loader"):
                claim = self.client.claim(self.lookup.key, wait_s=wait_s)
        except KeeperError as error:  # gone, or two launches met, or a rank of this one failed
            self._gone(error)
            return "alone"
        if claim.outcome == "timeout":
            who = f"{claim.holder.label or 'process'} {claim.holder.pid}" if claim.holder else "another engine"
            self.lookup.reasons.append(f"waited {wait_s:.0f} s for {who}, which loads the same weights")
            self.timed_out = self.alone = True
        return claim.outcome if claim.outcome != "timeout" else "alone"

    def _load_alone(self) -> None:
        why = "; ".join(self.lookup.reasons)
        if self.options.on_wait_timeout == "fail" and not self.engine.agree(not self.timed_out):
            raise WaitTimeout(
                "the weights are being loaded by another engine and did not become visible in time",
                why=why,
                fix="Raise wait_s, or set on_wait_timeout=load",
            )
        evicted = self._make_room(publish=False)
        # Else nothing would be kept any more of what a rank had to evict, however sound it was.
        if not self.engine.agree(not self.lookup.gave_way()) and self.engine.agree(not self.gone):
            self._load_and_publish(evicted)
            return
        self.engine.adopt(self.engine.load())
        self.report.stage("weights", path="loaded", why=self._with_note(why), published=False, **_told(evicted))

    def _make_room(self, *, publish: bool) -> list[str]:
        """Evict what stands in the way; all ranks fit, or none goes on."""

        def make() -> list[str]:
            try:
                with self.report.step("make room"):
                    needed = self.engine.estimated_bytes()
                    found = room.make(self.client, self.workshop.backend, needed, publish=publish)
            except KeeperError as error:
                self._gone(error)
                return []
            return [info.edition for info in found]

        return together(self.engine, make, "making room for its weights")

    def _load_and_publish(self, evicted: list[str] | None = None) -> None:
        self.lookup.clear_the_way()
        if evicted is None:
            evicted = self._make_room(publish=True)
        before = checkpoint.stamp(self.identity.checkpoint)
        with self.report.step("load"):
            module = self.engine.load()
        published, trouble = self._publish(module, before)
        self.engine.adopt(module)
        why = self._with_note("; ".join(self.lookup.reasons))
        if published is None:
            why = f"{why}; not published: {trouble}"
            self.report.stage("weights", path="loaded", why=why, published=False, **_told(evicted))
            return
        digests = Digests(self.client, published.edition, self.identity.checkpoint, before, published.tensors)
        self._keep(module, digests)
        digests.start()
        self.report.stage(
            "weights",
            path="loaded",
            why=why,
            published=True,
            edition=published.edition,
            bytes=published.bytes,
            slabs=published.slabs,
            peak_extra_bytes=published.peak_extra,
            copy_s=round(published.copy_s, 6),
            transport=published.transport,
            **_told(evicted),
            **self._keepers_end(),
        )

    def _publish(self, module: nn.Module, before: checkpoint.CheckpointIdentity) -> tuple[Published | None, str]:
        """The committed edition, or None and why not; the module is whole and usable either way."""
        key, fields = self.lookup.key, self.lookup.fields
        try:
            self._refuse_changed(before)
            with self.report.step("publish"):
                return self.workshop.publish_module(self.client, module, key, fields, before), ""
        except FerError as error:
            log.warning("the weights were not published: %s", error)
            return None, f"{type(error).__name__}: {error}"
        except Exception as error:  # a bug of ours must not take down an engine that has its weights
            log.exception("publishing failed")
            return None, f"bug in FER, please report: {type(error).__name__}: {error}"

    def _refuse_changed(self, before: checkpoint.CheckpointIdentity) -> None:
        changes = checkpoint.changed(before, checkpoint.stamp(self.identity.checkpoint))
        if changes:
            raise PublishRefused(
                "the checkpoint changed while it was loaded",
                why="; ".join(changes[:3]),
                fix="Start again once the checkpoint is complete; what was loaded may mix two checkpoints",
                files=changes,
            )

    def _with_note(self, why: str) -> str:
        return f"{why}; {self.note}" if self.note else why

    def _keepers_end(self) -> dict[str, bool]:
        """A detail of the report where the keeper would not outlive the engine's unit or container."""
        return {"keeper_ends_with_engine": True} if ends_with_us(self.client) else {}


def _told(evicted: list[str]) -> dict[str, list[str]]:
    """What was evicted, as a detail of the report; nothing where nothing was."""
    return {"evicted": evicted} if evicted else {}


def _let_go(client: KeeperClient, digests: Digests | None) -> None:
    if digests is not None:
        digests.cancel()
    client.close()
