"""A start of the graphs' stage with everything below it pretended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fer.cudagraph import plan as planning
from fer.cudagraph import session, stage, state
from fer.cudagraph.capture import Baseline, Captured
from fer.cudagraph.graph import Graph
from fer.cudagraph.plan import Plan
from fer.cudagraph.restore import Progress
from fer.cudagraph.save import layout_digest
from fer.fingerprint import Fingerprint
from fer.options import Options
from fer.report import Report
from fer.stages import Start
from tests.support.cudagraph_engine import ToyEngine, ToyGraphs

NAMES = ["decode/4", "decode/8"]


class FakeRange:
    def __init__(self, name: str) -> None:
        self.name, self.address, self.mapped, self.trimmed = name, 0, 0, 0

    def map(self, size: int, chunk: int = 0) -> None:
        self.mapped = size

    def trim(self) -> None:
        self.trimmed += 1

    def close(self) -> None:
        self.mapped = 0

    def place(self) -> Any:
        return nullcontext()


def pretended_ranges() -> Any:
    made = {name: FakeRange(name) for name in ("kv", "static", "scratch", "pool")}
    return SimpleNamespace(**made, all=tuple(made.values()), span=(0, 1 << 48))


class FakeRestorer:
    def __init__(self, failed: dict[str, str] | None = None) -> None:
        self.progress = Progress(ready={name: 0.1 for name in NAMES if name not in (failed or {})}, failed=failed or {})
        self.cancelled, self.ended = False, True
        self.order = NAMES
        self.calls: list[Callable[[], None]] = []

    def cancel(self) -> None:
        self.cancelled = True

    def abandon(self) -> bool:
        self.cancelled = True
        return self.ended

    def go_on(self) -> None: ...

    def wait_for(self, name: str, timeout: float) -> bool:
        return True

    @contextmanager
    def still(self) -> Iterator[None]:
        yield

    def wait(self, timeout: float | None = None, *, count: int | None = None) -> bool:
        return self.ended or (count is not None and len(self.progress) >= min(count, len(NAMES)))

    def after(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


class Bench:
    """One start of the stage, with everything below it pretended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **options: Any) -> None:
        self.graphs = ToyGraphs()
        self.start = Start(engine=ToyEngine(graphs=self.graphs), options=Options(**options), report=Report())
        self.captures: list[tuple[list[int], bool]] = []
        self.checks: dict[str, str] = {}
        self.closed = 0
        self.plan = Plan(
            graphs=self.graphs,
            device=SimpleNamespace(ordinal=0, uuid="GPU-1", room=lambda: SimpleNamespace(free=1 << 30)),  # type: ignore[arg-type]
            cuda=None,  # type: ignore[arg-type]
            ranges=pretended_ranges(),
            path=tmp_path / "graphs" / "a.fergraph",
            fingerprint=Fingerprint(group={}, rank={}),
            why="no archive was saved yet",
        )
        monkeypatch.setattr(planning, "make", lambda start, graphs: self.plan)
        monkeypatch.setattr(planning, "begin", lambda plan, rest_after: None)
        monkeypatch.setattr("fer.cudagraph.capture.capture", self.capture)
        monkeypatch.setattr("fer.cudagraph.capture.baseline", lambda graphs: Baseline(4, 0.2, 0.1))
        monkeypatch.setattr(
            "fer.cudagraph.check.check",
            lambda plan, graphs, names, golden, deep: {n: w for n, w in self.checks.items() if n in names},
        )
        monkeypatch.setattr(session, "outputs_of", lambda *_: {})
        monkeypatch.setattr(session, "capture", self.capture)
        self.stage = stage.CudaGraphStage()
        self.plan.path.parent.mkdir(mode=0o700, exist_ok=True)

    def capture(self, graphs: Any, sizes: Any, ranges: Any, *, keep: bool, agree: Any = None) -> Captured:
        self.captures.append((list(sizes), ranges is not None))
        return Captured(graphs={s: f"native {s}" for s in sizes}, outputs={s: {} for s in sizes})

    def restoring(
        self, failed: dict[str, str] | None = None, quarantined: dict[str, str] | None = None
    ) -> FakeRestorer:
        owners = self.owners()
        facts = {
            "order": NAMES,
            "golden": {},
            "owners": owners,
            "uses": {NAMES[0]: range(len(owners)), NAMES[1]: [0, 1]},  # only the first one touches the inputs
            "outputs": {NAMES[0]: {"y": {"shape": [4, 4]}}, NAMES[1]: {"y": {"shape": [8, 4]}}},
            "weights": layout_digest(self.graphs.weights()),
            "refused": {},
        }
        self.plan.archive = SimpleNamespace(facts=facts)  # type: ignore[assignment]
        self.plan.state = state.State("digest", "proven", "", quarantined or {})
        restorer = FakeRestorer(failed)
        self.plan.restorer = restorer  # type: ignore[assignment]
        for name in restorer.progress.ready:
            self.plan.ready.put(name, Graph(name, 1, None))  # type: ignore[arg-type]
        return restorer

    def owners(self) -> list[Any]:
        self.graphs.allocate()
        found = [(o.name, o.address, o.size) for o in stage.owners_of(self.plan)]
        self.graphs.allocate = lambda: None  # type: ignore[method-assign]
        return found

    def run(self) -> Any:
        with self.start.report.phase("graphs"):
            self.stage.prepare(self.start)
        with self.start.report.phase("kv"), self.stage.placing(self.start):
            self.start.engine.allocate_kv()
        with self.start.report.phase("graphs"):
            self.stage.run(self.start)
        return self.start.report.stages["cudagraph"]
