"""CUDA graphs on a GPU: saved by one process, replayed bit for bit by others, refused by name where they cannot be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fer.cudagraph import archive as archives
from fer.cudagraph import sections, state, store
from tests.support import engine_models as models
from tests.support import zygote
from tests.support.processes import kill_all_with

pytestmark = pytest.mark.timeout(400)

PROMPTS = [[1, 5, 9, 200, 31], [1, 7], [1, 44, 300, 8, 90, 17, 6]]


LIMIT_S = 180.0
"""Seconds one start may take, the proof beside it included."""


def child(argument: str, *, plain: bool = False, **environ: str) -> dict[str, Any]:
    """What one process printed; ``plain``: a new interpreter, where its start is part of what is tested."""
    module, environment = "tests.support.graphs_child", {**os.environ, **environ}
    if plain:
        process: subprocess.Popen[str] | zygote.Forked = subprocess.Popen(
            [sys.executable, "-m", module, argument],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    else:
        process = zygote.shared.fork(module, argument, env=environment, preload=zygote.WITH_TRANSFORMERS)
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait(LIMIT_S)
    rows = [line for line in out.splitlines() if line.startswith("{")]
    assert rows, f"exit {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
    return dict(json.loads(rows[-1]))


@dataclass
class Kept:
    """A published model with a proven archive, and what its first start answered."""

    folder: Path
    environ: dict[str, str]
    first: dict[str, Any]

    def start(self, environ: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
        row = {"folder": str(self.folder), "prompts": PROMPTS, **asked}
        # Variables of torch are read when it is imported, and the order of imports is what one disturbance is about.
        plain = environ is not None or asked.get("disturb") == "imports"
        return child(json.dumps(row), plain=plain, **self.environ, **(environ or {}))

    @property
    def archive(self) -> Path:
        (path,) = store.find(Path(self.environ["FER_HOME"]))
        return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """The first start publishes the weights; what it captures is saved, and proven while it lives."""
    around = tmp_path_factory.mktemp("graphs")
    runtime = tempfile.mkdtemp(prefix="fer-graphs-")
    environ = {"FER_HOME": str(around / "home"), "FER_RUNTIME_DIR": runtime}
    kept = Kept(models.qwen3(around / "qwen3"), environ, {})
    try:
        kept.first = kept.start(proof=True)
        yield kept
    finally:
        kill_all_with("FER_RUNTIME_DIR", runtime)
        shutil.rmtree(runtime, ignore_errors=True)


@pytest.fixture
def kept(saved: Kept, tmp_path: Path) -> Kept:
    """The same model and keeper, with archives of one's own."""
    home = tmp_path / "home"
    shutil.copytree(saved.environ["FER_HOME"], home)
    return Kept(saved.folder, {**saved.environ, "FER_HOME": str(home)}, saved.first)


def test_graphs_are_saved_and_proven(saved: Kept) -> None:
    row = saved.first
    assert row["path"] == "loaded", row
    assert (row["details"]["saved"], row["details"]["kept"]) == (True, 3), row
    assert (row["proof"], row["quarantined"]) == ("proven", {}), row
    assert row["details"]["one_default_gc_s"] > 0
    assert row["details"]["one_frozen_gc_s"] > 0


@pytest.mark.parametrize("disturbance", ["", "context", "allocations", "modules", "imports"])
def test_graphs_come_back_and_decode_the_same_tokens(kept: Kept, disturbance: str) -> None:
    row = kept.start(disturb=disturbance)
    assert (row["path"], row["details"]["graphs"], row["details"]["captured"]) == ("restored", 3, 0), row
    assert (row["answers"], row["alone"], row["session"]) == (kept.first["answers"], kept.first["alone"], [])


def test_all_probes_hold_in_a_complete_check(kept: Kept) -> None:
    row = kept.start(options={"verify": "full"})
    assert (row["path"], row["details"]["graphs"], row["answers"]) == ("restored", 3, kept.first["answers"]), row


def test_without_graphs_the_tokens_are_the_same(kept: Kept) -> None:
    row = kept.start(options={"cudagraph": False})
    assert (row["answers"], row["alone"]) == (kept.first["answers"], kept.first["alone"])


def test_a_taken_base_is_refused_and_serves(kept: Kept) -> None:
    row = kept.start(disturb="base")
    assert (row["path"], row["answers"]) == ("loaded", kept.first["answers"]), row
    assert "scratch cannot lie" in row["why"]


@pytest.mark.parametrize("section", ["params", "nodes", "binaries"])
def test_damaged_archives_serve_and_name_the_section(kept: Kept, section: str) -> None:
    data = bytearray(kept.archive.read_bytes())
    entry = sections.Sections(kept.archive).entries[section]
    for at in range(entry.offset, entry.offset + entry.stored, max(1, entry.stored // 64)):
        data[at] ^= 1
    kept.archive.write_bytes(data)
    row = kept.start()
    assert row["answers"] == kept.first["answers"], row
    assert section in row["why"] or "binary" in row["why"], row


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "cudaMallocAsync"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "CUBLAS_WORKSPACE_CONFIG"),
    ],
)
def test_another_environment_is_named_and_serves(kept: Kept, environ: dict[str, str], why: str) -> None:
    row = kept.start(environ)
    assert row["path"] == "loaded"
    assert why in row["why"], row
    assert row["alone"] == kept.first["alone"]


def test_other_batch_sizes_are_a_miss_that_names_them(kept: Kept) -> None:
    row = kept.start(batch_sizes=[4, 8])
    assert row["path"] == "loaded"
    assert "batch_sizes" in row["why"], row


@pytest.mark.parametrize(("disturbance", "why"), [("profiler", "another profiler"), ("no-cupti", "there is no CUPTI")])
def test_without_cupti_graphs_are_captured_and_the_reason_said(kept: Kept, disturbance: str, why: str) -> None:
    row = kept.start(disturb=disturbance, batch_sizes=[4, 8])  # no archive fits, so one would be saved
    assert (row["path"], row["details"]["saved"]) == ("loaded", False), row
    assert why in row["why"], row
    assert row["alone"] == kept.first["alone"]


def test_without_memory_for_the_pool_the_engine_captures_and_serves(kept: Kept) -> None:
    archive = archives.read(kept.archive)
    archive.facts["ranges"]["pool"]["used"] = 192 << 30  # bytes, more than such a GPU has
    archives.write(kept.archive, archive)
    state.save(kept.archive, state.State(archives.facts_of(kept.archive)[1], "proven"))
    row = kept.start()
    assert (row["path"], row["answers"]) == ("loaded", kept.first["answers"]), row
    assert "the range pool needs" in row["why"], row


def test_an_unproven_archive_is_proven_again_and_then_used(kept: Kept) -> None:
    state.beside(kept.archive).unlink()  # the first engine died before its child had ended
    before = kept.archive.read_bytes()
    row = kept.start(proof=True)
    assert (row["path"], row["proof"], row["answers"]) == ("loaded", "proven", kept.first["answers"]), row
    assert kept.archive.read_bytes() == before
    assert kept.start()["path"] == "restored"


def test_a_wrong_digest_fails_the_proof_of_its_graph_alone(kept: Kept) -> None:
    archive = archives.read(kept.archive)
    (golden,) = archive.facts["golden"].values()
    golden["decode/2"] = ["0" * 64, "0" * 64]
    archives.write(kept.archive, archive)
    state.beside(kept.archive).unlink()
    row = kept.start(proof=True)
    assert (row["proof"], list(row["quarantined"])) == ("proven", ["decode/2"]), row
    row = kept.start()
    assert (row["path"], row["details"]["graphs"], row["details"]["captured"]) == ("restored", 2, 1), row
    assert row["answers"] == kept.first["answers"]


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    found = child("hostile")
    assert "points to memory outside the arena" in found["outside"][0]
    assert any("memcpy from host memory" in why for why in found["copy"]), found
    assert any("event record node" in why for why in found["record"]), found
    assert found["dropout"], found


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="recorded on an H200"
)
def test_an_archive_of_another_day_replays_bitwise() -> None:
    row = child("fixture")
    if row.get("elsewhere"):
        pytest.skip("recorded at the addresses of a host's first GPU, and this is another one")
    assert (row["proven"], row["wrong"], row["died_of"]) == (2, {}, "")
