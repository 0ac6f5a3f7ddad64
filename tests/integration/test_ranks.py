"""Two ranks in real processes: how they find each other, and how they agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fer.engines import pretrained
from fer.engines.devices import named
from fer.engines.ranks import Launch
from fer.errors import OptionError
from tests.support.keeper import read_line
from tests.support.processes import Children

LIMIT_S = 60.0


def vote(children: Children, job: str, store: Path) -> list[dict[str, Any]]:
    started = [children.fork("tests.support.ranks_child", job, str(rank), str(store)) for rank in range(2)]
    lines = [read_line(child.stdout, LIMIT_S) for child in started]
    assert all(lines), [child.communicate(5)[1] if child.poll() is not None else "it runs" for child in started]
    return [json.loads(line) for line in lines]


def test_ranks_find_each_other_and_agree(children: Children, tmp_path: Path) -> None:
    for number in range(2):  # the second launch beside what the first left
        found = vote(children, "agree", tmp_path / f"store-{number}")
        assert [each["place"] for each in found] == [[0, 2, 2], [1, 2, 2]]
        assert [each["both"] for each in found] == [[True, False, True]] * 2
        listening = {address for each in found for address in each["listens"]}
        assert listening == {"0100007F"}, "127.0.0.1 and nothing else"


def test_who_says_no_waits_for_nobody_and_a_dead_rank_is_noticed(children: Children, tmp_path: Path) -> None:
    found = vote(children, "dissent", tmp_path / "dissent")
    assert [each["late"] for each in found] == [False, False]
    assert [each["after"] for each in found] == [[True, False]] * 2, "votes still belong together"
    first, _ = vote(children, "death", tmp_path / "death")
    assert first["error"]["kind"] == "PeerRankFailed" and "cannot agree" in first["error"]["what"]


def test_variables_of_a_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    launch = Launch(rank=1, world=2, store=tmp_path / "store")
    on_gpu, on_host = launch.variables("cuda:5"), launch.variables("cpu")
    assert (on_gpu["RANK"], on_gpu["LOCAL_RANK"], on_gpu["WORLD_SIZE"]) == ("1", "5", "2")
    assert (on_gpu["NCCL_SOCKET_IFNAME"], on_gpu["GLOO_SOCKET_IFNAME"]) == ("lo", "eth7")
    assert "CUDA_VISIBLE_DEVICES" not in on_gpu and on_host["CUDA_VISIBLE_DEVICES"] == ""


def test_devices_of_ranks() -> None:
    assert named("auto", 2) == ["auto", "auto"] and named("cpu", 3) == ["cpu"] * 3
    assert named("cuda:3, cuda:1", 2) == ["cuda:3", "cuda:1"]
    for wrong, world in (("cuda:0", 2), ("cuda:0,cuda:0", 2), ("cuda:0,cuda:1", 3), ("cpu,cuda:0", 2)):
        with pytest.raises(OptionError):
            named(wrong, world)


def test_models_that_ranks_cannot_share_are_refused_by_name() -> None:
    from transformers import LlamaConfig, OPTConfig

    def refusal(config: Any, world: int = 2) -> str:
        with pytest.raises(OptionError) as caught:
            pretrained.check_shared(Path("model"), config, world)
        return str(caught.value)

    whole: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    pretrained.check_shared(Path("model"), LlamaConfig(**whole), 2)
    assert "it has 2 key/value heads" in refusal(LlamaConfig(**whole), 4)
    assert "it has 4 attention heads" in refusal(LlamaConfig(**whole), 3)
    tied = LlamaConfig(**{**whole, "tie_word_embeddings": True})
    assert "embeddings are tied" in refusal(tied)
    pretrained.check_shared(Path("model"), tied, 1)
    assert "no tensor-parallel plan for OPT" in refusal(OPTConfig(tie_word_embeddings=False))
