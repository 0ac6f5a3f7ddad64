"""Every adapter against the conformance suite, and the suite against adapters that do not conform."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fer.engines import conformance
from fer.engines.conformance import NotConforming, check_engine, compare
from fer.engines.conformance_snapshot import Snapshot
from tests.support import engine_cases as cases
from tests.support import engine_models as models
from tests.support.processes import Children
from tests.support.zygote import WITH_TRANSFORMERS, Forked

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def forked(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's processes are forked from one that has imported Transformers; that alone takes one of them 6 s."""

    def start(command: list[str], **options: Any) -> Forked:
        assert command[:2] == [sys.executable, "-m"]
        return children.fork(*command[2:], preload=WITH_TRANSFORMERS, **options)

    monkeypatch.setattr(conformance, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": start}))


def _arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), **more}


def test_module_engine_conforms(tmp_path: Path) -> None:
    path = str(cases.write_awkward(tmp_path / "weights.safetensors"))
    outcome = check_engine(
        cases.awkward,
        {"path": path},
        probe=cases.awkward_outputs,
        unsupported={"path": path, "quantization": "awq"},
    )
    assert outcome.results["refuse"][0]["method"].startswith("awq")
    assert "norm.running_mean" in outcome.results["attach"][0]["written"]


@pytest.mark.usefixtures("forked")
def test_ranks_of_a_module_engine_conform_together(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.arange(64.0).reshape(8, 8)}, path)
    outcome = check_engine(cases.sharded, {"path": str(path)}, probe=cases.sharded_outputs, world=2)
    ranks = [result["identity"]["ranks"] for result in outcome.results["attach"]]
    assert [rank["tp_rank"] for rank in ranks] == [0, 1]
    assert all(rank["tp_size"] == rank["local_size"] == 2 for rank in ranks)


@pytest.mark.usefixtures("forked")
def test_transformers_engine_conforms(tmp_path: Path) -> None:
    folder = models.llama(tmp_path / "llama", tied=True)
    check_engine(cases.transformers, _arguments(folder), probe=cases.transformers_outputs)


@pytest.mark.usefixtures("forked")
def test_block_fp8_conforms_and_per_tensor_fp8_is_refused(tmp_path: Path) -> None:
    source = models.qwen3(tmp_path / "qwen3")
    folder = models.to_fp8(source, tmp_path / "fp8")
    per_tensor = models.with_config(folder, tmp_path / "per-tensor", quantization_config={"quant_method": "fp8"})
    outcome = check_engine(
        cases.transformers,
        _arguments(folder),
        probe=cases.transformers_outputs,
        unsupported=_arguments(per_tensor),
    )
    kept = outcome.results["attach"][0]["places"]
    assert any("float8_e4m3fn" in place for place in kept.values())
    assert outcome.results["refuse"][0]["method"] == "fp8 (per-tensor)"


@pytest.mark.usefixtures("forked")
def test_fp8_experts_conform(tmp_path: Path) -> None:
    folder = models.to_fp8(models.qwen3_moe(tmp_path / "moe"), tmp_path / "fp8")
    check_engine(cases.transformers, _arguments(folder), probe=cases.transformers_outputs)


@pytest.mark.usefixtures("forked")
def test_tensor_parallel_transformers_conform(tmp_path: Path) -> None:
    source = models.qwen3(tmp_path / "qwen3", hidden_size=512, intermediate_size=512, num_key_value_heads=4)
    folder = models.to_fp8(source, tmp_path / "fp8")
    outcome = check_engine(
        cases.transformers, _arguments(folder, tensor_parallel=True), probe=cases.transformers_outputs, world=2
    )
    first, second = (result["places"] for result in outcome.results["attach"])
    assert any("placements=(Shard(dim=0),)" in place for place in first.values())
    assert first != second
    outputs = [result["outputs"] for result in outcome.results["attach"]]
    assert outputs[0] == outputs[1]


@pytest.mark.usefixtures("forked")
def test_a_lost_value_is_found(tmp_path: Path) -> None:
    """An adapter whose loaded state the skeleton cannot give back must not pass."""
    path = str(cases.write_awkward(tmp_path / "weights.safetensors"))
    with pytest.raises(NotConforming) as caught:
        check_engine("tests.support.engine_cases:forgetful", {"path": path}, probe=cases.awkward_outputs)
    assert any("gain" in finding for finding in caught.value.findings)


def test_snapshots_see_what_a_state_dict_does_not(tmp_path: Path) -> None:
    path = str(cases.write_awkward(tmp_path / "weights.safetensors"))

    def loaded() -> Any:
        module = cases.awkward(path).load()
        assert isinstance(module, cases.Awkward)
        return module

    reference = Snapshot(loaded()).to_json()
    assert compare(reference, Snapshot(loaded()).to_json()) == []

    def untie(module: Any) -> None:
        module.head.weight = torch.nn.Parameter(module.head.weight.detach().clone())

    def part(module: Any) -> None:
        module.halves = tuple(half.clone() for half in module.halves)

    def persist(module: Any) -> None:
        module._non_persistent_buffers_set.clear()

    def flip_one_bit(module: Any) -> None:
        module.table.view(torch.int32)[3] ^= 1

    def straighten(module: Any) -> None:
        module.mixer.weight.data = module.mixer.weight.data.contiguous()

    def forget_attribute(module: Any) -> None:
        del module.mixer.weight.layout_note

    def nudge(module: Any) -> None:
        module.gain += 1e-12

    def hide(module: Any) -> None:
        module.helper.scale = module.helper.scale.to("meta")

    for change in (untie, part, persist, flip_one_bit, straighten, forget_attribute, nudge, hide):
        module = loaded()
        with torch.no_grad():
            change(module)
        assert compare(reference, Snapshot(module).to_json()), change.__name__
