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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from fer.cudagraph import plan as planning
from fer.cudagraph import state
from fer.cudagraph.plan import Plan
from fer.cudagraph.restore import outputs_of, verify_owners
from fer.errors import DriverError, FerError, MappingError, OutOfMemory
from fer.paths import ensure_private
from fer.stages import Start, Wide

if TYPE_CHECKING:
    from fer.cudagraph.capture import Captured
    from fer.engines.graphs import DecodeGraphs

log = logging.getLogger("fer")

_WAIT_S = 120.0


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
        archive, restorer = plan.archive, plan.restorer
        assert archive is not None and restorer is not None and plan.state is not None
        wrong = verify_owners(archive.facts["owners"], owners_of(plan))
        if wrong:
            restorer.cancel()
        with start.report.step("wait for graphs"):
            ended = restorer.wait(_WAIT_S)
        failed = {**archive.facts.get("refused", {}), **plan.state.quarantined, **restorer.progress.failed}
        missing = set(archive.facts["order"]) - set(plan.ready) - set(failed)
        failed |= dict.fromkeys(missing, "it was not restored")
        if wrong or not ended:
            if ended:
                restorer.abandon()
            failed = dict.fromkeys(archive.facts["order"], "; ".join(wrong[:3]) or "the restore did not end in time")
        else:
            with start.report.step("check graphs"):
                failed |= self._check(start, plan, graphs)
            session = Session(plan, graphs)
            for name, graph in plan.ready.items():
                if name not in failed:
                    session.use(name, graph)
            graphs.session = session
        news = {name: why for name, why in failed.items() if name not in archive.facts.get("refused", {})}
        if news and not wrong and ended:
            self._quarantine(plan, news)
        captured = self._capture_missing(start, graphs, failed, news)
        kept = len(plan.ready) - len([name for name in plan.ready if name in failed])
        start.report.stage(
            self.name,
            path="restored" if kept else "refused",
            why=_why(failed),
            graphs=kept,
            captured=len(captured.graphs) if captured else 0,
            first_s=round(min(restorer.progress.ready.values(), default=0.0), 6),
            all_s=round(max(restorer.progress.ready.values(), default=0.0), 6),
            steps={name: round(seconds, 6) for name, seconds in restorer.progress.seconds.items()},
        )

    def _check(self, start: Start, plan: Plan, graphs: DecodeGraphs) -> dict[str, str]:
        """Replay graphs against their recorded outputs: one or two (fast), all (full)."""
        names = list(plan.ready)
        if start.options.verify == "off" or not names:
            return {}
        chosen = names if start.options.verify == "full" else list(dict.fromkeys((names[0], names[-1])))
        assert plan.archive is not None
        golden = plan.archive.facts["golden"].get(planning.checkpoint_name(start), {})
        from fer.cudagraph.check import check

        found: dict[str, str] = {}
        for name in chosen:
            if golden.get(name) or _alone(start):  # an eager step of one rank would wait for the others
                why = check(plan, graphs, name, golden.get(name), start.engine.device)
                found |= {name: why} if why else {}
        return found

    def _quarantine(self, plan: Plan, failed: Mapping[str, str]) -> None:
        assert plan.state is not None
        plan.state.quarantined.update(failed)
        try:
            state.save(plan.path, plan.state)
        except FerError as error:
            log.warning("the failed graphs could not be written down: %s", error)

    def _capture_missing(
        self, start: Start, graphs: DecodeGraphs, failed: Mapping[str, str], news: Mapping[str, str]
    ) -> Captured | None:
        """Capture what is not restored; all of it where ranks differ, since a step may hold collectives."""
        from fer.cudagraph.save import name_of

        everywhere = start.engine.agree(not news) or _alone(start)
        sizes = [size for size in graphs.batch_sizes if name_of(size) in failed or not everywhere]
        if not sizes:
            return None
        return self._capture(start, graphs, sizes, None, keep=False)

    # -- capture

    def _capture_alone(self, start: Start, why: str) -> None:
        assert self._graphs is not None
        captured = self._capture(start, self._graphs, self._graphs.batch_sizes, None, keep=False)
        start.report.stage(self.name, path="loaded", why=why, saved=False, **_figures(captured))

    def _capture_and_save(self, start: Start, plan: Plan, graphs: DecodeGraphs) -> None:
        if plan.recorder is None or not self._placed:
            plan.close_recorder()
            self._capture_alone(start, "; ".join(part for part in (plan.why, plan.unsaved) if part))
            return
        try:
            plan.ranges.scratch.map(graphs.scratch_bytes)
            plan.ranges.pool.map(graphs.pool_bytes)
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
        try:
            with start.report.step("save graphs") as span:
                details = self._save(start, plan, captured)
                span.details.update(details.get("save_s", {}))
        except FerError as error:
            why = f"{why}; not saved: {error}"
            log.warning("the graphs were not saved: %s", error)
        except Exception as error:  # a bug of ours must not take down an engine that has its graphs
            why = f"{why}; not saved: bug in FER, please report: {type(error).__name__}: {error}"
            log.exception("saving graphs failed")
        finally:
            plan.close_recorder()
        start.report.stage(self.name, path="loaded", why=why, **details, **_figures(captured))

    def _save(self, start: Start, plan: Plan, captured: Captured) -> dict[str, Any]:
        from fer.cudagraph import proof
        from fer.cudagraph.save import name_of, save

        assert plan.recorder is not None
        ensure_private(plan.path.parent)
        facts = {
            "fingerprint": _plain(plan),
            "order": [name_of(size) for size in plan.graphs.batch_sizes],
            "kv": {"bytes": plan.ranges.kv.mapped, "largest": plan.graphs.largest_kv_bytes()},
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
        weights = start.report.stages.get("weights")
        proof.begin(
            plan.path,
            ordinal=plan.device.ordinal,
            checkpoint=planning.checkpoint_name(start),
            edition=str(weights.details.get("edition", "")) if weights else "",
            runtime_dir=start.options.runtime_dir,
            worth=bool(saved.kept),
        )
        return {
            "saved": True,
            "kept": len(saved.kept),
            "nodes": saved.nodes,
            "refused": "; ".join(f"{name}: {why}" for name, why in list(saved.refused.items())[:3]),
            "proof": "under way",
            "save_s": {name: round(seconds, 6) for name, seconds in saved.seconds.items()},
        }

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


class Session:
    """Restored graphs in use, and the memory they stand on."""

    def __init__(self, plan: Plan, graphs: DecodeGraphs) -> None:
        self._plan, self._graphs = plan, graphs
        self._used: dict[str, Any] = {}

    def use(self, name: str, graph: Any) -> None:
        """Hand a graph to the engine."""
        assert self._plan.archive is not None
        graph.pool_id = self._plan.ranges.pool.name
        outputs = outputs_of(self._plan.archive, name, f"cuda:{self._plan.device.ordinal}", self._plan.ranges)
        self._used[name] = graph
        self._graphs.use(int(name.rpartition("/")[2]), graph, outputs)

    def verify_owners(self) -> list[str]:
        """After sleep, wake or a change of weights: stop using graphs whose memory moved; what moved, by name."""
        assert self._plan.archive is not None
        wrong = verify_owners(self._plan.archive.facts["owners"], owners_of(self._plan))
        for name in list(self._used) if wrong else ():
            self._graphs.use(int(name.rpartition("/")[2]), None, None)
            self._used.pop(name)
        return wrong


def owners_of(plan: Plan) -> list[Any]:
    """Weights and named tensors where they lie now."""
    from fer.cudagraph.save import tensors

    return [*planning.weights_of(plan), *tensors(plan.graphs)]


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


def _figures(captured: Captured) -> dict[str, Any]:
    return {
        "captured": len(captured.graphs),
        "warm_up_s": round(captured.warm_up_s, 6),
        "capture_s": round(captured.capture_s + captured.instantiate_s, 6),
        "gc": "frozen",
        "troubles": "; ".join(f"{size}: {why}" for size, why in list(captured.troubles.items())[:3]),
    }


def _why(failed: Mapping[str, str]) -> str:
    reasons: dict[str, int] = {}
    for why in failed.values():
        reasons[why] = reasons.get(why, 0) + 1
    return "; ".join(f"{count} x {why}" if count > 1 else why for why, count in list(reasons.items())[:3])


__all__ = ["CudaGraphStage", "Session", "owners_of"]
