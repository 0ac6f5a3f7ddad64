"""The quantisation guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fer.errors import UnsupportedQuantization
from fer.weights.quantization import ALLOWED, check, of_config

BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def guard(config: dict[str, Any]) -> str:
    method, details = of_config(config)
    check(method, details)
    return method


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": None}, {"quantization_config": {}}, {"text_config": {}}]
)
def test_unquantised_passes(config: dict[str, Any]) -> None:
    assert guard(config) == ""


@pytest.mark.parametrize(
    "extra", [{}, {"modules_to_not_convert": ["lm_head"]}, {"activation_scheme": "dynamic"}, {"dequantize": False}]
)
def test_block_wise_fp8_passes(extra: dict[str, Any]) -> None:
    assert guard({"quantization_config": {**BLOCK, **extra}}) == "fp8"


def test_a_configuration_of_a_nested_part_counts() -> None:
    assert guard({"text_config": {"quantization_config": BLOCK}}) == "fp8"
    with pytest.raises(UnsupportedQuantization, match="awq"):
        guard({"vision_config": {}, "text_config": {"quantization_config": {"quant_method": "awq"}}})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "fp8"}, "fp8 (per-tensor)"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8 (per-tensor)"),
        ({**BLOCK, "activation_scheme": "static"}, "static activations"),
        ({**BLOCK, "scale_fmt": "ue8m0"}, "ue8m0 scales"),
        ({**BLOCK, "fmt": "e5m2"}, "fp8 (e5m2)"),
        ({**BLOCK, "weight_block_size": [128]}, "weight_block_size [128]"),
        ({**BLOCK, "weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ({**BLOCK, "dequantize": True}, "with dequantize"),
        ({**BLOCK, "expert_dtype": "fp4"}, "fp4 experts"),
        ({**BLOCK, "kv_cache_scheme": "fp8"}, "kv_cache_scheme"),
        ({"quant_method": "awq", "bits": 4}, "awq (4-bit)"),
        ({"quant_method": "gptq", "bits": 4}, "gptq (4-bit)"),
        ({"quant_method": "GPTQ_Marlin"}, "gptq_marlin"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "compressed-tensors (float-quantized)"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt (NVFP4)"),
        ({"quant_algo": "FP8"}, "fp8 (per-tensor)"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gguf"}, "gguf"),
        ({"load_in_4bit": True}, "bitsandbytes 4-bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"bits": 3}, "unknown"),
    ],
)
def test_everything_else_is_refused_by_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedQuantization) as caught:
        guard({"quantization_config": config})
    assert name in caught.value.fields["method"]
    assert name in str(caught.value)
    assert "block-wise FP8" in caught.value.fix


def test_what_transformers_writes_for_block_wise_fp8_passes() -> None:
    transformers = pytest.importorskip("transformers")
    assert guard({"quantization_config": transformers.FineGrainedFP8Config().to_dict()}) == "fp8"
    for changes in ({"expert_dtype": "fp4"}, {"dequantize": True}, {"weight_block_size": None}):
        with pytest.raises(UnsupportedQuantization):
            guard({"quantization_config": {**transformers.FineGrainedFP8Config().to_dict(), **changes}})


def test_compressed_tensors_under_its_old_key() -> None:
    with pytest.raises(UnsupportedQuantization, match="compressed-tensors"):
        guard({"compression_config": {"quant_method": "compressed-tensors"}})


def test_mixed_experts_do_not_pass_as_block_wise_fp8() -> None:
    """FP8 outside and FP4 experts inside look like block-wise FP8 by their method alone."""
    with pytest.raises(UnsupportedQuantization, match="fp4 experts"):
        guard({"quantization_config": BLOCK, "expert_dtype": "fp4"})
    with pytest.raises(UnsupportedQuantization, match="mixed"):
        guard({"expert_dtype": "fp4"})
    assert guard({"quantization_config": BLOCK, "expert_dtype": "fp8"}) == "fp8"


def test_an_unquantised_claim_with_a_configuration_is_refused() -> None:
    with pytest.raises(UnsupportedQuantization, match="bits"):
        check("", {"bits": 4})


def test_configuration_objects_are_read_through_to_dict() -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return dict(BLOCK)

    assert guard({"quantization_config": Config()}) == "fp8"
    with pytest.raises(UnsupportedQuantization, match="strange"):
        guard({"quantization_config": "strange"})


def test_every_allowed_method_names_a_parity_test_that_exists() -> None:
    root = Path(__file__).parents[2]
    for method, allowed in ALLOWED.items():
        assert (root / allowed.parity).is_file(), f"{method!r} names no test that exists: {allowed.parity}"
