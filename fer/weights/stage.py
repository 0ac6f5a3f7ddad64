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
import time
import weakref
from typing import TYPE_CHECKING

from fer.errors import FerBug, FerError, Miss, OutOfMemory, PublishRefused, Refused, WaitTimeout
from fer.stages import Stage
from fer.weights import checkpoint, quantization, room
from fer.weights.background import Digests
from fer.weights.connect import connect
from fer.weights.edition import Published, Workshop
from fer.weights.lookup import Lookup
from fer.weights.pauses import without_gc

if TYPE_CHECKING:
    from torch import nn

    from fer.engines.base import EngineIdentity
    from fer.stages import Start
    from fer.weights.client import KeeperClient

log = logging.getLogger("fer")


class WeightsStage(Stage):
    """Stage one."""

    name = "weights"

    def run(self, start: Start) -> None:
        """Leave the engine with its module, attached or loaded."""
        options = start.options
        if not options.weights or options.mode == "off":
            start.engine.adopt(start.engine.load())
            start.report.stage("weights", path="off", why="mode=off" if options.weights else "weights=false")
            return
        with start.report.step("identity"):
            identity = start.engine.identity()
        quantization.check(identity.quantization, identity.quantization_config)
        with start.report.step("connect"):
            client, note = connect(options, label=f"{identity.engine} {identity.model}")
        if client is None:
            _load_unkept(start, note)
            return
        with without_gc():
            attempt = _Attempt(start, identity, client, note)
        try:
            attempt.run()
        finally:
            if not attempt.kept:
                client.close()


def _load_unkept(start: Start, why: str) -> None:
    """The engine's own path, where there is no keeper to speak to."""
    if start.options.on_miss == "fail":
        raise Miss("the weights cannot be attached", why=why, fix="Start a keeper, or set on_miss=load", reasons=[why])
    start.engine.adopt(start.engine.load())
    start.report.stage("weights", path="loaded", why=why)


class _Attempt:
    """One run of the stage with a keeper.

    Attributes:
        kept: True once the connection, and with it the lease, belongs to a living module.
    """

    def __init__(self, start: Start, identity: EngineIdentity, client: KeeperClient, note: str) -> None:
        self.engine, self.options, self.report = start.engine, start.options, start.report
        self.identity, self.client, self.note = identity, client, note
        self.kept = self.timed_out = False
        self.workshop = Workshop(self.engine, self.options, self.report)
        with self.report.step("fingerprint"):
            self.lookup = Lookup(client, identity, self.workshop.backend)

    def run(self) -> None:
        deadline = time.monotonic() + self.options.wait_s
        while not self._attach():
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
                self._load_and_publish(why)
            else:
                self._load_alone()
            return

    # --- attach ---

    def _attach(self) -> bool:
        """Attach on all ranks, or on none."""
        engine, lookup = self.engine, self.lookup
        with self.report.step("look"), without_gc():
            candidate = lookup.choose()
        if not engine.agree(candidate is not None):
            if candidate is not None:
                lookup.reasons.append("another rank of this launch has no edition that fits")
            return False
        assert candidate is not None
        attached = None
        try:
            attached = self.workshop.attach_edition(self.client, candidate.edition)
        except FerError as error:
            log.warning("edition %s could not be attached: %s", candidate.edition, error)
            lookup.broken(candidate.edition, error)
        except Exception as error:  # a bug of ours must not take down an engine that can load
            log.exception("attaching edition %s failed", candidate.edition)
            bug = FerBug(f"{type(error).__name__}: {error}", fix="Please report it with the log")
            lookup.broken(candidate.edition, bug)
        if not engine.agree(attached is not None):
            if attached is not None:
                lookup.reasons.append("another rank of this launch could not attach its edition")
                self.client.release(candidate.edition)
            return False
        assert attached is not None
        engine.adopt(attached.module)
        self._keep(attached.module)
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
        )
        return True

    def _keep(self, module: nn.Module, digests: Digests | None = None) -> None:
        """Tie the lease to the module's life: it stands while the module is used, and ends with it."""
        self.kept = True
        weakref.finalize(module, _let_go, self.client, digests)

    # --- miss ---

    def _claim(self, deadline: float) -> str:
        """What all ranks do next: ``"claimed"`` (load and publish), ``"look_again"`` or ``"alone"`` (only load)."""
        engine = self.engine
        outcome = self._claim_alone(deadline)
        nobody_looks_again = engine.agree(outcome != "look_again")
        all_claimed = engine.agree(outcome == "claimed")
        if all_claimed:
            return "claimed"
        if outcome == "claimed":
            self.client.unclaim()
        return "alone" if nobody_looks_again else "look_again"

    def _claim_alone(self, deadline: float) -> str:
        if self.lookup.unknown:
            return "alone"
        wait_s = max(0.0, deadline - time.monotonic())
        try:
            with self.report.step("wait for another loader"):
                claim = self.client.claim(self.lookup.key, wait_s=wait_s)
        except Refused as error:  # two launches met, or a rank of this one failed: this launch may not publish
            self.lookup.reasons.append(str(error))
            return "alone"
        if claim.outcome == "timeout":
            who = f"{claim.holder.label or 'process'} {claim.holder.pid}" if claim.holder else "another engine"
            self.lookup.reasons.append(f"waited {wait_s:.0f} s for {who}, which loads the same weights")
            self.timed_out = True
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
        self.engine.adopt(self.engine.load())
        self.report.stage("weights", path="loaded", why=self._with_note(why), published=False, **_told(evicted))

    def _make_room(self, *, publish: bool) -> list[str]:
        """Evict what stands in the way; the same answer on every rank."""
        trouble: OutOfMemory | None = None
        evicted: list[str] = []
        try:
            with self.report.step("make room"):
                found = room.make(self.client, self.workshop.backend, self.engine.estimated_bytes(), publish=publish)
            evicted = [info.edition for info in found]
        except OutOfMemory as error:
            trouble = error
        if self.engine.agree(trouble is None):
            return evicted
        raise trouble or OutOfMemory("another rank of this launch has no room for its weights")

    def _load_and_publish(self, why: str) -> None:
        evicted = self._make_room(publish=True)
        before = checkpoint.stamp(self.identity.checkpoint)
        with self.report.step("load"):
            module = self.engine.load()
        published: Published | None = None
        trouble = ""
        try:
            self._refuse_changed(before)
            with self.report.step("publish"):
                published = self.workshop.publish_module(
                    self.client, module, self.lookup.key, self.lookup.fields, before
                )
        except FerError as error:
            trouble = f"{type(error).__name__}: {error}"
            log.warning("the weights were not published: %s", error)
        except Exception as error:  # a bug of ours must not take down an engine that has its weights
            trouble = f"bug in FER, please report: {type(error).__name__}: {error}"
            log.exception("publishing failed")
        self.engine.adopt(module)
        if published is None:
            why = self._with_note(f"{why}; not published: {trouble}")
            self.report.stage("weights", path="loaded", why=why, published=False, **_told(evicted))
            return
        digests = Digests(self.client, published.edition, self.identity.checkpoint, before, published.tensors)
        self._keep(module, digests)
        digests.start()
        self.report.stage(
            "weights",
            path="loaded",
            why=self._with_note(why),
            published=True,
            edition=published.edition,
            bytes=published.bytes,
            slabs=published.slabs,
            peak_extra_bytes=published.peak_extra,
            copy_s=round(published.copy_s, 6),
            transport=published.transport,
            **_told(evicted),
        )

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


def _told(evicted: list[str]) -> dict[str, list[str]]:
    """What was evicted, as a detail of the report; nothing where nothing was."""
    return {"evicted": evicted} if evicted else {}


def _let_go(client: KeeperClient, digests: Digests | None) -> None:
    if digests is not None:
        digests.cancel()
    client.close()
