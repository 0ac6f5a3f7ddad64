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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from fer import __version__
from fer.cudagraph import ahead, beside, check, parking, state
from fer.cudagraph import plan as planning
from fer.cudagraph.capture import on
from fer.cudagraph.outcome import Outcome, bug, figures, first_line, first_reasons, left, say, seconds, usable
from fer.cudagraph.plan import Plan
from fer.cudagraph.restore import touched
from fer.cudagraph.save import name_of
from fer.cudagraph.session import Session, moved, owners_of
from fer.errors import DriverError, FerError, MappingError, OutOfMemory
from fer.memory.patience import patiently
from fer.options import Options
from fer.paths import ensure_private
from fer.stages import Start, Wide

if TYPE_CHECKING:
    from fer.cudagraph.capture import Baseline, Captured
    from fer.engines.base import Engine
    from fer.engines.graphs import DecodeGraphs
    from fer.memory.kept import KeptMemory

log = logging.getLogger("fer")

_WAIT_S = 120.0
_LATE = "the restore did not end in time"

FAST: Final = 2
"""Graphs that a fast check replays: those of fewest outputs, which cost least to compare."""

FIRST: Final = 4
"""Graphs, those of most traffic, that a start waits for; the engine serves while the others follow.

One that has answers to go on with waits for those that are checked: whoever needs another one waits for that."""


class CudaGraphStage(Wide):
    """Stage three."""

    name = "cudagraph"

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._graphs: DecodeGraphs | None = None
        self._why = ""
        self._placed = False

    def imagine(self, engine: Engine) -> None:
        """Read the archives that the start may restore from."""
        with suppress(FerError):
            options = Options.load()
            if _described(engine, options) is not None:
                ahead.read(engine, options.home)

    def prepare(self, start: Start) -> None:
        """Reserve, and begin to restore or to record."""
        self._graphs = _described(start.engine, start.options)
        if self._graphs is None:
            return
        with start.report.step("plan graphs") as span:
            try:
                self._plan = planning.make(start, self._graphs)
                span.details["restoring"] = self._plan.archive is not None
            except FerError as error:
                self._why = str(error)
            except Exception as error:  # a bug of ours must not take down an engine
                self._why = bug(error)
                log.exception("the graphs' stage failed before the weights")
            plan = self._plan
            # Asked on every rank, whatever happened on it: all restore, or none.
            together = start.engine.agree(plan is not None and plan.archive is not None)
            if plan is not None and plan.archive is not None and not together:
                plan.archive = plan.binaries = None
                plan.why = "another rank of this launch has no archive that fits"
            if plan is not None:
                try:
                    planning.begin(plan, rest_after=FAST if start.at_once else None)
                    beside.begin(start, plan)
                except Exception as error:  # as above; what an archive says may be anything, too
                    log.exception("the graphs' stage failed before the weights")
                    self._give_up(bug(error))
            ahead.forget()

    @contextmanager
    def placing(self, start: Start) -> Iterator[None]:
        """The cache into ``kv``, inputs into ``static``; where that fails, wherever torch puts them."""
        plan, graphs = self._plan, self._graphs
        if plan is None or graphs is None:
            yield
            self._allocate()
            return
        try:
            if start.parked:
                parking.begin(plan)
            else:
                parking.fill(plan)
            patiently(lambda: plan.ranges.static.map(graphs.static_bytes))
        except (OutOfMemory, MappingError, DriverError) as error:
            self._give_up(str(error))
            if start.parked:
                start.engine.park()
            yield
            self._allocate()
            return
        with plan.ranges.kv.place(), parking.cleared(graphs):
            yield
        plan.ranges.kv.trim()
        try:
            with plan.ranges.static.place():
                graphs.allocate()
        except RuntimeError as error:  # torch's word for lack of memory in the range
            plan.unsaved = f"the inputs do not fit into the range static: {first_line(error)}"
            log.warning("graphs: %s", plan.unsaved)
            self._allocate()
            return
        self._placed = True

    def in_place(self, start: Start) -> bool:
        """Where the ranges are reserved: one slab over and over stands for the cache, and graphs point to it."""
        return self._plan is not None

    def park(self, start: Start) -> bool:
        """Give the cache's memory back; its addresses stay, and so do the graphs."""
        if self._plan is None or not self._placed:
            return super().park(start)
        parking.park(self._plan)
        return True

    def keep(self, start: Start) -> KeptMemory | None:
        """The cache's memory where it lies at its own addresses, else what the engine itself can keep."""
        if self._plan is None or not self._placed:
            return super().keep(start)
        return parking.keep(self._plan)

    def unpark(self, start: Start, kept: KeptMemory | None = None) -> bool:
        """Put memory where the cache lies, zeroed or what an engine before kept; where it kept no addresses, anywhere.

        Returns:
            Whether what was kept holds what it held.

        Raises:
            OutOfMemory: the engine is parked as before.
            MappingError: what was kept does not fit; the engine is parked, whatever it was before.
        """
        if self._plan is not None and self._placed:
            return parking.unpark(self._plan, kept)
        if start.engine.device.startswith("cuda"):
            patiently(start.engine.unpark)
            intact = False
        else:
            intact = super().unpark(start, kept)
        self._allocate()
        return intact

    def served(self, start: Start) -> None:
        """Let the restore go on, if it rests."""
        if self._plan is not None and self._plan.restorer is not None:
            self._plan.restorer.go_on()

    def overwrote(self, start: Start) -> bool:
        """Whether graphs that could not be restored were captured, whose steps write to rows of the cache."""
        return bool(self._graphs and self._graphs.session and self._graphs.session.captured)

    def resume(self, start: Start) -> None:
        """Capture graphs over a cache that has new addresses."""
        graphs = self._graphs
        if graphs is not None and (self._plan is None or not self._placed):
            with on(start.engine.device):
                self._capture(start, graphs, graphs.batch_sizes, None, keep=False)

    def run(self, start: Start) -> None:
        """Leave the engine with graphs for every batch size, restored or captured, and report."""
        if not start.options.cudagraph or start.options.mode == "off":
            start.report.stage(
                self.name, path="off", why="cudagraph=false" if start.options.mode != "off" else "mode=off"
            )
        elif self._graphs is None:
            start.report.stage(self.name, path="absent", why="the engine describes no graphs; its own path")
        else:
            with on(start.engine.device):
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
        try:
            session, outcome = self._hand_over(start, plan, graphs)
        except Exception as error:  # the driver's, or a bug of ours: the engine captures, as the other ranks will
            log.exception("restored graphs could not be handed over")
            plan.ready.open(lambda name, graph: None)
            for size in graphs.batch_sizes:
                graphs.use(size, None, None)
            graphs.session = None
            plan.let_go()
            start.engine.agree(False)
            self._capture_alone(start, str(error) if isinstance(error, FerError) else bug(error))
            return
        assert plan.restorer is not None
        if outcome.patient or plan.restorer.wait(0):
            self._conclude(start, plan, graphs, session, outcome)
            return
        say(start, plan, session, outcome, under_way=len(left(plan)))
        plan.restorer.after(lambda: self._follow(start, plan, session, outcome))

    def _hand_over(self, start: Start, plan: Plan, graphs: DecodeGraphs) -> tuple[Session, Outcome]:
        """Check some of what is ready, or all of it, and open the way to the engine for what is right."""
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
        if _alone(start) and not start.at_once:
            beside.first_prompt(start, plan)
        with start.report.step("wait for graphs"):
            first = restorer.order[: FAST if start.at_once else FIRST]
            few = len(first) if start.options.verify == "off" else check.reach(plan, first, FAST)
            in_time = restorer.wait(_WAIT_S, count=None if patient else few)
            if in_time and not patient and not usable(plan, gone) and start.options.verify != "off":
                patient, in_time = True, restorer.wait(_WAIT_S)  # nothing is there yet that could be checked
        if not in_time:
            restorer.cancel()
        if wrong:
            self._outdate(plan, wrong)
        seen = usable(plan, gone)
        with start.report.step("check graphs"):
            checked, failed = self._check(start, plan, graphs, seen)
            if failed and len(checked) < len(archive.facts["order"]):  # one that is wrong makes all others suspect
                patient, in_time = True, restorer.wait(_WAIT_S) and in_time
                seen = usable(plan, gone)
                more, wrong_too = self._check(start, plan, graphs, [n for n in seen if n not in checked], most=True)
                checked, failed = [*checked, *more], {**failed, **wrong_too}
        if in_time and not patient:  # others were restored beside the check
            with start.report.step("wait for more graphs"):
                in_time = restorer.wait(_WAIT_S, count=len(first))
        if not in_time:
            restorer.cancel()
        gone |= {name: failed.pop(name) for name, why in list(failed.items()) if why.startswith(check.NO_MEMORY)}
        late = [] if in_time else [name for name in left(plan, but=seen) if name not in gone]
        outcome = Outcome(known, {**gone, **dict.fromkeys(late, _LATE)}, failed, patient, len(checked))
        session = Session(plan, graphs, outcome.all, alone=_alone(start))
        graphs.session = session
        plan.ready.open(session.use)
        return session, outcome

    def _conclude(self, start: Start, plan: Plan, graphs: DecodeGraphs, session: Session, outcome: Outcome) -> None:
        """All is ready or failed: capture what is not there, now."""
        outcome.take(plan, session)
        if outcome.news:
            self._quarantine(plan, outcome.news)
        if not session.used:
            plan.let_go()
        # Steps may hold collectives, so ranks capture together what one of them lacks.
        everywhere = start.engine.agree(not outcome.all) or _alone(start)
        sizes = [size for size in graphs.batch_sizes if name_of(size) in outcome.all or not everywhere]
        captured = self._capture(start, graphs, sizes, None, keep=False) if sizes else None
        if captured is not None:
            session.replaced([*captured.graphs, *captured.troubles])
            outcome.troubles = captured.troubles
        if not session.used:
            plan.let_go()
        say(start, plan, session, outcome, captured=len(captured.graphs) if captured else 0)

    def _follow(self, start: Start, plan: Plan, session: Session, outcome: Outcome) -> None:
        """The engine serves already when the last graph is ready or failed; it captures what failed when it is idle."""
        outcome.take(plan, session)
        if outcome.news:
            self._quarantine(plan, outcome.news)
        session.miss(outcome.all)
        say(start, plan, session, outcome)

    def _check(
        self, start: Start, plan: Plan, graphs: DecodeGraphs, names: Sequence[str], *, most: bool = False
    ) -> tuple[list[str], dict[str, str]]:
        """Replay graphs against their recorded outputs, one or two (fast) or all (full): which, and what was wrong."""
        full = start.options.verify == "full"
        assert plan.archive is not None
        golden = plan.archive.facts["golden"].get(plan.checkpoint)
        # An eager step of one rank would wait for the others.
        chosen = [name for name in names if _alone(start) or (golden or {}).get(name)]
        if not full and not most:
            chosen = check.cheapest(plan, chosen, FAST)
        if start.options.verify == "off" or not chosen:
            return [], {}
        return chosen, check.check(plan, graphs, chosen, golden, deep=full)

    def _quarantine(self, plan: Plan, failed: Mapping[str, str]) -> None:
        assert plan.state is not None and plan.archive is not None
        plan.state.quarantined.update(failed)
        if not set(plan.archive.facts["order"]) - {*plan.state.quarantined, *plan.archive.facts["refused"]}:
            plan.state.proof, plan.state.by = "failed", __version__
            plan.state.why = f"no graph of it is left that did not fail: {first_reasons(failed)}"
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
        start.report.stage(self.name, path="loaded", why=why, saved=False, **figures(captured, base))

    def _baseline(self, start: Start, graphs: DecodeGraphs) -> Baseline | None:
        """What a capture costs with and without the garbage collector; not where ranks would have to do it together."""
        from fer.cudagraph.capture import baseline

        with start.report.step("compare capture with default GC") as span:
            try:
                return baseline(graphs) if _alone(start) else None
            except RuntimeError as error:  # lack of memory for a graph more: the engine has those that it needs
                span.details["failed"] = first_line(error)
                return None

    def _capture_and_save(self, start: Start, plan: Plan, graphs: DecodeGraphs) -> None:
        if plan.recorder is None or not self._placed or start.parked:
            plan.close_recorder()
            self._capture_alone(start, "; ".join(part for part in (plan.why, plan.unsaved) if part))
            if plan.unproven:
                self._prove(start, plan, worth=True)
            return
        mapped = False
        try:
            for each, wanted in ((plan.ranges.scratch, graphs.scratch_bytes), (plan.ranges.pool, graphs.pool_bytes)):
                each.map(min(wanted, plan.device.room().free // 3))
            mapped = True
            captured = self._capture(start, graphs, graphs.batch_sizes, plan.ranges, keep=True)
        except (FerError, RuntimeError) as error:  # the latter is torch's word for lack of memory in a range, too
            if mapped and not _alone(start):
                raise  # ranks that took a step apart cannot take another one
            plan.close_recorder()
            plan.trim()  # two thirds of what was free are wanted elsewhere; what torch has of it stays
            self._capture_alone(start, f"{plan.why}; not saved: {first_line(error)}")
            return
        plan.trim()
        # Those that did not fit into the range may fit elsewhere; steps of one rank alone would wait for the others.
        if captured.troubles and _alone(start):
            self._capture(start, graphs, list(captured.troubles), None, keep=False)
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
            why = f"{why}; not saved: {bug(error)}"
            log.exception("saving graphs failed")
        finally:
            plan.close_recorder()
        start.report.stage(self.name, path="loaded", why=why, **details, **figures(captured, base))

    def _save(self, start: Start, plan: Plan, captured: Captured, base: Baseline | None) -> dict[str, Any]:
        from fer.cudagraph.save import save

        assert plan.recorder is not None
        ensure_private(plan.path.parent)
        facts = {
            "fingerprint": _plain(plan),
            "order": [name_of(size) for size in plan.graphs.batch_sizes],
            "captured": {f"native_{name}": value for name, value in seconds(captured, base).items()},
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
            plan.checkpoint,
        )
        trouble = self._prove(start, plan, worth=bool(saved.kept))
        return {
            "saved": True,
            "kept": len(saved.kept),
            "nodes": saved.nodes,
            "refused": "; ".join(f"{name}: {why}" for name, why in list(saved.refused.items())[:3]),
            "proof": trouble or ("under way" if saved.kept else "none of its graphs can be kept"),
            "save_s": {name: round(seconds, 6) for name, seconds in saved.seconds.items()},
        }

    def _prove(self, start: Start, plan: Plan, *, worth: bool) -> str:
        """Have the archive proven; why that could not even begin, ``""`` where it has."""
        from fer.cudagraph import proof

        weights = start.report.stages.get("weights")
        try:
            proof.begin(
                plan.path,
                ordinal=plan.device.ordinal,
                checkpoint=plan.checkpoint,
                edition=str(weights.details.get("edition", "")) if weights else "",
                runtime_dir=start.options.runtime_dir,
                worth=worth,
            )
        except (FerError, ValueError, RuntimeError) as error:  # the archive was removed; no thread can be started
            log.warning("the graphs' proof could not begin: %s", error)
            return f"could not begin: {error}"
        return ""

    def _capture(
        self, start: Start, graphs: DecodeGraphs, sizes: Sequence[int], ranges: Any, *, keep: bool
    ) -> Captured:
        from fer.cudagraph.capture import capture

        with start.report.step("capture graphs", sizes=len(sizes)):
            agree = None if _alone(start) else start.engine.agree
            captured = capture(graphs, sizes, ranges, keep=keep, agree=agree)
        for size, graph in captured.graphs.items():
            graphs.use(size, graph, captured.outputs[size])
        for size, why in captured.troubles.items():
            log.warning("no graph for %d rows, which run eagerly: %s", size, why)
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


def _described(engine: Engine, options: Options) -> DecodeGraphs | None:
    wanted = options.cudagraph and options.mode != "off" and engine.device.startswith("cuda")
    return engine.graphs() if wanted else None


def _alone(start: Start) -> bool:
    ranks = start.engine.identity().ranks
    return ranks.tp_size * ranks.pp_size * ranks.dp_size * ranks.ep_size == 1


def _plain(plan: Plan) -> Any:
    import json

    return json.loads(plan.fingerprint.to_json())


__all__ = ["FIRST", "CudaGraphStage", "owners_of"]
