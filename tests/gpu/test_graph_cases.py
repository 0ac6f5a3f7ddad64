"""Graphs that are hard to keep, each with its right answer: restored bit for bit, or refused by name and captured.

One process records all cases, some more restore them in other circumstances; the tests look at what they said.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
model = pytest.importorskip("tests.support.graph_cases_model", reason="the cases need Triton")

from tests.support.graph_cases_kernels import along  # noqa: E402

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="clusters of 16, programmatic launches and tensor maps need compute capability 9.0",
    ),
]

MAIN = (*model.KEPT, *model.REFUSED)
LATE = ("product", "norms", "tuned_late")
TWICE = ("product", "scaled", "twice")
TRITON = ("norms", "programmatic", "tiles", "tuned")

Row = dict[str, Any]


def child(role: str, file: Path, **asked: Any) -> Row:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.graph_cases", json.dumps({"role": role, "file": str(file), **asked})],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return dict(json.loads(rows[-1]))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cases") / "main.fergraph"


@pytest.fixture(scope="module")
def recorded(file: Path) -> Row:
    """All of the main cases, recorded beside 64 MiB that no other process allocates, Triton imported before FER."""
    return child("save", file, cases=MAIN, extra=True, before=["triton", "transformers"])


@pytest.fixture(scope="module")
def restored(recorded: Row, file: Path) -> dict[str, Row]:
    """The same in other processes, by what is different there."""
    return {
        # FER first; Triton and the engine's library only then.
        "plain": child("restore", file, cases=MAIN, after=["triton", "transformers"]),
        # Own copies of the modules are loaded before, their variables set otherwise, and what Triton loaded is lost.
        "own": child(
            "restore", file, cases=MAIN, before=["transformers", "triton"], scale=5.0,
            own=["scaled", "scaled_by_library", "table", "cluster", *TRITON], drop=True,
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def moved(recorded: Row, file: Path) -> Row:
    """An engine that allocates 16 MiB more among its inputs and does not name one of them."""
    return child("moved", file, cases=MAIN)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Row, Row]:
    """One binary loaded twice; this time the process that restores is the one that allocates more."""
    place = tmp_path_factory.mktemp("twice") / "twice.fergraph"
    return child("save", place, cases=TWICE), child("restore", place, cases=TWICE, extra=True)


@pytest.fixture(scope="module")
def late_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("late") / "late.fergraph"


@pytest.fixture(scope="module")
def late(late_file: Path) -> Row:
    """One capture fails; the largest "batch size" is captured first, so the others come after it."""
    return child("save", late_file, cases=LATE)


def test_all_cases_are_right_before_anything_is_kept(recorded: Row) -> None:
    assert (recorded["troubles"], recorded["recorder"]) == ({}, [])
    assert recorded["right"] == dict.fromkeys(MAIN, True)


@pytest.mark.parametrize("where", ["plain", "own"])
@pytest.mark.parametrize("case", model.KEPT)
def test_a_kept_graph_comes_back_bitwise(recorded: Row, restored: dict[str, Row], case: str, where: str) -> None:
    row = restored[where]
    assert case in recorded["kept"], recorded["refused"]
    assert case not in row["failed"], row["failed"]
    assert row["outputs"][case] == recorded["outputs"][case]
    assert row["right"][case]


@pytest.mark.parametrize("case", model.REFUSED)
def test_a_refused_graph_is_named_and_captured(recorded: Row, restored: dict[str, Row], case: str) -> None:
    assert model.REFUSED[case] in recorded["refused"][case]
    native = restored["plain"]["native"]
    assert native["troubles"] == {}
    assert native["outputs"][case] == recorded["outputs"][case]
    assert native["right"][case]


def test_what_is_refused_costs_the_others_nothing(recorded: Row, restored: dict[str, Row]) -> None:
    assert sorted(recorded["kept"]) == sorted(model.KEPT)
    assert sorted(recorded["refused"]) == sorted(model.REFUSED)
    assert restored["plain"]["after_native"]


def test_allocations_of_one_process_alone_move_nothing(
    recorded: Row, restored: dict[str, Row], twice: tuple[Row, Row]
) -> None:
    for before, after in ((recorded, restored["plain"]), (recorded, restored["own"]), twice):
        assert after["owners"] == {}
        assert after["addresses"] == before["addresses"]


def test_memory_that_moved_or_is_missing_is_named_and_all_is_captured(recorded: Row, moved: Row) -> None:
    row = moved
    assert "owner missing: tensor/looked_up" in row["owners"]
    assert any(why.startswith("owner moved: tensor/x from 0x") for why in row["owners"]), row["owners"]
    assert sorted(row["touched"]) == sorted(MAIN), "all of them read what moved"
    assert (row["native"]["troubles"], row["native"]["outputs"]) == ({}, recorded["outputs"])


def test_memory_that_a_module_variable_points_to_is_watched_too(moved: Row) -> None:
    assert moved["without"] == {"table": "owner missing: tensor/looked_up"}


def test_the_proof_finds_every_kept_graph_right(recorded: Row, file: Path) -> None:
    assert child("prove", file) == {"proven": len(recorded["kept"]), "wrong": {}}


@pytest.mark.parametrize("case", ["programmatic", "programmatic_by_hand"])
def test_programmatic_launches_keep_their_edges(
    recorded: Row, restored: dict[str, Row], case: str, record_testsuite_property: Callable[[str, object], None]
) -> None:
    native = along(recorded["edges"][case])
    assert len(native) == model.LINKS - 1
    assert set(native) == {(1, 1)}, "type programmatic, from the port for programmatic launches"
    row = restored["plain"]
    assert along(row["archive_edges"][case]) == native
    assert along(row["edges"][case]) == native
    paces = {"case": case, "kernels": model.LINKS, "native_us": recorded["us"][case], "restored_us": row["us"][case]}
    record_testsuite_property(f"pace of {case}", json.dumps(paces))
    print(json.dumps(paces))


def test_every_edge_is_as_it_was(recorded: Row, restored: dict[str, Row]) -> None:
    for case in model.KEPT:
        kinds = sorted(edge[2:] for edge in recorded["edges"][case])
        for row in restored.values():
            assert sorted(edge[2:] for edge in row["edges"][case]) == kinds, case


def test_consumers_of_events_are_kept_waiting(recorded: Row, restored: dict[str, Row]) -> None:
    for row in (recorded, restored["plain"]["native"]):
        assert row["consumers"] == {"event_record": [True] * 4, "event_wait": [True] * 4}


def test_kernels_that_triton_forgot_replay(restored: dict[str, Row]) -> None:
    assert restored["own"]["dropped"] == {"loaded": True, "gone": True}
    assert all(restored["own"]["right"][case] for case in TRITON)


def test_a_kernel_tuned_in_the_capture_is_named_and_the_others_go_on(late: Row, late_file: Path) -> None:
    assert list(late["troubles"]) == ["tuned_late"], late["troubles"]
    assert late["refused"] == late["troubles"]
    assert "captur" in late["troubles"]["tuned_late"], late["troubles"]
    row = child("restore", late_file, cases=LATE)
    assert row["failed"] == {}
    for case in ("product", "norms"):
        assert row["outputs"][case] == late["outputs"][case]
    assert list(row["native"]["troubles"]) == ["tuned_late"]
    assert row["native"]["allocator"] == ""


def test_a_failed_capture_leaves_torch_as_it_was(late: Row) -> None:
    assert late["allocator"] == ""


def test_two_copies_of_one_binary_do_not_get_each_others_variables(twice: tuple[Row, Row]) -> None:
    """Either both come back as they were, or what uses them is refused."""
    before, after = twice
    assert before["right"] == dict.fromkeys(TWICE, True)
    for case in ("twice", "scaled"):
        if case in before["refused"]:
            assert "variable" in before["refused"][case]
            assert after["native"]["right"][case]
        else:
            assert (case not in after["failed"], after["right"].get(case)) == (True, True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_what_nccl_launches_is_refused_on_both_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.graph_cases_nccl"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for out in said:
        rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert rows, out[-4000:]
        row = rows[-1]
        assert "collective kernel" in row["why"] and "nccl" in row["why"], row
        assert (row["kept"], row["refused"]) == (2, [row["name"]]), row
        assert row["right"] == {"product": True, "collective": True, "scaled": True}
