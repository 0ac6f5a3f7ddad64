"""CUDA graphs on a GPU: saved by one process, replayed bit for bit by others, refused by name where they cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fer.cudagraph import sections, store
from tests.support import engine_models as models

pytestmark = pytest.mark.timeout(400)

PROMPTS = [[1, 5, 9, 200, 31], [1, 7], [1, 44, 300, 8, 90, 17, 6]]


def child(argument: str, **environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.graphs_child", argument],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **environ},
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert rows, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return dict(json.loads(rows[-1]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return models.qwen3(tmp_path / "qwen3")


def start(folder: Path, environ: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
    return child(json.dumps({"folder": str(folder), "prompts": PROMPTS, **asked}), **(environ or {}))


def saved(folder: Path) -> dict[str, Any]:
    """Two starts: the first publishes the weights, and what it captures is saved and proven."""
    row = start(folder, proof=True)
    assert row["path"] == "loaded", row
    assert row["details"]["saved"], row
    assert row["details"]["kept"] == 3, row
    assert (row["proof"], row["quarantined"]) == ("proven", {}), row
    return row


def test_graphs_come_back_and_decode_the_same_tokens(folder: Path) -> None:
    first = saved(folder)
    plain = start(folder, options={"cudagraph": False})
    for disturbance in ("", "context", "allocations", "modules"):
        row = start(folder, disturb=disturbance)
        assert (row["path"], row["details"]["graphs"], row["details"]["captured"]) == ("restored", 3, 0), row
        assert (row["answers"], row["alone"]) == (first["answers"], first["alone"])
        assert row["session"] == []
    assert (plain["answers"], plain["alone"]) == (first["answers"], first["alone"])
    row = start(folder, options={"verify": "full"})
    assert (row["path"], row["details"]["graphs"]) == ("restored", 3), row


def test_a_taken_base_is_refused_and_serves(folder: Path) -> None:
    first = saved(folder)
    row = start(folder, disturb="base")
    assert (row["path"], row["answers"]) == ("loaded", first["answers"]), row
    assert "scratch cannot lie" in row["why"]


def test_damaged_archives_serve_and_name_the_section(folder: Path) -> None:
    first = saved(folder)
    (path,) = store.find()
    whole = path.read_bytes()
    for name in ("params", "nodes", "binaries"):
        entry = sections.Sections(path).entries[name]
        data = bytearray(whole)
        for at in range(entry.offset, entry.offset + entry.stored, max(1, entry.stored // 64)):
            data[at] ^= 1
        path.write_bytes(data)
        row = start(folder)
        assert row["answers"] == first["answers"], (name, row)
        assert name in row["why"] or "binary" in row["why"], row
        path.write_bytes(whole)


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments"),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, "cudaMallocAsync"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, "CUBLAS_WORKSPACE_CONFIG"),
    ],
)
def test_another_environment_is_named_and_serves(folder: Path, environ: dict[str, str], why: str) -> None:
    first = saved(folder)
    row = start(folder, environ)
    assert row["path"] == "loaded"
    assert why in row["why"], row
    assert row["alone"] == first["alone"]


def test_other_batch_sizes_are_a_miss_that_names_them(folder: Path) -> None:
    saved(folder)
    row = start(folder, batch_sizes=[4, 8])
    assert row["path"] == "loaded"
    assert "batch_sizes" in row["why"], row


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
    assert child("fixture") == {"proven": 2, "wrong": {}}
