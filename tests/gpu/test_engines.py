"""Adapters on real GPUs: the conformance suite again, with the matrix products and collectives that only a GPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fer.engines import fp8
from fer.engines.conformance import check_engine
from fer.engines.transformers import TransformersEngine
from fer.errors import UnsupportedQuantization
from tests.support import engine_cases as cases
from tests.support import engine_models as models

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="torch's block-scaled matmul with float32 scales exists for compute capability 9.0",
)


def _arguments(folder: Path, **more: Any) -> dict[str, Any]:
    return {"folder": str(folder), "device": "cuda", **more}


@hopper
@pytest.mark.parametrize(("tokens", "columns", "rows"), [(1, 256, 384), (7, 512, 256), (64, 1152, 768), (3, 128, 272)])
def test_scaled_mm_agrees_with_dequantised_weights(tokens: int, columns: int, rows: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
    weight, scale = fp8.quantize_blocks(torch.randn(rows, columns, device="cuda"), (128, 128))
    scale *= torch.rand_like(scale) + 0.5  # every block's scale must matter
    quantized, factors = fp8.quantize_rows(x, 128)
    exact = quantized.float() * factors.repeat_interleave(128, 1)
    expected = exact @ fp8.dequantize(weight, scale, (128, 128)).T
    product = fp8.scaled_mm(x, weight, scale, (128, 128)).float()
    assert product.shape == expected.shape
    assert torch.allclose(product, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
    assert torch.equal(product, fp8.scaled_mm(x[None], weight, scale, (128, 128))[0].float())


@hopper
def test_scaled_mm_refuses_shapes_it_cannot_take() -> None:
    x = torch.randn(1, 200, dtype=torch.bfloat16, device="cuda")
    weight, scale = fp8.quantize_blocks(torch.randn(256, 200, device="cuda"), (128, 128))
    with pytest.raises(UnsupportedQuantization, match="scaled_mm"):
        fp8.scaled_mm(x, weight, scale, (128, 128))


@hopper
def test_auto_takes_torchs_own_product(tmp_path: Path) -> None:
    folder = models.to_fp8(models.qwen3(tmp_path / "qwen3"), tmp_path / "fp8")
    engine = TransformersEngine(folder, device="cuda:0")
    assert engine.identity().settings["matmul"] in ("kernels", "scaled_mm")
    fast = TransformersEngine(folder, device="cuda:0", matmul="scaled_mm")
    slow = TransformersEngine(folder, device="cuda:0", matmul="dequantize")
    for one in (fast, slow):
        one.adopt(one.load())
    prompt = [1, 5, 9, 200]
    assert torch.allclose(fast.logits(prompt), slow.logits(prompt), atol=0.2)


def test_module_engine_conforms(tmp_path: Path) -> None:
    path = str(cases.write_awkward(tmp_path / "weights.safetensors"))
    check_engine(cases.awkward, {"path": path, "device": "cuda:0"}, probe=cases.awkward_outputs)


def test_transformers_engine_conforms(tmp_path: Path) -> None:
    folder = models.llama(tmp_path / "llama", tied=True, dtype="bfloat16")
    check_engine(cases.transformers, _arguments(folder), probe=cases.transformers_outputs)


def test_block_fp8_conforms(tmp_path: Path) -> None:
    folder = models.to_fp8(models.qwen3(tmp_path / "qwen3"), tmp_path / "fp8")
    check_engine(cases.transformers, _arguments(folder), probe=cases.transformers_outputs)


def test_fp8_experts_conform(tmp_path: Path) -> None:
    folder = models.to_fp8(models.qwen3_moe(tmp_path / "moe"), tmp_path / "fp8")
    check_engine(cases.transformers, _arguments(folder), probe=cases.transformers_outputs)


@two_gpus
@pytest.mark.parametrize("quantized", [False, True])
def test_tensor_parallel_conforms(tmp_path: Path, quantized: bool) -> None:
    folder = models.qwen3(tmp_path / "qwen3", hidden_size=512, intermediate_size=512, num_key_value_heads=4)
    folder = models.to_fp8(folder, tmp_path / "fp8") if quantized else folder
    check_engine(
        cases.transformers, _arguments(folder, tensor_parallel=True), probe=cases.transformers_outputs, world=2
    )
