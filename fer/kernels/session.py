"""One start's kernels: restored before the first one is asked for, recorded, and written back when the engine serves.

Called by :class:`fer.kernels.stage.KernelsStage`, which says how its steps follow each other.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fer.errors import FerError
from fer.kernels import chain, coverage, gpus, hooks, places, store
from fer.paths import check_private
from fer.stages import Start

if TYPE_CHECKING:
    from fer.kernels.manifest import Manifest
    from fer.kernels.unpack import Outcome

log = logging.getLogger("fer")
_WAIT_S: Final = 60.0
_FETCH_S: Final = 30.0
_TOLD: Final = 3
"""Reasons told in the stage's line; the record has all."""


class Session:
    """What one start knows of its kernels."""

    def __init__(self) -> None:
        self._home: Path | None = None
        self._root: Path | None = None
        self._record: Path | None = None
        self._manifest: Manifest | None = None
        self._outcome: Outcome | None = None
        self._why: list[str] = []
        self._manager = ""
        self._broken = False
        self._trusted = True
        self._wanted: list[tuple[str, str]] = []

    def note(self, why: str) -> None:
        """One more reason for the report's line."""
        self._why.append(why)

    def finish(self, start: Start) -> None:
        """After the first token: tell what was found and what was compiled and why; the archive gets what it lacks."""
        records = coverage.read(self._record) if self._record is not None else []
        self._tell(start, coverage.summary(records, self._kept_parts()))
        if self._root is not None and not self._manager:
            # No daemon: a program that ends now waits until the writer has been told what to write.
            threading.Thread(target=self._write_back, args=(start, records), name="fer-kernels-finish").start()

    # -- before the first kernel

    def begin(self, start: Start) -> None:
        """Everything that has to happen before the first kernel.

        Raises:
            FerError: there is no folder for kernels at all.
        """
        self._home = start.options.home
        with start.report.step("kernels: look around") as span:
            place = places.choose(os.environ, home=self._home)
            self._root = place.path
            for path, why in place.refused.items():
                self._why.append(f"{path} is not used: {why}")
                log.warning("compiled kernels go to %s, not to %s: %s", place.path, path, why)
            if place.open_to:
                why = f"{place.open_to} can write to {place.path}, and so choose what this start runs"
                self._why.append(why)
                log.warning("%s; set %s to a folder of your own", why, places.VARIABLE)
            # For children, and for torch's compiler, which would choose a folder of its own.
            os.environ[places.VARIABLE] = str(place.path)
            installed = hooks.install(home=self._home)
            self._manager = installed.manager
            if self._manager:
                self._why.append(self._manager)
            if installed.behind:
                self._why.append(f"{installed.behind} is asked where FER's cache has nothing")
            self._record = self._new_record()
            span.details["cache"] = str(place.path)
        archive = self._archive(start)
        if archive is not None and not self._manager:
            with start.report.step("kernels: restore") as span:
                self._restore(archive)
                span.details["restored"] = len(self._outcome.restored) if self._outcome else 0
        self._compiler(start)
        if why := places.lacks_compiler(os.environ, self._root, helpers_fit=self._misfit()):
            self._why.append(why)
            log.warning("%s", why)
        usable = self._outcome.usable if self._outcome else 0
        start.report.expect("kernels", "restored" if usable else "loaded", "nothing was asked for yet")

    def _new_record(self) -> Path | None:
        """A folder for this start's records, told to children; a start among ranks' children keeps its parent's."""
        try:
            made = store.new_start(self._home)
        except (OSError, FerError) as error:
            self._why.append(f"compilations are not recorded: {error}")
            return None
        os.environ[coverage.VARIABLE] = str(made)
        return made

    def _archive(self, start: Start) -> Path | None:
        """The archive for the GPU that is here; None where there is none. Looks for the GPU only if there is one."""
        found = store.of_prefix(self._home, _prefix(start))
        if found:
            seen = gpus.look()
            archs = [str(arch) for arch in seen.archs] if seen else list(found)
            fitting = next((found[arch] for arch in archs if arch in found), None)
            if fitting is not None:
                self._trusted = _is_private(fitting.parent)
                return fitting
        return self._fetched(start.options.kernels_source) if start.options.kernels_source else None

    def _fetched(self, text: str) -> Path | None:
        """The archive of the settings' source; whoever pins its content by a digest vouches for code in it."""
        from fer.kernels import remote

        try:
            source = remote.Source.of(text)
            self._trusted = bool(source.digest)
            return remote.fetch(source, home=self._home, timeout_s=_FETCH_S)
        except (FerError, OSError) as error:
            self._why.append(f"kernels_source: {error}")
            log.warning("kernels are compiled, or found here: %s", error)
            return None

    def _restore(self, archive: Path) -> None:
        # Here and not above: a start without an archive pays for nothing.
        from filelock import FileLock, Timeout

        from fer.kernels import compat, unpack, warm

        assert self._root is not None
        try:
            # One rank of a host unpacks, the others wait and find everything in place.
            # Not beside the archive, which may be somebody else's.
            with FileLock(store.folder(self._home) / f"{archive.name}.restore.lock", timeout=_WAIT_S, mode=0o600):
                terms = unpack.Terms(
                    code="take" if self._trusted else "skip",
                    here=lambda made: compat.live(ask_triton=False, host=bool(made.host), home=self._home),
                    glance=True,
                )
                self._outcome = unpack.unpack(archive, self._roots(), terms)
        except Timeout:
            self._why.append(f"another process held {archive} for {_WAIT_S:.0f} s")
            return
        except (FerError, OSError) as error:
            self._why.append(str(error))
            self._broken = isinstance(error, FerError)
            log.warning("kernels are compiled as usual: %s", error)
            return
        manifest = self._manifest = self._outcome.manifest
        usable = {*self._outcome.restored, *self._outcome.kept, *self._outcome.healed}
        known = (manifest.parts_of(each) for each in manifest.entries if each.path in usable)
        self._wanted = warm.specializations(known)

    def warm(self) -> None:
        """Prepare in threads what was restored. Triton asks torch for the device, which loads torch's own modules."""
        if self._wanted:
            from fer.kernels import warm

            warm.begin(self._wanted)

    def _roots(self) -> dict[str, Path]:
        """Folders of all caches, as far as they have a place."""
        from fer.kernels.registry import REGISTRY

        assert self._root is not None
        places = {name: component.where(os.environ) for name, component in REGISTRY.items()}
        own = {name: store.folder(self._home) / name for name in ("inductor", "markers")}
        return {name: place for name, place in places.items() if place is not None} | own | {"triton": self._root}

    def _compiler(self, start: Start) -> None:
        """What torch's compiler kept in an earlier start, back into it; its kernels are in Triton's cache."""
        root = store.folder(self._home) / "inductor"
        if not (root / _blob(start)).is_dir():
            return
        from fer.kernels import inductor

        with start.report.step("kernels: torch's compiler"):
            loaded = inductor.load(root, _blob(start), self._root)
        if loaded is not None and loaded.missing:
            self._why.append(f"torch's artifacts are back, {len(loaded.missing)} of their kernels are not")

    def _misfit(self) -> str:
        """How the archive's host libraries differ from this installation, where it has some that were skipped."""
        if self._outcome is None:
            return ""
        code = {each.path for each in self._outcome.manifest.entries if each.code}
        return next((why for path, why in self._outcome.skipped.items() if path in code), "")

    # -- after the first token

    def _kept_parts(self) -> list[dict[str, Any]]:
        if self._manifest is None:
            return []
        return [self._manifest.parts_of(each) for each in self._manifest.entries]

    def _tell(self, start: Start, summary: coverage.Summary) -> None:
        outcome = self._outcome
        usable = outcome.usable if outcome else 0
        why = [*self._why, *filter(None, [chain.trouble()])]
        if outcome and outcome.skipped:
            why.append(f"{len(outcome.skipped)} not used: {next(iter(outcome.skipped.values()))}")
        why += [f"{name} compiled: {reason}" for name, reason in summary.missed[:_TOLD]]
        if not (summary.compiled or summary.hits or why):
            why.append("no kernel was asked for")
        start.report.stage(
            "kernels",
            "restored" if usable else "loaded",
            "; ".join(why),
            kept=usable,
            restored=len(outcome.restored) if outcome else 0,
            hits=summary.hits,
            compiled=summary.compiled,
            compile_s=round(summary.compile_ms / 1e3, 6),
            record=str(self._record or ""),
        )

    def _write_back(self, start: Start, records: list[coverage.Record]) -> None:
        """In a thread: what the start added to any cache goes into the archive, by a process of its own."""
        try:
            from fer.kernels import inductor, writer

            assert self._root is not None
            keys = {record.key for record in records}
            inductor.save(store.folder(self._home) / "inductor", _blob(start), keys)
            kept = {each.path for each in self._manifest.entries} if self._manifest is not None else set()
            roots = {name: place for name, place in self._roots().items() if name != "triton"}
            since = start.report.started_at
            added = {name: str(place) for name, place in roots.items() if writer.fresh(name, place, since)}
            arch = self._arch(records)
            if arch is None or (keys <= kept and not added):
                return
            kept_others = {each.component for each in self._manifest.entries} if self._manifest is not None else set()
            others = added | {name: str(place) for name, place in roots.items() if name in kept_others}
            out = store.path_for(self._home, _prefix(start), str(arch))
            request = writer.Request(
                str(self._root), str(out), sorted(keys), arch, doubt=self._broken, others=others, since=since
            )
            writer.begin(request)
        except Exception:  # the engine serves already
            log.exception("compiled kernels were not written back")

    def _arch(self, records: list[coverage.Record]) -> int | None:
        """The GPU's architecture, by what was compiled for it, else by the driver."""
        told = (record.parts.get("arch") for record in records)
        arch = next((each for each in told if isinstance(each, int)), None)
        if arch is None:
            seen = gpus.look()
            arch = seen.archs[0] if seen and seen.archs else None
        return arch


def _prefix(start: Start) -> str:
    identity = start.engine.identity()
    model = os.path.abspath(identity.model) if os.path.exists(identity.model) else identity.model
    return store.prefix_for(identity.engine, model)


def _blob(start: Start) -> str:
    """Name of what torch's compiler keeps for one rank."""
    ranks = start.engine.identity().ranks
    return f"{_prefix(start)}-tp{ranks.tp_rank}-pp{ranks.pp_rank}-dp{ranks.dp_rank}"


def _is_private(folder: Path) -> bool:
    """Whether nobody else could have put an archive there: then its host libraries are this user's own."""
    try:
        check_private(folder)
    except (FerError, OSError):
        return False
    return True
