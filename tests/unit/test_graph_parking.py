"""An engine that stands by: what the graphs' stage maps, gives back, and never saves. The driver is a pretended one."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fer.cudagraph import beside
from fer.errors import MappingError, OutOfMemory
from fer.memory import patience
from fer.memory.kept import KeptMemory
from tests.support import cudagraph_stage
from tests.support.cudagraph_stage import Bench, FakeRange


class SlabRange(FakeRange):
    """Keeps a list of what was asked."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.asked: list[tuple[str, int]] = []
        self.lacks = 0

    def map(self, size: int, chunk: int = 0) -> None:
        if self.name == "kv":
            self._lack()
        super().map(size, chunk)
        self.asked.append(("map", size))

    def map_over_and_over(self, size: int, slab: int) -> None:
        self.asked.append(("slab", slab))
        self.mapped = size

    backed = False

    def back(self, *, chunk: int = 0, kept: Any = ()) -> None:
        self._lack()
        if kept and kept[0][0] == 3:
            raise MappingError("memory kept for the range kv does not fit")
        self.asked.append(("kept" if kept else "back", 0))
        self.backed, self.mapped = True, 1

    def rest(self) -> None:
        self.backed, self.mapped = False, 0
        self.asked.append(("rest", 0))

    def _lack(self) -> None:
        if self.lacks:
            self.lacks -= 1
            raise OutOfMemory("the range kv needs 8 bytes", needed=8, free=3)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    monkeypatch.setattr(cudagraph_stage, "FakeRange", SlabRange)
    made = Bench(monkeypatch, tmp_path)
    made.start = dataclasses.replace(made.start, parked=True)
    return made


def kv(bench: Bench) -> Any:
    return bench.plan.ranges.kv


def test_restored_graphs_wait_over_the_recorded_slab(bench: Bench) -> None:
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 8192}  # type: ignore[union-attr]
    assert bench.run().path == "restored"
    assert kv(bench).asked == [("slab", 8192)] and bench.stage.in_place(bench.start)
    used = dict(bench.graphs.used)
    bench.stage.unpark(bench.start)
    assert bench.stage.park(bench.start)
    assert kv(bench).asked[1:] == [("rest", 0), ("back", 0), ("rest", 0)], "the slab of the start goes first"
    assert bench.graphs.used == used and not bench.captures, "the graphs are the same ones"


@pytest.mark.parametrize("fails", [False, True])
def test_a_cache_in_a_range_need_not_be_cleared(bench: Bench, fails: bool) -> None:
    seen: list[bool] = []
    with contextlib.suppress(ZeroDivisionError):
        bench.stage.prepare(bench.start)
        with bench.stage.placing(bench.start):
            seen.append(bench.graphs.cleared)
            _ = 1 / (not fails)
    assert [*seen, bench.graphs.cleared] == [True, False], "what is allocated elsewhere later has to be"


def test_the_first_prompt_waits_for_libraries_that_are_being_made_ready(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    @contextmanager
    def on(device: str) -> Iterator[None]:
        asked.append(f"{threading.current_thread().name} on {device}")
        yield

    def wake() -> None:
        threading.Event().wait(0.1)
        asked.append("libraries")

    monkeypatch.setattr(beside, "on", on)
    monkeypatch.setattr(bench.start.engine, "wake_libraries", wake)
    monkeypatch.setattr(bench.start.engine, "first_prompt", lambda: asked.append("prompt"))
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    assert bench.run().path == "restored"
    assert asked == ["fer-libraries on cuda:0", "libraries", "prompt"]


def test_but_not_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    done = threading.Event()
    monkeypatch.setattr(beside, "WAIT_S", 0.05)
    monkeypatch.setattr(bench.start.engine, "wake_libraries", lambda: done.wait(60))
    monkeypatch.setattr(bench.start.engine, "first_prompt", lambda: asked.append("prompt"))
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    assert bench.run().path == "restored" and asked == ["prompt"]
    done.set()


def test_where_answers_wait_no_prompt_is_taken_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(bench.start.engine, "wake_libraries", lambda: asked.append("libraries"))
    monkeypatch.setattr(bench.start.engine, "first_prompt", lambda: asked.append("prompt"))
    bench.start = dataclasses.replace(bench.start, at_once=True)
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    assert bench.run().path == "restored" and not asked


def test_captured_graphs_over_a_slab_are_not_saved(bench: Bench) -> None:
    row = bench.run()
    assert (row.path, row.details["saved"]) == ("loaded", False) and "stands by" in row.why
    assert kv(bench).asked == [("slab", 4096)]
    assert not bench.plan.path.exists()


@pytest.mark.parametrize("kept", [False, True])
def test_where_the_cache_gets_no_memory_nothing_is_built_over_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    monkeypatch.setattr(patience, "FREED_S", 0.0)
    restorer = bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    bench.run()
    assert not restorer.cancelled
    if kept:
        with pytest.raises(MappingError):
            bench.stage.unpark(bench.start, KeptMemory("GPU-1", "cuda", [(3, None)]))  # type: ignore[list-item]
    else:
        kv(bench).lacks = 100
        with pytest.raises(OutOfMemory):
            bench.stage.unpark(bench.start)
    assert restorer.cancelled


def test_memory_that_comes_back_late_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    bench.run()
    kv(bench).lacks = 3
    bench.stage.unpark(bench.start)
    assert kv(bench).asked[-1] == ("back", 0)
    monkeypatch.setattr(patience, "FREED_S", 0.0)
    kv(bench).lacks = 3
    with pytest.raises(OutOfMemory) as caught:
        bench.stage.unpark(bench.start)
    assert caught.value.fields == {"needed": 8, "free": 3}
    kv(bench).lacks = 0
    bench.stage.unpark(bench.start)


def test_kept_memory_that_cannot_be_mapped_yet_is_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    bench.run()
    kv(bench).lacks = 3
    assert bench.stage.unpark(bench.start, KeptMemory("GPU-1", "cuda", [(8, None)]))  # type: ignore[list-item]
    assert kv(bench).asked[-1] == ("kept", 0)


@pytest.mark.parametrize(("lacks", "path"), [(3, "restored"), (1 << 30, "loaded")])
def test_a_start_waits_a_moment_for_what_a_dead_engine_held(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, lacks: int, path: str
) -> None:
    monkeypatch.setattr(patience, "FREED_S", 0.2)
    bench.start = dataclasses.replace(bench.start, parked=False)
    bench.restoring()
    kv(bench).lacks = lacks
    assert bench.run().path == path


def test_graphs_whose_memory_moved_meanwhile_are_captured(bench: Bench) -> None:
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    bench.run()
    owners = bench.plan.archive.facts["owners"]  # type: ignore[union-attr]
    owners[-1] = (owners[-1][0], owners[-1][1] + 512, owners[-1][2])
    bench.stage.unpark(bench.start)
    assert bench.captures == [([4], False)]
    assert bench.graphs.used[4] == "native 4"


def test_memory_that_was_kept_takes_the_place_of_its_own(bench: Bench) -> None:
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    bench.run()
    kept: Any = KeptMemory("GPU-1", "cuda", [(8, None)])  # type: ignore[list-item]
    assert bench.stage.unpark(bench.start, kept) is True
    assert bench.stage.unpark(bench.start, kept) is True
    assert kv(bench).asked[1:] == [("rest", 0), ("kept", 0), ("rest", 0), ("kept", 0)]
    for gpu, size in (("GPU-1", 3), ("GPU-2", 8)):
        with pytest.raises(MappingError):
            bench.stage.unpark(bench.start, KeptMemory(gpu, "cuda", [(size, None)]))  # type: ignore[list-item]
    bench.stage.unpark(bench.start)
    assert kv(bench).asked[-1] == ("back", 0)


def test_where_graphs_are_captured_over_kept_memory_nothing_is_known_of_it(bench: Bench) -> None:
    bench.restoring()
    bench.plan.archive.facts["kv"] = {"slab": 1}  # type: ignore[union-attr]
    bench.run()
    owners = bench.plan.archive.facts["owners"]  # type: ignore[union-attr]
    owners[-1] = (owners[-1][0], owners[-1][1] + 512, owners[-1][2])
    kept: Any = KeptMemory("GPU-1", "cuda", [(8, None)])  # type: ignore[list-item]
    assert bench.stage.unpark(bench.start, kept) is False and bench.captures
