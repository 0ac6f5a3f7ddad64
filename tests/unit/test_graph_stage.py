"""The stage's decisions, with a pretended driver: whatever happens, every batch size ends with a graph and a reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fer
from fer.cudagraph import plan as planning
from fer.cudagraph import sections, state
from fer.cudagraph.capture import Captured
from fer.cudagraph.plan import Plan
from fer.cudagraph.restore import verify_owners
from fer.errors import DriverError, MappingError
from fer.fingerprint import Fingerprint
from fer.options import Options
from fer.report import Report
from fer.stages import Start
from tests.support.cudagraph_engine import ToyEngine
from tests.support.cudagraph_stage import Bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


def test_restored_graphs_are_used(bench: Bench) -> None:
    bench.restoring()
    row = bench.run()
    assert (row.path, row.details["graphs"], row.details["captured"]) == ("restored", 2, 0)
    assert {size: graph.name for size, graph in bench.graphs.used.items()} == {4: "decode/4", 8: "decode/8"}
    assert not bench.captures


def test_a_graph_that_fails_is_captured_and_quarantined(bench: Bench) -> None:
    bench.restoring(failed={"decode/8": "read-back differs"})
    row = bench.run()
    assert (row.path, row.why, row.details["captured"]) == ("restored", "read-back differs", 1)
    assert bench.captures == [([8], False)]  # beside restored graphs, never into their pool
    assert bench.graphs.used[8] == "native 8"
    assert state.load(bench.plan.path, "digest").quarantined == {"decode/8": "read-back differs"}


def test_wrong_outputs_are_captured_and_quarantined(bench: Bench) -> None:
    bench.restoring()
    bench.checks = {"decode/4": "its outputs are not the recorded ones"}
    assert bench.run().details["captured"] == 1
    assert bench.graphs.used == {8: bench.plan.ready.graphs["decode/8"], 4: "native 4"}


def test_moved_memory_drops_the_graphs_that_use_it_and_blames_none(bench: Bench) -> None:
    bench.restoring()
    owners = bench.plan.archive.facts["owners"]  # type: ignore[union-attr]
    owners[-1] = (owners[-1][0], owners[-1][1] + 512, owners[-1][2])
    row = bench.run()
    assert (row.path, row.details["graphs"], row.details["captured"]) == ("restored", 1, 1)
    assert "owner moved: tensor/x" in row.why
    assert bench.captures == [([4], False)]
    known = state.load(bench.plan.path, "digest")
    assert known.quarantined == {}
    assert "owner moved" in known.outdated  # the next start records again


def test_moved_weights_drop_every_graph(bench: Bench) -> None:
    restorer = bench.restoring()
    owners = bench.plan.archive.facts["owners"]  # type: ignore[union-attr]
    owners[0] = (owners[0][0], owners[0][1] + 512, owners[0][2])
    row = bench.run()
    assert restorer.cancelled
    assert (row.path, row.details["graphs"]) == ("refused", 0)
    assert bench.captures == [([4, 8], False)]


def test_another_layout_of_the_weights_drops_every_graph(bench: Bench) -> None:
    bench.restoring()
    bench.plan.archive.facts["weights"] = "another"  # type: ignore[union-attr]
    row = bench.run()
    assert row.path == "refused"
    assert "layout" in row.why


def test_an_archive_of_unsound_facts_costs_the_restore_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(plan: Plan, *, rest_after: int | None) -> None:
        raise KeyError("ranges")

    monkeypatch.setattr(planning, "begin", begin)
    row = bench.run()
    assert (row.path, row.details["saved"]) == ("loaded", False)
    assert "KeyError: 'ranges'" in row.why
    assert bench.captures == [([4, 8], False)]


class Disagreeing(ToyEngine):
    """One of two ranks; the other one always says no."""

    asked = 0

    def agree(self, flag: bool) -> bool:
        self.asked += 1
        return False


@pytest.mark.parametrize("how", ["restoring", "saving", "nothing"])
def test_ranks_ask_each_other_equally_often_on_every_path(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    engine = Disagreeing(graphs=bench.graphs)
    bench.start = Start(engine=engine, options=Options(), report=Report())
    if how == "restoring":
        bench.restoring()
        keep = bench.plan.archive
        monkeypatch.setattr(planning, "begin", lambda plan: setattr(plan, "archive", keep))
    elif how == "nothing":

        def fail(*_: Any) -> Any:
            raise MappingError("no")

        monkeypatch.setattr(planning, "make", fail)
    bench.run()
    assert engine.asked == 2


def test_without_an_archive_graphs_are_captured_and_saved(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    bench.plan.recorder = SimpleNamespace(seen=None, close=lambda: closed.append(1))  # type: ignore[assignment]
    monkeypatch.setattr(bench.stage, "_save", lambda *_: {"saved": True, "kept": 2})
    row = bench.run()
    assert (row.path, row.details["saved"], row.details["gc"]) == ("loaded", True, "frozen")
    assert (row.details["one_default_gc_s"], row.details["one_frozen_gc_s"]) == (0.2, 0.1)
    assert bench.captures == [([4, 8], True)]
    assert closed == [1]


def test_a_save_that_fails_costs_nothing_but_the_save(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.plan.recorder = SimpleNamespace(seen=None, close=lambda: None)  # type: ignore[assignment]

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(bench.stage, "_save", fail)
    row = bench.run()
    assert "please report" in row.why
    assert bench.graphs.used == {4: "native 4", 8: "native 8"}


@pytest.mark.parametrize("at", ["map", "capture"])
def test_memory_held_for_a_capture_that_fails_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    bench.plan.recorder = SimpleNamespace(seen=None, close=lambda: None)  # type: ignore[assignment]
    given_back = []

    def capture(graphs: Any, sizes: Any, ranges: Any, *, keep: bool, agree: Any) -> Captured:
        if ranges is not None:
            raise RuntimeError("CUDA out of memory")
        given_back.extend([ranges_.trimmed for ranges_ in (bench.plan.ranges.scratch, bench.plan.ranges.pool)])
        return bench.capture(graphs, sizes, ranges, keep=keep)

    def full(size: int, chunk: int = 0) -> None:
        raise MappingError("the range pool is full")

    monkeypatch.setattr("fer.cudagraph.capture.capture", capture)
    if at == "map":
        monkeypatch.setattr(bench.plan.ranges.pool, "map", full)
    row = bench.run()
    assert (row.path, row.details["captured"], given_back) == ("loaded", 2, [1, 1])
    assert "not saved" in row.why


def test_no_baseline_fails_no_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr("fer.cudagraph.capture.baseline", full)
    bench.plan.unsaved = "there is no CUPTI"
    row = bench.run()
    assert (row.path, row.details["captured"]) == ("loaded", 2)
    assert "one_default_gc_s" not in row.details


def test_a_proof_that_cannot_begin_fails_no_start(bench: Bench) -> None:
    bench.plan.unproven, bench.plan.unsaved = True, "it is proven again instead"
    row = bench.run()  # the archive is not there any more
    assert (row.path, row.details["captured"]) == ("loaded", 2)


def test_inputs_that_do_not_fit_into_their_range_lie_elsewhere(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, placed = bench.graphs.allocate, []

    def allocate() -> None:
        placed.append(1)
        if len(placed) == 1:
            raise RuntimeError("CUDA out of memory")
        plain()

    monkeypatch.setattr(bench.graphs, "allocate", allocate)
    bench.plan.recorder = SimpleNamespace(seen=None, close=lambda: None)  # type: ignore[assignment]
    row = bench.run()
    assert (row.path, row.details["captured"], row.details["saved"]) == ("loaded", 2, False)
    assert "do not fit into the range static" in row.why


def test_without_cupti_graphs_are_captured(bench: Bench) -> None:
    bench.plan.unsaved = "there is no CUPTI"
    row = bench.run()
    assert (row.path, row.details["saved"]) == ("loaded", False)
    assert "there is no CUPTI" in row.why


def test_taken_addresses_are_named_and_graphs_captured(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*_: Any) -> Any:
        raise MappingError("the range kv cannot lie at 0x3a7b")

    monkeypatch.setattr(planning, "make", taken)
    row = bench.run()
    assert (row.path, row.details["saved"]) == ("loaded", False)
    assert "cannot lie" in row.why
    assert bench.captures == [([4, 8], False)]
    assert bench.graphs.allocated == 1


def test_no_memory_for_the_cache_at_its_place_leaves_it_to_torch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    restorer = bench.restoring()

    def full(size: int, chunk: int = 0) -> None:
        raise DriverError("cuMemMap failed", call="cuMemMap", code=1)

    monkeypatch.setattr(bench.plan.ranges.kv, "map", full)
    row = bench.run()
    assert restorer.cancelled
    assert row.path == "loaded"
    assert "cuMemMap" in row.why


@pytest.mark.parametrize(
    ("options", "graphs", "path"),
    [({"cudagraph": False}, True, "off"), ({"mode": "off"}, True, "off"), ({}, False, "absent")],
)
def test_off_and_absent_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any], graphs: bool, path: str
) -> None:
    bench = Bench(monkeypatch, tmp_path, **options)
    if not graphs:
        bench.start.engine._graphs = None  # type: ignore[attr-defined]
    assert bench.run().path == path
    assert not bench.captures


def test_an_engine_on_the_cpu_has_no_graphs() -> None:
    report = fer.recover(ToyEngine("cpu"), mode="off")
    assert report.stages["cudagraph"].path == "off"


def test_owners_that_are_missing_moved_or_smaller_are_named() -> None:
    from fer.cudagraph.audit import Owner

    recorded = [("weight/a", 100, 10), ("tensor/b", 200, 10), ("tensor/c", 300, 10), ("scratch/0", 5, 5)]
    now = [Owner("tensor/b", 208, 10), Owner("tensor/c", 300, 8)]
    assert [text.split(",")[0] for text in verify_owners(recorded, now).values()] == [
        "owner missing: weight/a",
        "owner moved: tensor/b from 0xc8 to 0xd0",
        "owner moved: tensor/c from 0x12c to 0x12c",
    ]


RECORDED = Path(__file__).parent.parent / "data" / "h200.fergraph"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"environment": {"driver": "590.1"}}, "environment.driver"),
        ({"environment": {"gpu": "NVIDIA H100"}}, "environment.gpu"),
        ({"environment": {"torch": "2.12"}}, "environment.torch"),
        ({"graphs": {"batch_sizes": [1]}}, "graphs.batch_sizes"),
        ({"graphs": {"kv": {"shape": [16]}}}, "graphs.kv.shape"),
        ({"graphs": {"libraries": {"nvidia-cublas": "13.1"}}}, "graphs.libraries"),
    ],
)
def test_another_environment_is_a_miss_that_names_the_field(
    bench: Bench, tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    from fer.cudagraph import archive as archives

    group: dict[str, Any] = {
        "environment": {"driver": "580.159", "gpu": "NVIDIA H200", "torch": "2.11"},
        "graphs": {"batch_sizes": [4, 8], "kv": {"shape": [8, 4]}, "libraries": {"nvidia-cublas": "13.0"}},
    }
    archive = archives.read(RECORDED)
    archive.facts["fingerprint"] = {"schema": 1, "group": group, "rank": {}}
    archives.write(bench.plan.path, archive)
    digest = sections.Sections(bench.plan.path).digest
    bench.plan.fingerprint = Fingerprint(group=group, rank={})
    planning._choose(bench.plan)  # what it would be compared with was recorded with other weights
    assert "other weights" in bench.plan.why
    assert (bench.plan.unproven, bench.plan.unsaved) == (False, "")
    bench.plan.checkpoint = "fixture"
    planning._choose(bench.plan)
    assert "unproven" in bench.plan.why
    assert bench.plan.unproven
    assert bench.plan.unsaved  # it is proven again, not saved again
    state.save(bench.plan.path, state.State(digest, "failed", "differs", by=fer.__version__))
    bench.plan.why, bench.plan.unproven = "", False
    planning._choose(bench.plan)
    assert bench.plan.why == "the archive's proof failed: differs"
    assert not bench.plan.unproven
    state.save(bench.plan.path, state.State(digest, "failed", "differs", by="another version"))
    planning._choose(bench.plan)
    assert bench.plan.unproven
    state.save(bench.plan.path, state.State(digest, "proven", outdated="owner moved: weight/a"))
    bench.plan.unsaved = ""
    planning._choose(bench.plan)
    assert (bench.plan.archive, bench.plan.unsaved) == (None, "")
    assert "saved anew" in bench.plan.why
    state.save(bench.plan.path, state.State(digest, "proven"))
    bench.plan.why = ""
    planning._choose(bench.plan)
    assert bench.plan.archive is not None, bench.plan.why
    bench.plan.archive = None
    other = {key: {**value, **change.get(key, {})} for key, value in group.items()}
    bench.plan.fingerprint = Fingerprint(group=other, rank={})
    planning._choose(bench.plan)
    assert bench.plan.archive is None
    assert field in bench.plan.why


def test_a_damaged_archive_is_a_miss_that_names_the_section(bench: Bench) -> None:
    data = bytearray(RECORDED.read_bytes())
    data[sections.Sections(RECORDED).entries["facts"].offset + 4] ^= 1
    bench.plan.path.write_bytes(data)
    planning._choose(bench.plan)
    assert "facts" in bench.plan.why


def test_an_archive_that_others_could_have_written_is_not_used(bench: Bench) -> None:
    bench.plan.path.write_bytes(RECORDED.read_bytes())
    bench.plan.path.parent.chmod(0o777)
    planning._choose(bench.plan)
    assert bench.plan.archive is None
    assert "mode 0o777" in bench.plan.why
