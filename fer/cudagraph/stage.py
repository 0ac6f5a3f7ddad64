"""The CUDA graph stage: restore what is kept; else capture, save, and prove what was saved.

One start, step by step::

    prepare    reserve the ranges; an archive that fits and is proven? restore in the background, beside the weights
               otherwise subscribe to CUPTI, before the first module is loaded
    placing    the key/value cache and the inputs are allocated in their ranges
    run        restored: is everything where it was? check outputs, hand the graphs to the engine -> path=restored
               otherwise: capture with frozen GC, serve from that, save, prove in a child        -> path=loaded

Whatever fails here, the engine serves: graphs that are not restored are captured as usual, and the report says why.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fer.cudagraph import plan as planning
from fer.cudagraph import state
from fer.cudagraph.plan import Plan
from fer.cudagraph.restore import touched
from fer.cudagraph.save import name_of
from fer.cudagraph.session import Session, moved, owners_of
from fer.errors import DriverError, FerError, MappingError, OutOfMemory
from fer.paths import ensure_private
from fer.stages import Start, Wide

if TYPE_CHECKING:
    from fer.cudagraph.capture import Baseline, Captured
    from fer.engines.graphs import DecodeGraphs

log = logging.getLogger("fer")

_WAIT_S = 120.0
_LATE = "the restore did not end in time"

FAST: Final = 2
"""Graphs that a fast check replays: those of fewest outputs, which cost least to compare."""

FIRST: Final = 4
"""Graphs, those of most traffic, that a start waits for; the engine serves while the others follow."""


class CudaGraphStage(Wide):
    """Stage three."""

    name = "cudagraph"

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._graphs: DecodeGraphs | None = None
        self._why = ""
        self._placed = False

    def prepare(self, start: Start) -> None:
        """Reserve, and begin to restore or to record."""
        if not start.options.cudagraph or start.options.mode == "off" or not start.engine.device.startswith("cuda"):
            return
        self._graphs = start.engine.graphs()
        if self._graphs is None:
            return
        with start.report.step("plan graphs") as span:
            try:
                self._plan = planning.make(start, self._graphs)
                span.details["restoring"] = self._plan.archive is not None
            except FerError as error:
                self._why = str(error)
            except Exception as error:  # a bug of ours must not take down an engine
                self._why = f"bug in FER, please report: {type(error).__name__}: {error}"
                log.exception("the graphs' stage failed before the weights")
            plan = self._plan
            # Asked on every rank, whatever happened on it: all restore, or none.
            together = start.engine.agree(plan is not None and plan.archive is not None)
            if plan is not None and plan.archive is not None and not together:
                plan.archive, plan.why = None, "another rank of this launch has no archive that fits"
            if plan is not None:
                planning.begin(plan)

    @contextmanager
    def placing(self, start: Start) -> Iterator[None]:
        """The cache into ``kv``, inputs into ``static``; where that fails, wherever torch puts them."""
        plan, graphs = self._plan, self._graphs
        if plan is None or graphs is None:
            yield
            self._allocate()
            return
        try:
            plan.ranges.kv.map(graphs.kv_bytes(), chunk=1 << 30)
            plan.ranges.static.map(graphs.static_bytes)
        except (OutOfMemory, MappingError, DriverError) as error:
            self._give_up(str(error))
            yield
            self._allocate()
            return
        with plan.ranges.kv.place():
            yield
        plan.ranges.kv.trim()
        with plan.ranges.static.place():
            graphs.allocate()
        self._placed = True

    def run(self, start: Start) -> None:
        """Leave the engine with graphs for every batch size, restored or captured, and report."""
        if not start.options.cudagraph or start.options.mode == "off":
            start.report.stage(
                self.name, path="off", why="cudagraph=false" if start.options.mode != "off" else "mode=off"
            )
        elif self._graphs is None:
            start.report.stage(self.name, path="absent", why="the engine describes no graphs; its own path")
        else:
            with _on(start.engine.device):
                self._provide(start)

    def _provide(self, start: Start) -> None:
        if self._plan is not None and self._plan.archive is not None:
            self._restore(start, self._plan, self._plan.graphs)
            return
        start.engine.agree(False)  # ranks that restored ask whether all did
        if self._plan is None:
            self._capture_alone(start, self._why)
        else:
            self._capture_and_save(start, self._plan, self._plan.graphs)

    # -- restore

    def _restore(self, start: Start, plan: Plan, graphs: DecodeGraphs) -> None:
        """Hand over what is ready and right; the rest follows, or is captured."""
        archive, restorer = plan.archive, plan.restorer
        assert archive is not None and restorer is not None and plan.state is not None
        wrong = moved(plan, owners_of(plan))
        known = {**archive.facts.get("refused", {}), **plan.state.quarantined}
        gone = touched(archive.facts, wrong)
        useless = len(gone) == len(archive.facts["order"])
        if useless:
            restorer.cancel()
        # Ranks must have the same graphs, and a complete check needs all of them; else the first few are enough.
        patient = useless or start.options.verify == "full" or not _alone(start)
        with start.report.step("wait for graphs"):
            in_time = restorer.wait(_WAIT_S, count=None if patient else FIRST)
        if not in_time:
            restorer.cancel()
        if wrong:
            self._outdate(plan, wrong)
        with start.report.step("check graphs"):
            failed = self._check(start, plan, graphs, gone)
        outcome = _Outcome(known, {**gone, **({} if in_time else dict.fromkeys(_left(plan), _LATE))}, failed)
        session = Session(plan, graphs, {**outcome.all})
        graphs.session = session
        plan.ready.open(session.use)
        if restorer.wait(0) or patient:
            self._conclude(start, plan, graphs, session, outcome)
            return
        _say(start, plan, session, outcome, captured=0, under_way=len(_left(plan)))
        restorer.after(lambda: self._follow(start, plan, session, outcome))

    def _conclude(self, start: Start, plan: Plan, graphs: DecodeGraphs, session: Session, outcome: _Outcome) -> None:
        """All is ready or failed: capture what is not there, now."""
        outcome.take(plan)
        if outcome.news:
            self._quarantine(plan, outcome.news)
        if not session.used and plan.restorer is not None:
            plan.restorer.abandon()
        # Steps may hold collectives, so ranks capture together what one of them lacks.
        everywhere = start.engine.agree(not (outcome.news or outcome.gone)) or _alone(start)
        sizes = [size for size in graphs.batch_sizes if name_of(size) in outcome.all or not everywhere]
        captured = self._capture(start, graphs, sizes, None, keep=False) if sizes else None
        _say(start, plan, session, outcome, captured=len(captured.graphs) if captured else 0)

    def _follow(self, start: Start, plan: Plan, session: Session, outcome: _Outcome) -> None:
        """The engine serves already when the last graph is ready or failed; it captures what failed when it is idle."""
        outcome.take(plan)
        if outcome.news:
            self._quarantine(plan, outcome.news)
        session.miss(outcome.all)
        _say(start, plan, session, outcome, captured=0)

    def _check(self, start: Start, plan: Plan, graphs: DecodeGraphs, gone: Mapping[str, str]) -> dict[str, str]:
        """Replay graphs against their recorded outputs: one or two (fast), all (full)."""
        names = [name for name in plan.ready.graphs if name not in gone]
        if start.options.verify == "off" or not names:
            return {}
        full = start.options.verify == "full"
        chosen = names if full else sorted(names, key=lambda name: _output_bytes(plan, name))[:FAST]
        assert plan.archive is not None
        golden = plan.archive.facts["golden"].get(planning.checkpoint_name(start))
        if not _alone(start):  # an eager step of one rank would wait for the others
            chosen = [name for name in chosen if golden and all(golden.get(name, ("",)))]
        from fer.cudagraph.check import check

        return check(plan, graphs, chosen, golden, deep=full)

    def _quarantine(self, plan: Plan, failed: Mapping[str, str]) -> None:
        assert plan.state is not None
        plan.state.quarantined.update(failed)
        self._write_down(plan)

    def _outdate(self, plan: Plan, wrong: Mapping[str, str]) -> None:
        """Memory lies elsewhere, and may for long (other weights beside the first): the next start records again."""
        assert plan.state is not None
        plan.state.outdated = next(iter(wrong.values()))
        self._write_down(plan)

    def _write_down(self, plan: Plan) -> None:
        assert plan.state is not None
        try:
            state.save(plan.path, plan.state)
        except FerError as error:
            log.warning("what became of the graphs could not be written down: %s", error)

    # -- capture

    def _capture_alone(self, start: Start, why: str) -> None:
        assert self._graphs is not None
        captured = self._capture(start, self._graphs, self._graphs.batch_sizes, None, keep=False)
        base = self._baseline(start, self._graphs)
        start.report.stage(self.name, path="loaded", why=why, saved=False, **_figures(captured, base))

    def _baseline(self, start: Start, graphs: DecodeGraphs) -> Baseline | None:
        """What a capture costs with and without the garbage collector; not where ranks would have to do it together."""
        from fer.cudagraph.capture import baseline

        with start.report.step("compare capture with default GC"):
            return baseline(graphs) if _alone(start) else None

    def _capture_and_save(self, start: Start, plan: Plan, graphs: DecodeGraphs) -> None:
        if plan.recorder is None or not self._placed:
            plan.close_recorder()
            self._capture_alone(start, "; ".join(part for part in (plan.why, plan.unsaved) if part))
            if plan.unproven:
                self._prove(start, plan, worth=True)
            return
        try:
            for each, wanted in ((plan.ranges.scratch, graphs.scratch_bytes), (plan.ranges.pool, graphs.pool_bytes)):
                each.map(min(wanted, plan.device.room().free // 3))
        except FerError as error:
            plan.close_recorder()
            self._capture_alone(start, f"{plan.why}; not saved: {error}")
            return
        try:
            captured = self._capture(start, graphs, graphs.batch_sizes, plan.ranges, keep=True)
        except RuntimeError as error:  # torch's word for lack of memory in a range, too
            plan.close_recorder()
            self._capture_alone(start, f"{plan.why}; not saved: {str(error).splitlines()[0]}")
            return
        if captured.troubles:  # those that did not fit into the range may fit elsewhere
            self._capture(start, graphs, list(captured.troubles), None, keep=False)
        plan.ranges.scratch.trim()
        plan.ranges.pool.trim()
        details: dict[str, Any] = {"saved": False}
        why = plan.why
        base = self._baseline(start, graphs)
        try:
            with start.report.step("save graphs") as span:
                details = self._save(start, plan, captured, base)
                span.details.update(details.get("save_s", {}))
        except FerError as error:
            why = f"{why}; not saved: {error}"
            log.warning("the graphs were not saved: %s", error)
        except Exception as error:  # a bug of ours must not take down an engine that has its graphs
            why = f"{why}; not saved: bug in FER, please report: {type(error).__name__}: {error}"
            log.exception("saving graphs failed")
        finally:
            plan.close_recorder()
        start.report.stage(self.name, path="loaded", why=why, **details, **_figures(captured, base))

    def _save(self, start: Start, plan: Plan, captured: Captured, base: Baseline | None) -> dict[str, Any]:
        from fer.cudagraph.save import save

        assert plan.recorder is not None
        ensure_private(plan.path.parent)
        facts = {
            "fingerprint": _plain(plan),
            "order": [name_of(size) for size in plan.graphs.batch_sizes],
            "captured": {f"native_{name}": value for name, value in _seconds(captured, base).items()},
        }
        saved = save(
            plan.path,
            plan.cuda,
            plan.recorder.seen,
            captured,
            plan.graphs,
            plan.ranges,
            planning.weights_of(plan),
            facts,
            planning.checkpoint_name(start),
        )
        self._prove(start, plan, worth=bool(saved.kept))
        return {
            "saved": True,
            "kept": len(saved.kept),
            "nodes": saved.nodes,
            "refused": "; ".join(f"{name}: {why}" for name, why in list(saved.refused.items())[:3]),
            "proof": "under way",
            "save_s": {name: round(seconds, 6) for name, seconds in saved.seconds.items()},
        }

    def _prove(self, start: Start, plan: Plan, *, worth: bool) -> None:
        from fer.cudagraph import proof

        weights = start.report.stages.get("weights")
        proof.begin(
            plan.path,
            ordinal=plan.device.ordinal,
            checkpoint=planning.checkpoint_name(start),
            edition=str(weights.details.get("edition", "")) if weights else "",
            runtime_dir=start.options.runtime_dir,
            worth=worth,
        )

    def _capture(
        self, start: Start, graphs: DecodeGraphs, sizes: Sequence[int], ranges: Any, *, keep: bool
    ) -> Captured:
        from fer.cudagraph.capture import capture

        with start.report.step("capture graphs", sizes=len(sizes)):
            captured = capture(graphs, sizes, ranges, keep=keep)
        for size, graph in captured.graphs.items():
            graphs.use(size, graph, captured.outputs[size])
        for size in captured.troubles:
            graphs.use(size, None, None)
        return captured

    def _allocate(self) -> None:
        if self._graphs is not None:
            self._graphs.allocate()

    def _give_up(self, why: str) -> None:
        assert self._plan is not None
        if self._plan.restorer is not None:
            self._plan.restorer.abandon()
        for each in self._plan.ranges.all:
            each.close()
        self._plan.close_recorder()
        self._plan, self._why = None, why


def _output_bytes(plan: Plan, name: str) -> int:
    """About how much there is to compare of a graph: elements of its outputs."""
    assert plan.archive is not None
    return sum(math.prod(each["shape"]) for each in plan.archive.facts["outputs"][name].values())


@dataclass
class _Outcome:
    """Graphs that are not used, with the reason: known before, moved memory, wrong outputs, failed in the restore."""

    known: Mapping[str, str]
    gone: Mapping[str, str]
    failed: dict[str, str]
    lost: dict[str, str] = field(default_factory=dict)

    def take(self, plan: Plan) -> None:
        """The restore has ended: what it lost."""
        assert plan.restorer is not None
        self.lost = {**dict.fromkeys(_left(plan), "it was not restored"), **plan.restorer.progress.failed}

    @property
    def news(self) -> dict[str, str]:
        """What speaks against a graph itself and was not known."""
        found = {**self.lost, **self.failed}
        return {name: why for name, why in found.items() if name not in self.known and name not in self.gone}

    @property
    def all(self) -> dict[str, str]:
        return {**self.lost, **self.failed, **self.known, **self.gone}


def _left(plan: Plan) -> list[str]:
    """Graphs that are neither ready nor failed yet."""
    assert plan.archive is not None and plan.restorer is not None and plan.state is not None
    done = {*plan.ready.graphs, *plan.restorer.progress.failed, *plan.state.quarantined}
    return [name for name in plan.archive.facts["order"] if name not in done | set(plan.archive.facts["refused"])]


def _say(start: Start, plan: Plan, session: Session, outcome: _Outcome, *, captured: int, under_way: int = 0) -> None:
    assert plan.archive is not None and plan.restorer is not None
    progress = plan.restorer.progress
    times = sorted(progress.ready.values())
    start.report.stage(
        CudaGraphStage.name,
        path="restored" if session.used or under_way else "refused",
        why=_why(outcome.all),
        graphs=len(session.used),
        captured=captured,
        **({"under_way": under_way} if under_way else {}),
        first_s=round(times[0], 6) if times else 0.0,
        **({"first_four_s": round(times[3], 6)} if len(times) > 3 else {}),
        all_s=round(times[-1], 6) if times else 0.0,
        steps={name: round(seconds, 6) for name, seconds in progress.seconds.items()},
        **plan.archive.facts.get("captured", {}),
    )


def _on(device: str) -> AbstractContextManager[object]:
    """The engine's GPU as torch's current one: streams and generators are asked for without naming a device."""
    import torch

    return torch.cuda.device(device) if torch.cuda.is_available() else nullcontext()


def _alone(start: Start) -> bool:
    ranks = start.engine.identity().ranks
    return ranks.tp_size * ranks.pp_size * ranks.dp_size * ranks.ep_size == 1


def _plain(plan: Plan) -> Any:
    import json

    return json.loads(plan.fingerprint.to_json())


def _seconds(captured: Captured, base: Baseline | None) -> dict[str, float]:
    found = {"warm_up_s": captured.warm_up_s, "capture_s": captured.capture_s + captured.instantiate_s}
    if base is not None:
        found |= {"one_default_gc_s": base.default_gc, "one_frozen_gc_s": base.frozen_gc}
    return {name: round(seconds, 6) for name, seconds in found.items()}


def _figures(captured: Captured, base: Baseline | None) -> dict[str, Any]:
    return {
        "captured": len(captured.graphs),
        **_seconds(captured, base),
        "gc": "frozen",
        "troubles": "; ".join(f"{size}: {why}" for size, why in list(captured.troubles.items())[:3]),
    }


def _why(failed: Mapping[str, str]) -> str:
    reasons: dict[str, int] = {}
    for why in failed.values():
        reasons[why] = reasons.get(why, 0) + 1
    return "; ".join(f"{count} x {why}" if count > 1 else why for why, count in list(reasons.items())[:3])


__all__ = ["FIRST", "CudaGraphStage", "owners_of"]
