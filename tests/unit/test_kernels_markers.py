"""Markers of completed walks (K15): written after the last shape only, of use with their kernels only, and carried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fer.engines.base import EngineIdentity, Ranks
from fer.errors import PeerRefused
from fer.kernels import coverage, gpus, markers, pack, store, unpack
from fer.kernels.markers import Marker
from fer.kernels.unpack import Terms
from tests.support import kernel_entries as made
from tests.support.processes import ROOT, WAIT_S


def marker(**changed: Any) -> Marker:
    facts: dict[str, Any] = {"engine": "sglang 0.5.23", "model": "m", "tp": 8, "arch": "90a", "sweep": "deepgemm"}
    return Marker(**{**facts, "first": 1, "last": 4096, **changed})


def compiled(root: Path, name: str = "gemm") -> Path:
    """One kernel as DeepGEMM leaves it."""
    folder = root / "cache" / f"kernel.{name}"
    folder.mkdir(parents=True)
    (folder / "kernel.cu").write_text("source")
    (folder / "kernel.cubin").write_bytes(made.binary())
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    compiled(tmp_path / "dg")
    return tmp_path / "dg"


def test_a_completed_walk_is_left_out_and_another_is_not(root: Path) -> None:
    walked: list[str] = []
    assert "no completed walk" in markers.walk(marker(), lambda: walked.append("all"), root=root)
    for other in (marker(), marker(first=16, last=2048)):
        assert markers.walk(other, lambda: walked.append("again"), root=root) == ""
    assert walked == ["all"]
    assert "was for 1 to 4096" in markers.why_not(marker(last=8192), root)
    for changed in ({"tp": 4}, {"engine": "sglang 0.5.24"}, {"model": "n"}, {"arch": "100a"}, {"sweep": "other"}):
        assert not markers.done(marker(**changed), root)
    assert "8192" in markers.walk(marker(last=8192), lambda: walked.append("wider"), root=root)
    assert markers.done(marker(last=8192), root) and markers.done(marker(), root)


def test_a_marker_is_worth_nothing_without_its_kernels(root: Path) -> None:
    path = markers.write(marker(), root)
    assert oct(path.parent.stat().st_mode)[-3:] == "700"
    next(root.rglob("kernel.cubin")).write_bytes(b"")
    assert "1 of its 1 kernels are missing" in markers.why_not(marker(), root)
    markers.write(marker(), root)
    assert markers.why_not(marker(), root) == "the walk left no kernels"


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1}', "[" * 100_000, "\xff"])
def test_a_marker_that_cannot_be_read_leaves_nothing_out(root: Path, text: str) -> None:
    path = markers.write(marker(), root)
    path.write_text(text, encoding="latin-1")
    assert not markers.done(marker(), root)
    data = {"schema": 1, **vars(marker()), "entries": [{}]}
    path.write_text(json.dumps(data))
    assert markers.why_not(marker(), root) == "the marker cannot be read"


def test_an_unknown_gpu_leaves_nothing_out(root: Path) -> None:
    unknown = marker(arch="")
    for _ in range(2):
        assert "not known" in markers.walk(unknown, lambda: None, root=root)
    assert not list(markers.folder().parent.glob("markers/*"))


def test_a_walk_that_fails_is_no_walk(root: Path) -> None:
    told: list[bool] = []

    def agree(flag: bool) -> bool:
        told.append(flag)
        return flag

    def fails() -> None:
        raise RuntimeError("out of memory at M=2048")

    with pytest.raises(RuntimeError, match="M=2048"):
        markers.walk(marker(), fails, root=root, agree=agree)
    assert told == [False, False]  # the others do not wait for a word
    assert not markers.done(marker(), root)


def test_ranks_walk_together_and_write_together(root: Path, tmp_path: Path) -> None:
    markers.write(marker(), root)
    walked: list[int] = []
    why = markers.walk(marker(), lambda: walked.append(1), root=root, agree=lambda flag: False)
    assert (why, walked) == ("another rank has to", [1])
    elsewhere = tmp_path / "home"  # this rank walked, and another one failed
    markers.walk(marker(), lambda: walked.append(2), root=root, home=elsewhere, agree=lambda flag: False)
    assert walked == [1, 2] and not markers.done(marker(), root, home=elsewhere)


def test_a_folder_that_is_not_private_costs_the_marker_only(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    markers.write(marker(), root)
    (markers.folder() / marker(model="n").name).mkdir(mode=0o777)
    (markers.folder() / marker(model="n").name).chmod(0o777)
    walked: list[int] = []
    markers.walk(marker(model="n"), lambda: walked.append(1), root=root)
    assert walked == [1] and "done again by the next start" in caplog.text
    with pytest.raises(PeerRefused):
        markers.write(marker(model="n"), root)


SWEEP = """
import os, sys
from pathlib import Path
from fer.kernels import markers
from tests.unit.test_kernels_markers import compiled, marker
root, last = Path(sys.argv[1]), int(sys.argv[2])

def walk():
    for shape in range(8):
        folder = root / "cache" / f"kernel.m{shape}"
        if not folder.is_dir():
            compiled(root, f"m{shape}")
        print(shape, flush=True)
        if shape == last:
            os.kill(os.getpid(), 9)

print("why:", markers.walk(marker(), walk, root=root), flush=True)
"""


@pytest.mark.parametrize("last", [0, 3, 7])
def test_a_walk_that_is_killed_is_done_again_and_then_left_out(tmp_path: Path, last: int) -> None:
    def start(last: int) -> tuple[int, list[str]]:
        command = [sys.executable, "-c", SWEEP, str(tmp_path / "dg"), str(last)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S * 2)
        return done.returncode, done.stdout.splitlines()

    status, lines = start(last)
    assert (status, lines[-1]) == (-9, str(last))  # after the last shape too: it was not told yet
    assert not markers.done(marker(), tmp_path / "dg")
    status, lines = start(99)
    assert (status, len(lines)) == (0, 9) and "no completed walk" in lines[-1]
    assert start(99) == (0, ["why: "])


def test_markers_travel_with_their_kernels(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    markers.write(marker(), root)
    archive = tmp_path / "a.ferkernels"
    packed = pack.pack({"deepgemm": root, "markers": markers.folder()}, archive)
    assert not any(each.code for each in packed.manifest.entries if each.component == "markers")
    monkeypatch.setenv("FER_HOME", str(tmp_path / "other-home"))
    there = tmp_path / "elsewhere"
    assert not markers.done(marker(), there)
    outcome = unpack.unpack(archive, {"deepgemm": there, "markers": markers.folder()}, Terms(code="skip"))
    assert len(outcome.restored) == 2
    assert markers.done(marker(), there)
    assert not markers.done(marker(), tmp_path / "nowhere")


def test_a_start_with_a_home_of_its_own_has_its_markers_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = store.new_start(tmp_path / "own")
    monkeypatch.setenv(coverage.VARIABLE, str(started))
    assert tmp_path / "own" in markers.write(marker(), root).parents
    assert markers.done(marker(), root)
    monkeypatch.delenv(coverage.VARIABLE)
    assert not markers.done(marker(), root)
    assert markers.done(marker(), root, home=tmp_path / "own")


# -- of an engine that is described to FER


IDENTITY = EngineIdentity(
    engine="transformers",
    engine_version="5.0",
    model="/models/a",
    dtype="bfloat16",
    settings={"config": {"hidden_size": 8}},
    ranks=Ranks(tp_size=2, launch="x"),
)


def of(identity: EngineIdentity) -> Marker:
    return markers.of_engine(identity, sweep="lengths", first=1, last=64)


def test_what_makes_another_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "look", lambda: gpus.Seen(archs=(90,)))
    first = of(IDENTITY)
    assert (first.engine, first.tp, first.arch, first.component) == ("transformers 5.0", 2, "90", "triton")
    assert of(replace(IDENTITY, model="/models/b", ranks=Ranks(tp_size=2, tp_rank=1, launch="y"))) == first
    for changed in (
        {"dtype": "float16"},
        {"settings": {"config": {"hidden_size": 16}}},
        {"engine_version": "5.1"},
        {"ranks": Ranks(tp_size=4)},
        {"ranks": Ranks(tp_size=2, pp_size=2)},
        {"packages": ["msgspec"]},
    ):
        assert of(replace(IDENTITY, **changed)).name != first.name
    monkeypatch.setattr(gpus, "look", lambda: gpus.Seen(archs=(90, 100)))
    assert of(IDENTITY).arch == ""
    monkeypatch.setattr(gpus, "look", lambda: None)
    assert of(IDENTITY).arch == ""


def test_of_tritons_cache_it_names_what_the_start_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "look", lambda: gpus.Seen(archs=(90,)))
    monkeypatch.setenv(coverage.VARIABLE, str(tmp_path))
    kernel, other = (made.make(tmp_path / "cache", name) for name in ("add", "of-another-model"))
    coverage.note(kernel.name, "add", hit=False)
    path = markers.write(of(IDENTITY), tmp_path / "cache")
    assert json.loads(path.read_text())["entries"] == [kernel.name]
    os.unlink(other / "add.cubin" if (other / "add.cubin").exists() else next(other.glob("*.cubin")))
    assert markers.done(of(IDENTITY), tmp_path / "cache")
