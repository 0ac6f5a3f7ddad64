"""What a proof's child says, how it ends, and what is written down of the archive."""

from __future__ import annotations

import io
import json
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fer.cudagraph import proof, sections, state
from fer.cudagraph.restore import Progress
from fer.errors import DriverError
from tests.support.cudagraph_stage import Bench, FakeRange


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


RECORDED = Path(__file__).parent.parent / "data" / "h200.fergraph"


@pytest.mark.parametrize(
    ("code", "out", "verdict"),
    [
        (0, '{"proven": 2, "wrong": {}}', "proven"),
        (0, 'noise\n{"proven": 1, "wrong": {"decode/4": "differs"}}', "proven"),
        (0, '{"proven": 0, "wrong": {"decode/4": "differs"}}', "failed"),
        (-11, "", "failed"),
        (-9, "", "unproven"),
        (-9, '{"at": "decode/4"}', "unproven"),
        (1, '{"at": "decode/4"}', "failed"),
        (0, '{"error": {"kind": "OutOfMemory", "what": "no room"}}', "unproven"),
    ],
)
def test_the_childs_end_decides(code: int, out: str, verdict: str) -> None:
    known = state.State("digest")
    assert proof._judge(known, code, out, "Segmentation fault") == ""
    assert known.proof == verdict
    assert known.why or verdict == "proven"


def test_a_child_that_cannot_work_leaves_the_archive_unproven(tmp_path: Path) -> None:
    archive = tmp_path / "a.fergraph"
    archive.write_bytes(RECORDED.read_bytes())
    request = proof.Request(str(archive), 99, "fixture", "", "")
    known = proof.prove(request, sections.Sections(archive).digest)
    assert known.proof == "unproven"  # no driver here, or no such GPU
    assert known.why
    assert state.load(archive, known.digest) == known


def died(name: str) -> str:
    return json.dumps({"proven": 1, "wrong": {name: "its replay failed"}, "died_of": name})


OUT_OF_MEMORY = json.dumps({"error": {"kind": "OutOfMemory", "what": "no room"}})


@pytest.mark.parametrize(
    ("ends", "verdict", "why"),
    [
        ([died("decode/4"), '{"proven": 1, "wrong": {}}'], "proven", ""),
        ([died("decode/4"), OUT_OF_MEMORY], "unproven", "no room"),
        ([died("decode/4"), subprocess.TimeoutExpired("child", 1)], "unproven", "did not end"),
        ([died("decode/4"), OSError("no processes")], "unproven", "could not be started"),
        ([died(f"decode/{size}") for size in range(9)], "failed", "could not go on after decode/3"),
        ([-11, '{"proven": 1, "wrong": {}}'], "proven", ""),
        ([-7, -9], "unproven", "ended with -9"),
    ],
)
def test_children_go_on_without_the_graph_the_last_one_died_of(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ends: list[Any], verdict: str, why: str
) -> None:
    skipped, answers = [], iter(ends)

    def run(*_: Any, input: str, **__: Any) -> Any:
        skipped.append(json.loads(input)["skip"])
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return SimpleNamespace(returncode=answer, stdout='{"at": "decode/2"}\n{"at": "decode/4"}\n', stderr="")
        return SimpleNamespace(returncode=0, stdout=answer, stderr="")

    monkeypatch.setattr(proof.subprocess, "run", run)
    known = proof.prove(proof.Request(str(bench.plan.path), 0, "fixture", "", ""), "digest")
    assert (known.proof, why in known.why) == (verdict, True)
    assert skipped[1] == [next(iter(known.quarantined))]
    assert state.load(bench.plan.path, "digest") == known


class Child:
    """What the proof's child works with, pretended; ``progress`` and ``ready`` are what became of the graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.progress, self.ready = Progress(), {}
        self.compared: list[str] = []
        self.error: Exception | None = None
        device = SimpleNamespace(current=nullcontext, context=1, ordinal=0)
        monkeypatch.setattr("fer.memory.device.CudaDevice", lambda ordinal: device)
        ranges = SimpleNamespace(kv=FakeRange("kv"), static=FakeRange("static"), device=device)
        ranges.kv.map_over_and_over = lambda size, slab: None
        monkeypatch.setattr("fer.memory.ranges.reserve", lambda device: ranges)
        monkeypatch.setattr("fer.cudagraph.libcuda.open_cuda", lambda restoring: None)
        monkeypatch.setattr("torch.cuda.set_device", lambda ordinal: None)
        monkeypatch.setattr("torch.zeros", lambda *_, **__: None)
        monkeypatch.setattr(proof, "place", lambda *_: None)
        monkeypatch.setattr(proof, "Restorer", self.restorer)
        monkeypatch.setattr(proof, "outputs_of", self.outputs_of)
        monkeypatch.setattr("fer.cudagraph.probe.fill_pattern", lambda *_: None)
        monkeypatch.setattr("fer.cudagraph.probe.judge", lambda *_: "")

    def restorer(self, archive: Any, cuda: Any, ready: Any, **_: Any) -> Any:
        def run() -> None:
            for name, graph in self.ready.items():
                ready(name, graph)

        return SimpleNamespace(progress=self.progress, run=run)

    def outputs_of(self, archive: Any, name: str, *_: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.compared.append(name)
        return {}

    def run(self, monkeypatch: pytest.MonkeyPatch, checkpoint: str = "fixture") -> Any:
        told, said = io.StringIO(json.dumps(vars(proof.Request(str(RECORDED), 0, checkpoint, "", "")))), io.StringIO()
        monkeypatch.setattr("sys.stdin", told)
        monkeypatch.setattr("sys.stdout", said)
        monkeypatch.setattr(proof.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
        assert proof.main() == 0
        return json.loads(said.getvalue().splitlines()[-1])


def test_a_graph_that_was_not_compared_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    child.ready = {"decode/1": None}
    answer = child.run(monkeypatch)
    assert (answer["proven"], answer["wrong"]) == (1, {"decode/2": "it was not restored"})
    assert child.compared == ["decode/1"] * 2


def test_outputs_of_other_weights_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "other weights" in Child(monkeypatch).run(monkeypatch, "another")["error"]["why"]


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA out of memory. Tried"), DriverError("x", call="cuGraphLaunch", code=2)]
)
def test_a_child_that_lacks_memory_blames_no_graph(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    child = Child(monkeypatch)
    child.ready = {"decode/1": None, "decode/2": None}
    child.error = error
    assert "error" in child.run(monkeypatch)
    child.ready, child.error = {"decode/1": None}, None
    child.progress.failed, child.progress.passing = {"decode/2": "cuGraphInstantiate failed with 2"}, {"decode/2"}
    assert "decode/2" in child.run(monkeypatch)["error"]["why"]


def test_another_failure_blames_the_graph_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(monkeypatch)
    child.ready, child.error = {"decode/1": None, "decode/2": None}, RuntimeError("an illegal memory access")
    assert child.run(monkeypatch)["died_of"] == "decode/1"
