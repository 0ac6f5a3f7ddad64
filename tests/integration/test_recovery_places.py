"""Starts where something cannot be read, written or made: a named error or a load, never a wrong or a half answer."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import recovery_model
from tests.support.processes import WAIT_S, Children
from tests.support.recovery import EngineProcess, keeper

NOBODY = 65534
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that everybody can read and only its owner can write; pytest's own are closed to others."""
    made = Path(tempfile.mkdtemp(prefix="fer-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def folder(place: Path) -> Path:
    made = recovery_model.make_checkpoint(place / "model")
    for file in made.iterdir():
        file.chmod(0o644)
    return made


def skip(why: str) -> None:
    """Skip, and say so where a run without ``-rs`` shows it too."""
    warnings.warn(f"not tested: {why}", stacklevel=2)
    pytest.skip(why)


@pytest.fixture
def ask(children: Children, folder: Path) -> Ask:
    """Starts an engine in a bad place and gives its row; see ``tests/support/places_child.py``."""
    if os.getuid():
        skip("becoming another user and mounting need root")

    def start(**asked: Any) -> dict[str, Any]:
        argument = json.dumps({"folder": str(folder), **asked})
        child = children.fork("tests.support.places_child", argument)
        out, err = child.communicate(3 * WAIT_S)
        assert out.strip(), err
        row: dict[str, Any] = json.loads(out.splitlines()[-1])
        if "skip" in row:
            skip(row["skip"])
        return row

    return start


# --- places of others ---


@pytest.mark.parametrize("what", ["folder", "shard"])
def test_a_checkpoint_that_cannot_be_read_is_named(ask: Ask, folder: Path, what: str) -> None:
    closed = folder if what == "folder" else folder / "model-00002-of-00002.safetensors"
    closed.chmod(0)
    error = ask(**{"as": NOBODY})["error"]
    assert error["kind"] == "CheckpointError"
    assert str(closed) in error["what"]
    assert "Permission denied" in error["why"]


def test_a_model_folder_that_cannot_be_read_is_named(ask: Ask, folder: Path) -> None:
    folder.chmod(0)
    error = ask(**{"as": NOBODY}, transformers=True)["error"]
    assert error["kind"] == "CheckpointError"
    assert str(folder) in error["what"]
    assert "Permission denied" in error["why"]


@pytest.mark.parametrize("runtime", ["missing", "closed", "another's"])
def test_a_runtime_directory_that_cannot_be_used_is_a_load(
    ask: Ask, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    directory = {"missing": place / "runtime", "closed": place / "closed" / "runtime", "another's": place / "another"}
    monkeypatch.setenv("FER_RUNTIME_DIR", str(directory[runtime]))
    (place / "closed").mkdir(mode=0o700)
    (place / "another").mkdir(mode=0o700)
    row = ask(**{"as": NOBODY})
    assert row["path"] == "loaded", row
    assert str(directory[runtime]) in row["why"]
    assert not row["details"].get("published")
    assert row["answer"] == recovery_model.expected(folder)
    row = ask(**{"as": NOBODY}, options={"mode": "client"})
    assert row["error"]["kind"] in ("KeeperUnavailable", "PeerRefused"), row
    assert str(directory[runtime]) in str(row["error"])
    assert ask(**{"as": NOBODY}, options={"on_miss": "fail"})["error"]["kind"] == "Miss"


def test_a_home_that_cannot_be_written_changes_nothing(
    children: Children, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FER_HOME", "/proc/fer")  # not even root makes a directory there
    rows = [EngineProcess(children, folder).result() for _ in range(2)]
    assert [row["path"] for row in rows] == ["loaded", "attached"], rows
    assert {row["answer"] for row in rows} == {recovery_model.expected(folder)}


# --- places without room ---


@pytest.mark.parametrize("inside", [False, True])
def test_a_full_runtime_directory_is_a_load(
    ask: Ask, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    full = place / "full"
    full.mkdir(mode=0o700)
    directory = full / "runtime" if inside else full
    monkeypatch.setenv("FER_RUNTIME_DIR", str(directory))
    row = ask(full=str(full))
    assert row["path"] == "loaded", row
    assert "No space left on device" in row["why"]
    assert row["answer"] == recovery_model.expected(folder)


# --- checkpoints of another type ---


def swap(folder: Path, how: str) -> Path:
    """Change the type of a shard's tensors: by a cast, or in its header alone, with its old file time."""
    shard = folder / "model-00001-of-00002.safetensors"
    times = shard.stat()
    if how == "cast":
        save_file({name: tensor.to(torch.float16) for name, tensor in load_file(shard).items()}, shard)
        return shard
    data = shard.read_bytes()
    claimed = b'"I32"' if how == "same size" else b'"F64"'
    shard.write_bytes(data.replace(b'"F32"', claimed))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    return shard


@pytest.mark.parametrize("how", ["cast", "same size"])
def test_a_shard_of_another_type_is_another_checkpoint(children: Children, folder: Path, how: str) -> None:
    first = EngineProcess(children, folder).result()
    swap(folder, how)
    right = recovery_model.expected(folder)
    assert right != first["answer"]
    row = EngineProcess(children, folder).result()
    assert (row["path"], row["answer"]) == ("loaded", right)
    assert "another checkpoint" in row["why"]
    assert row["details"]["published"]
    row = EngineProcess(children, folder).result()
    assert (row["path"], row["answer"]) == ("attached", right)


def test_a_shard_whose_type_cannot_be_is_refused_and_nothing_is_published(children: Children, folder: Path) -> None:
    EngineProcess(children, folder).result()
    shard = swap(folder, "impossible")
    engine = EngineProcess(children, folder)
    assert engine.wait() != 0
    assert engine.process.stdout is not None
    assert f"CheckpointError: cannot use {shard}" in engine.process.stdout.read()
    with keeper() as client:
        assert len(client.status().editions) == 1
