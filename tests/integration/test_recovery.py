"""Real engines in real processes: loaded, killed, attached, and never wrong."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fer
from fer.errors import KeeperUnavailable, Miss
from tests.support import recovery_model
from tests.support.processes import Children
from tests.support.recovery import EngineProcess, keeper, wait_for_digests


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recovery_model.make_checkpoint(tmp_path / "model")


def start(children: Children, folder: Path, **asked: Any) -> EngineProcess:
    return EngineProcess(children, folder, **asked)


def test_a_killed_engine_comes_back_attached_with_the_same_answer(children: Children, folder: Path) -> None:
    right = recovery_model.expected(folder)
    first = start(children, folder, fresh=True)
    row = first.result()
    assert row["path"] == "loaded"
    assert row["details"]["published"]
    assert row["answer"] == right
    first.kill()
    for fresh in (True, False, False):
        again = start(children, folder, fresh=fresh)
        row = again.result()
        assert (row["path"], row["answer"]) == ("attached", right), row
        assert row["details"]["verified"] == "seals and samples"
        if fresh:
            assert not row["compiler"], "torch's compiler was imported, which takes longer than all the rest"
        again.kill()


def test_two_engines_share_one_edition_and_neither_notices_the_others_death(children: Children, folder: Path) -> None:
    first = start(children, folder)
    right = first.result()["answer"]
    second = start(children, folder)
    assert second.result()["path"] == "attached"
    with keeper() as client:
        (info,) = client.status().editions
        assert {holder.pid for holder in info.holders} == {first.process.pid, second.process.pid}
    first.kill()
    assert second.ask("answer")["answer"] == right


def test_engines_that_start_together_load_once(children: Children, folder: Path) -> None:
    engines = [start(children, folder) for _ in range(3)]
    rows = [engine.result() for engine in engines]
    assert sorted(row["path"] for row in rows) == ["attached", "attached", "loaded"], rows
    assert len({row["answer"] for row in rows}) == 1


def test_a_waiter_loads_for_itself_when_the_time_is_over(children: Children, folder: Path) -> None:
    first = start(children, folder, fault={"at": "load", "when": "after", "do": "hang"})
    assert first.row() == {"fired": "load"}
    second = start(children, folder, options={"wait_s": 0.2})
    row = second.result()
    assert row["path"] == "loaded"
    assert not row["details"]["published"]
    assert "loads the same weights" in row["why"]
    third = start(children, folder, options={"wait_s": 0.2, "on_wait_timeout": "fail"})
    assert third.result()["error"]["kind"] == "WaitTimeout"


def test_a_waiter_takes_over_when_the_loader_dies(children: Children, folder: Path) -> None:
    first = start(children, folder, fault={"at": "load", "when": "before", "do": "hang"})
    assert first.row() == {"fired": "load"}
    second = start(children, folder)
    first.kill()
    row = second.result()
    assert row["path"] == "loaded"
    assert row["details"]["published"]


def test_other_values_behind_the_same_headers_are_a_miss(children: Children, folder: Path) -> None:
    start(children, folder).result()
    recovery_model.make_checkpoint(folder, seed=1)
    row = start(children, folder).result()
    assert row["path"] == "loaded"
    assert "another checkpoint" in row["why"]
    assert row["answer"] == recovery_model.expected(folder)


def test_a_copy_with_new_file_times_is_a_hit_once_the_bytes_were_compared(children: Children, folder: Path) -> None:
    first = start(children, folder)
    first.result()
    wait_for_digests()
    for file in folder.iterdir():
        os.utime(file, ns=(1, 1))
    row = start(children, folder).result()
    assert row["path"] == "attached"
    assert "content is the same" in row["why"]
    again = start(children, folder).result()
    assert "unchanged" in again["why"]


def test_a_flipped_bit_with_its_old_file_time_is_a_miss(children: Children, folder: Path) -> None:
    first = start(children, folder)
    first.result()
    wait_for_digests()
    shard = folder / "model-00001-of-00002.safetensors"
    times = shard.stat()
    data = bytearray(shard.read_bytes())
    data[len(data) // 2 + 300] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    row = start(children, folder).result()
    assert row["path"] == "loaded"
    assert row["answer"] == recovery_model.expected(folder)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"engine": {"settings": {"rope_theta": 5e5}}}, "rope_theta"),
        ({"engine": {"dtype": "float16"}}, "dtype"),
        ({"engine": {"revision": "v2"}}, "revision"),
        ({"environment": {"torch": "2.99.0"}}, "torch"),
        ({"environment": {"driver": "999.1"}}, "driver"),
    ],
)
def test_every_field_that_differs_is_named(
    children: Children, folder: Path, asked: dict[str, object], field: str
) -> None:
    start(children, folder).result()
    row = start(children, folder, **asked).result()
    assert row["path"] == "loaded"
    assert field in row["why"]
    assert row["answer"] == recovery_model.expected(folder)


def test_settings_without_effect_on_weights_are_no_difference(children: Children, folder: Path) -> None:
    start(children, folder).result()
    row = start(children, folder, options={"log": "debug", "wait_s": 5, "verify": "full"}).result()
    assert row["path"] == "attached"
    assert row["details"]["verified"].startswith("every byte")


def test_on_miss_fail_raises_and_loads_nothing(children: Children, folder: Path) -> None:
    row = start(children, folder, options={"on_miss": "fail"}).result()
    assert row["error"]["kind"] == "Miss"
    assert "no edition is kept" in row["error"]["why"]


def test_client_mode_needs_a_keeper(folder: Path) -> None:
    with pytest.raises(KeeperUnavailable, match="no keeper listens"):
        fer.recover(recovery_model.engine(folder), mode="client")


def test_mode_off_is_the_engines_own_path(folder: Path, runtime_dir: Path) -> None:
    engine = recovery_model.engine(folder)
    report = fer.recover(engine, mode="off")
    assert report.stages["weights"].path == "off"
    assert recovery_model.answer(engine.module) == recovery_model.expected(folder)
    assert not list(runtime_dir.iterdir())


def test_declared_mutable_tensors_are_private_and_start_from_the_loaded_values(
    children: Children, folder: Path
) -> None:
    asked = {"engine": {"mutable": ["embed.weight"]}}
    first = start(children, folder, **asked)
    right = first.result()["answer"]
    assert first.ask("write")["wrote"]
    assert first.ask("answer")["answer"] != right
    second = start(children, folder, **asked)
    row = second.result()
    assert (row["path"], row["answer"]) == ("attached", right)
    assert "embed.weight" in row["details"]["copied"]
    assert second.ask("write")["wrote"]
    assert start(children, folder, **asked).result()["answer"] == right


def test_an_engine_that_writes_shared_weights_dies_alone(children: Children, folder: Path) -> None:
    first = start(children, folder)
    right = first.result()["answer"]
    for writer in (start(children, folder), first):
        other = start(children, folder)
        other.result()
        if writer is not first:
            writer.result()
        assert writer.process.stdin is not None
        writer.process.stdin.write("write\n")
        writer.process.stdin.flush()
        assert writer.wait() == -signal.SIGSEGV
        assert other.ask("answer")["answer"] == right
    row = start(children, folder, options={"verify": "full"}).result()
    assert (row["path"], row["answer"]) == ("attached", right)


def test_other_parallel_sizes_are_named(children: Children, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(children, folder).result()
    row = start(
        children,
        folder,
        ranks={"tp_size": 2, "tp_rank": 1, "local_size": 2, "launch": "x"},
        options={"on_miss": "fail"},
    ).result()
    assert row["error"]["kind"] == "Miss"
    assert "tp" in row["error"]["why"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "extra", "empty", "header"])
def test_a_damaged_checkpoint_is_named_before_anything_is_loaded(folder: Path, damage: str) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    if damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 100)
    elif damage == "missing":
        shard.unlink()
    elif damage == "extra":
        shutil.copy(shard, folder / "model-00003-of-00002.safetensors")
    elif damage == "empty":
        os.truncate(shard, 0)
    else:
        data = shard.read_bytes()
        shard.write_bytes(b"\xff" * 8 + data[8:])
    with pytest.raises(fer.errors.CheckpointError, match="model-0000"):
        recovery_model.engine(folder)


def test_a_checkpoint_of_another_shape_fails_to_load_and_publishes_nothing(children: Children, folder: Path) -> None:
    shard = folder / "model-00001-of-00002.safetensors"
    with safe_open(shard, "pt") as opened:
        state = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    name = next(iter(state))
    state[name] = torch.zeros(3, 3)
    save_file(state, shard)
    engine = start(children, folder)
    assert engine.wait() != 0
    with keeper() as client:
        assert not client.status().editions


def test_an_unknown_quantisation_is_refused_before_loading(children: Children, folder: Path) -> None:
    row = start(children, folder, engine={"quantization": "awq"}).result()
    assert row["error"]["kind"] == "UnsupportedQuantization"
    assert "awq" in row["error"]["what"]


def test_miss_is_an_error_with_reasons() -> None:
    error = Miss("no kept edition fits", reasons=["a", "b"])
    assert error.fields["reasons"] == ["a", "b"]
