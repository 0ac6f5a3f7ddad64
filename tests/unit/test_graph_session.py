"""Restored graphs on their way to the engine: checked, handed over one by one, taken back, captured instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fer
from fer.cudagraph import session, stage, state
from fer.cudagraph.capture import Captured
from fer.cudagraph.check import NO_MEMORY
from fer.cudagraph.graph import Graph
from fer.cudagraph.outcome import usable
from fer.engines.base import Ranks
from fer.errors import DriverError, IntegrityError
from fer.options import Options
from fer.report import Report
from fer.stages import Start
from tests.support.cudagraph_engine import ToyEngine
from tests.support.cudagraph_stage import NAMES, Bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


def test_after_a_wake_moved_memory_ends_the_use_of_what_moved(bench: Bench) -> None:
    bench.restoring()
    bench.run()
    session = bench.graphs.session
    assert session is not None
    assert session.verify_owners() == []
    bench.graphs.x = bench.graphs.x.clone()
    assert "owner moved: tensor/x" in session.verify_owners()[0]
    assert bench.graphs.used == {4: None, 8: bench.plan.ready.graphs["decode/8"]}
    assert not session.captured
    session.capture_missing()
    assert bench.graphs.used[4] == "native 4"
    assert session.captured, "its steps ran over whatever the cache held"
    session.capture_missing()
    assert bench.captures == [([4], False)]


def test_graphs_follow_while_the_engine_serves(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "FIRST", 1)
    restorer = bench.restoring()
    late = bench.plan.ready.graphs.pop("decode/8")
    late_s = restorer.progress.ready.pop("decode/8")
    restorer.ended = False
    row = bench.run()
    assert (row.path, row.details["graphs"], row.details["under_way"]) == ("restored", 1, 1)
    assert set(bench.graphs.used) == {4}  # larger batches run eagerly until then
    bench.plan.ready.put("decode/8", late)
    assert bench.graphs.used[8] is late
    restorer.progress.ready["decode/8"], restorer.ended = late_s, True
    for call in restorer.calls:
        call()
    row = bench.start.report.stages["cudagraph"]
    assert (row.details["graphs"], "under_way" in row.details, bench.captures) == (2, False, [])


def test_a_graph_that_fails_while_the_engine_serves_is_captured_when_it_is_idle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "FIRST", 1)
    restorer = bench.restoring()
    del bench.plan.ready.graphs["decode/8"], restorer.progress.ready["decode/8"]
    restorer.ended = False
    bench.run()
    restorer.progress.failed["decode/8"], restorer.ended = "read-back differs", True
    for call in restorer.calls:
        call()
    row = bench.start.report.stages["cudagraph"]
    assert (row.path, row.why) == ("restored", "read-back differs")
    assert state.load(bench.plan.path, "digest").quarantined == {"decode/8": "read-back differs"}
    assert not bench.captures
    assert bench.graphs.session is not None
    bench.graphs.session.capture_missing()
    assert bench.graphs.used[8] == "native 8"


def test_an_output_that_cannot_be_had_costs_its_graph_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.restoring()

    def outputs_of(archive: Any, name: str, *_: Any) -> Any:
        if name == "decode/8":
            raise IntegrityError("output y of decode/8 lies outside the pool")
        return {}

    monkeypatch.setattr(session, "outputs_of", outputs_of)
    row = bench.run()
    assert (row.path, row.details["graphs"], row.details["captured"]) == ("restored", 1, 1)
    assert "outside the pool" in row.why
    assert bench.graphs.used[8] == "native 8"
    assert "decode/8" in state.load(bench.plan.path, "digest").quarantined


@pytest.mark.parametrize("error", [DriverError("cuCtxSynchronize failed", call="", code=700), AttributeError("x")])
def test_a_check_that_fails_itself_leaves_every_size_captured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    restorer = bench.restoring()

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("fer.cudagraph.check.check", fail)
    row = bench.run()
    assert (row.path, row.details["captured"]) == ("loaded", 2)
    assert str(error) in row.why
    assert restorer.cancelled
    bench.plan.ready.put("decode/4", Graph("decode/4", 1, None))  # type: ignore[arg-type]
    assert bench.graphs.used == {4: "native 4", 8: "native 8"}  # what comes late is not used


def test_graphs_may_come_while_they_are_looked_through(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.restoring()

    class Growing(dict[str, str]):
        def __contains__(self, name: object) -> bool:
            bench.plan.ready.graphs.setdefault("decode/16", None)  # type: ignore[arg-type]
            return False

    assert usable(bench.plan, Growing()) == NAMES


def test_a_wrong_graph_makes_the_others_suspect(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "FIRST", 1)
    monkeypatch.setattr(stage, "FAST", 1)
    restorer = bench.restoring()
    late = bench.plan.ready.graphs.pop("decode/8")
    restorer.ended = False

    def wait(timeout: float | None = None, *, count: int | None = None) -> bool:
        if count is None and timeout:
            bench.plan.ready.put("decode/8", late)
            restorer.ended = True
        return True

    monkeypatch.setattr(restorer, "wait", wait)
    bench.checks = dict.fromkeys(NAMES, "its outputs are not the recorded ones")
    row = bench.run()
    assert (row.path, row.details["checked"], row.details["captured"]) == ("refused", 2, 2)
    assert bench.graphs.used == {4: "native 4", 8: "native 8"}


@pytest.mark.parametrize(("shapes", "waited"), [([4, 8], [1, 2]), ([8, 4], [2, 2])])
def test_the_cheapest_of_the_first_are_checked_while_others_are_restored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, shapes: list[int], waited: list[int]
) -> None:
    monkeypatch.setattr(stage, "FAST", 1)
    restorer = bench.restoring()
    outputs = bench.plan.archive.facts["outputs"]  # type: ignore[union-attr]
    for name, rows in zip(NAMES, shapes, strict=True):
        outputs[name]["y"]["shape"] = [rows, 4]
    counts: list[int | None] = []

    def wait(timeout: float | None = None, *, count: int | None = None) -> bool:
        counts.append(count)
        return True

    restorer.wait = wait  # type: ignore[method-assign]
    monkeypatch.setattr(stage, "FIRST", 2)
    assert bench.run().details["checked"] == 1
    assert counts[:2] == waited


def test_missing_graphs_are_captured_one_by_one_on_their_gpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "fer")
    bench.restoring()
    bench.run()
    found, devices = bench.graphs.session, list[str]()

    @contextmanager
    def on(device: str) -> Iterator[None]:
        devices.append(device)
        yield
        devices.append("")

    monkeypatch.setattr(session, "on", on)
    bench.plan.device.ordinal = 1
    assert isinstance(found, session.Session) and not found.missing
    found.miss(NAMES)
    assert "[4, 8] rows" in caplog.text
    for left in (True, False):
        assert found.missing
        found.capture_missing(1)
        assert found.missing == left and devices.pop() == "" and devices.pop() == "cuda:1"
    assert bench.captures == [([8], False), ([4], False)]
    assert found.wait_for(4, 1.0)


def test_a_start_at_once_waits_for_what_is_checked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("FAST", 1), ("FIRST", 2)):
        monkeypatch.setattr(stage, name, number)
    bench.start = replace(bench.start, at_once=True)
    restorer = bench.restoring()
    counts: list[int | None] = []

    def wait(timeout: float | None = None, *, count: int | None = None) -> bool:
        counts.append(count)
        return bool(timeout)

    restorer.wait = wait  # type: ignore[method-assign]
    assert bench.run().details["checked"] == 1
    assert counts == [1, 1, None]
    session, woken = bench.graphs.session, list[str]()
    assert session is not None
    restorer.go_on = lambda: woken.append("go on")  # type: ignore[method-assign]
    bench.stage.served(bench.start)
    assert woken == ["go on"]


def test_some_graph_is_always_checked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "FIRST", 1)
    restorer = bench.restoring(failed={"decode/4": "read-back differs"})
    late = bench.plan.ready.graphs.pop("decode/8")
    restorer.ended = False

    def wait(timeout: float | None = None, *, count: int | None = None) -> bool:
        if count is None and timeout:
            bench.plan.ready.put("decode/8", late)
            restorer.ended = True
        return True

    monkeypatch.setattr(restorer, "wait", wait)
    bench.checks = {"decode/8": "its outputs are not the recorded ones"}
    assert bench.run().details["checked"] == 1
    assert bench.graphs.used == {4: "native 4", 8: "native 8"}


def test_lack_of_memory_is_remembered_of_no_graph(bench: Bench) -> None:
    restorer = bench.restoring(failed={"decode/8": "cuGraphInstantiateWithFlags failed with 2"})
    restorer.progress.passing.add("decode/8")
    bench.checks = {"decode/4": f"{NO_MEMORY}: CUDA out of memory"}
    row = bench.run()
    assert (row.details["captured"], row.path) == (2, "refused")
    assert "cuGraphInstantiate" in row.why
    assert state.load(bench.plan.path, "digest").quarantined == {}


def test_an_archive_without_a_good_graph_has_failed_and_gives_its_memory_back(bench: Bench) -> None:
    bench.restoring(quarantined={"decode/4": "read-back differs"})
    bench.plan.ranges.pool.map(64)
    bench.plan.ranges.scratch.map(64)
    bench.checks = {"decode/8": "its outputs are not the recorded ones"}
    bench.plan.ready.graphs.pop("decode/4")
    bench.run()
    known = state.load(bench.plan.path, "digest")
    assert (known.proof, known.by) == ("failed", fer.__version__)
    assert (bench.plan.ranges.pool.mapped, bench.plan.ranges.scratch.mapped) == (0, 0)


def test_memory_stays_as_long_as_a_restored_graph_is_used_or_one_is_being_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    restorer = bench.restoring(failed={"decode/8": "read-back differs"})
    bench.plan.ranges.pool.map(64)
    bench.run()
    assert bench.plan.ranges.pool.mapped == 64
    assert not restorer.cancelled
    restorer.ended = False
    bench.plan.let_go()
    assert bench.plan.ranges.pool.mapped == 64


def test_a_capture_that_fails_too_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.restoring(failed={"decode/8": "read-back differs"})
    failing = Captured(troubles={8: "CUDA out of memory"})
    monkeypatch.setattr("fer.cudagraph.capture.capture", lambda *_, **__: failing)
    row = bench.run()
    assert (row.details["captured"], row.details["troubles"]) == (0, "8: CUDA out of memory")
    assert bench.graphs.used[8] is None


def test_captures_are_held_to_where_memory_was_then(bench: Bench) -> None:
    bench.restoring()
    bench.run()
    session = bench.graphs.session
    assert session is not None
    first = bench.graphs.x
    bench.graphs.x = first.clone()
    assert session.verify_owners()
    session.capture_missing()
    second = bench.graphs.x
    session.verify_owners()
    assert bench.graphs.used[4] == "native 4"  # captured where it is now
    bench.graphs.x = first
    assert session.verify_owners()  # back to what the archive says, which is not where it was captured
    assert bench.graphs.used[4] is None
    assert second is not first


def test_a_capture_that_fails_later_fails_no_request(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.restoring()
    bench.run()
    bench.graphs.x = bench.graphs.x.clone()

    def full(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA out of memory\nand so on")

    monkeypatch.setattr(session, "capture", full)
    found = bench.graphs.session
    assert found is not None
    assert found.verify_owners()
    found.capture_missing()
    assert bench.graphs.used[4] is None
    assert "[4] stay without a graph: CUDA out of memory" in caplog.text


def test_what_the_restore_lost_without_a_word_is_captured_too(bench: Bench) -> None:
    bench.restoring()
    del bench.plan.ready.graphs["decode/8"]
    row = bench.run()
    assert (row.details["captured"], row.why) == (1, "it was not restored")


def test_ranks_capture_together_what_one_of_them_lost_earlier(bench: Bench) -> None:
    asked = []

    class Rank(ToyEngine):
        def identity(self) -> Any:
            return replace(super().identity(), ranks=Ranks(tp_size=2))

        def agree(self, flag: bool) -> bool:
            asked.append(flag)
            return flag

    bench.start = Start(engine=Rank(graphs=bench.graphs), options=Options(), report=Report())
    bench.restoring(quarantined={"decode/8": "read-back differs"})
    del bench.plan.ready.graphs["decode/8"]
    row = bench.run()
    assert asked == [True, False]  # the other rank may have it, and a step of one rank alone would wait for ever
    assert bench.captures == [([4, 8], False)]
    assert (row.path, row.details["graphs"], row.details["captured"]) == ("refused", 0, 2)


def test_ranks_check_by_recorded_outputs_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr("fer.cudagraph.check.check", lambda plan, graphs, names, golden, deep: checked.extend(names))
    monkeypatch.setattr(stage, "_alone", lambda start: False)
    bench.restoring()
    assert bench.plan.archive is not None
    bench.plan.archive.facts["golden"] = {"here": {"decode/8": ["", "0" * 64]}}
    bench.plan.checkpoint = "here"
    bench.stage._check(bench.start, bench.plan, bench.graphs, NAMES)
    assert checked == ["decode/8"]  # the other one would be compared with a step of this rank alone


def test_one_rank_captures_nothing_later_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_alone", lambda start: False)
    bench.restoring()
    bench.run()
    bench.graphs.x = bench.graphs.x.clone()
    assert bench.graphs.session is not None
    assert bench.graphs.session.verify_owners()
    bench.graphs.session.capture_missing()
    assert (bench.captures, bench.graphs.used[4]) == ([], None)  # a warm-up would wait for the other ranks


def test_one_rank_does_not_capture_once_more_what_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_alone", lambda start: False)
    monkeypatch.setattr(bench.stage, "_save", lambda *_: {"saved": True})
    bench.plan.recorder = SimpleNamespace(seen=None, close=lambda: None)  # type: ignore[assignment]
    captures: list[list[int]] = []

    def capture(graphs: Any, sizes: Any, ranges: Any, *, keep: bool, agree: Any) -> Captured:
        captures.append(list(sizes))
        return Captured(graphs={4: "native 4"}, outputs={4: {}}, troubles={8: "CUDA out of memory"})

    monkeypatch.setattr("fer.cudagraph.capture.capture", capture)
    assert "8: CUDA out of memory" in bench.run().details["troubles"]
    assert captures == [[4, 8]]
