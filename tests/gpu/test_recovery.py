"""Engines on a GPU, in processes of their own: killed, attached, moved to another card, out of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness import gpu_used_mib
from tests.support import recovery_model
from tests.support.processes import Children
from tests.support.recovery import EngineProcess, keeper

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recovery_model.make_checkpoint(tmp_path / "model", width=512)


def start(children: Children, folder: Path, **asked: Any) -> EngineProcess:
    engine = {"device": "cuda:0", "width": 512, **asked.pop("engine", {})}
    return EngineProcess(children, folder, engine=engine, **asked)


def test_a_model_on_two_kinds_of_memory_comes_back(children: Children, folder: Path) -> None:
    first = start(children, folder)
    row = first.result()
    assert row["path"] == "loaded"
    assert row["details"]["published"], row
    assert row["details"]["transport"] == "cuda+host"
    right = row["answer"]
    second = start(children, folder)
    row = second.result()
    assert (row["path"], row["answer"]) == ("attached", right), row
    assert row["details"]["moved"] == 0
    first.kill()
    second.kill()
    row = start(children, folder, options={"verify": "full"}).result()
    assert (row["path"], row["answer"]) == ("attached", right)


def test_legacy_ipc_lives_as_long_as_its_exporter(children: Children, folder: Path) -> None:
    exporter = start(children, folder, options={"transport": "cuda-ipc"})
    row = exporter.result()
    assert row["details"]["transport"] == "cuda-ipc+host", row
    right = row["answer"]
    client = start(children, folder)
    row = client.result()
    assert (row["path"], row["answer"]) == ("attached", right), row
    assert row["details"]["transport"] == "cuda-ipc+host"
    other = start(children, folder, options={"transport": "vmm", "on_miss": "fail"})
    assert "cuda-ipc" in other.result()["error"]["why"]
    exporter.kill()
    row = start(children, folder, options={"on_miss": "fail"}).result()
    assert row["error"]["kind"] == "Miss"


def test_no_room_for_a_slab_leaves_the_engine_serving(children: Children, folder: Path) -> None:
    full = start(children, folder, fault={"at": "move", "when": "before", "do": "fill-gpu"})
    row = full.result()
    full.kill()
    assert row["fired"]
    assert row["path"] == "loaded"
    assert not row["details"]["published"]
    assert "OutOfMemory" in row["why"]
    assert row["answer"] == start(children, folder, options={"mode": "off"}).result()["answer"]


@pytest.mark.parametrize("step", ["move", "seal", "add_slabs"])
def test_a_publisher_killed_half_way_gives_its_memory_back(children: Children, folder: Path, step: str) -> None:
    before = gpu_used_mib()
    victim = start(children, folder, fault={"at": step, "when": "after", "do": "kill-self"})
    assert victim.row() == {"fired": step}
    victim.wait()
    with keeper() as client:
        status = client.status()
        assert not status.editions
        assert not status.pending
    assert gpu_used_mib() <= before + 2


@two_gpus
def test_an_edition_belongs_to_one_card_whatever_its_number(children: Children, folder: Path) -> None:
    uuids = [f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in (0, 1)]
    first = start(children, folder, engine={"device": "cuda:1"})
    right = first.result()["answer"]
    with keeper() as client:
        assert [info.gpu for info in client.status().editions] == [uuids[1]]
    row = start(children, folder, options={"on_miss": "fail"}).result()
    assert row["error"]["kind"] == "Miss"
    assert uuids[0] in row["error"]["why"]
    assert uuids[1] in row["error"]["why"]
    both = ",".join(uuids)
    for visible, device in (("1", "cuda:0"), ("1,0", "cuda:0"), (uuids[1], "cuda:0"), (both, "cuda:1")):
        environ = {"CUDA_VISIBLE_DEVICES": visible}
        row = start(children, folder, engine={"device": device}, environ=environ).result()
        assert (row.get("path"), row.get("answer")) == ("attached", right), (visible, row)
        assert row["details"]["moved"] == 0
