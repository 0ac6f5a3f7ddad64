"""Block-wise FP8 matrix products by torch alone, for machines without Transformers' kernels.

Weights stand as ``float8_e4m3fn`` of shape ``(N, K)`` with one float32 scale a block, ``(ceil(N / bn), ceil(K / bk))``:
the true weight is weight times scale. Activations are quantised on the fly, one scale for each row and ``bk`` columns.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from fer.errors import OptionError, UnsupportedQuantization

MATMULS = ("kernels", "scaled_mm", "dequantize")
"""How an FP8 layer may multiply; the first that works on a machine is what ``auto`` means."""

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max

Matmul = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "tuple[int, int]"], torch.Tensor]


def choose(matmul: str, device: str, config: Mapping[str, Any]) -> str:
    """The way to multiply that ``matmul`` (one of :data:`MATMULS` or ``auto``) means on ``device``.

    Raises:
        OptionError: the named way does not work here; says why.
    """
    objections = {name: _objection(name, device, config) for name in MATMULS}
    if matmul == "auto":
        return next(name for name in MATMULS if not objections[name])
    if objections[matmul]:
        raise OptionError(f"matmul={matmul} does not work here", why=objections[matmul], fix="Use matmul=auto")
    return matmul


def function(matmul: str) -> Matmul:
    """The product itself, for the two ways that are torch's own."""
    return {"scaled_mm": scaled_mm, "dequantize": dequantize_mm}[matmul]


def scaled_mm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``x @ weight.T`` by torch's block-scaled matmul, blocks of 128; ``x`` of shape ``(..., K)``.

    Raises:
        UnsupportedQuantization: the layer's shape is not one the matmul takes.
    """
    rows, columns = weight.shape
    if block != (128, 128) or columns % 128 or rows % 16:
        raise UnsupportedQuantization(
            f"an FP8 layer of shape {tuple(weight.shape)} with blocks of {block} does not suit scaled_mm",
            why="it takes blocks of 128 by 128, inputs in multiples of 128 and outputs in multiples of 16",
            fix="Use matmul=dequantize",
            method="fp8",
        )
    flat = x.reshape(-1, columns)
    tokens = flat.shape[0]
    # cuBLAS wants rows of activations, and blocks along K of the weight's scales, in multiples of four.
    flat = functional.pad(flat, (0, 0, 0, -tokens % 4)) if tokens % 4 else flat
    scale = functional.pad(scale, (0, -scale.shape[1] % 4)) if scale.shape[1] % 4 else scale
    quantized, factors = quantize_rows(flat, 128)
    product = functional.scaled_mm(
        quantized,
        weight.t(),
        factors.t().contiguous().t(),  # scales of single rows lie column by column
        functional.ScalingType.BlockWise1x128,
        scale.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product[:tokens].to(x.dtype).reshape(*x.shape[:-1], rows)


def dequantize_mm(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """``x @ weight.T`` after the weight was brought back to the type of ``x``: slow, exact and everywhere."""
    return functional.linear(x, dequantize(weight, scale, block).to(x.dtype))


def quantize_rows(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ``x``, shape ``(M, K)``, as FP8, with float32 factors ``(M, K / width)``: one for ``width`` columns."""
    groups = x.float().unflatten(-1, (-1, width))
    factors = (groups.abs().amax(dim=-1) / FP8_MAX).clamp(min=1e-12)
    return (groups / factors.unsqueeze(-1)).to(FP8).flatten(-2), factors


def quantize_blocks(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of shape ``(N, K)`` as FP8 and float32 scales, in the checkpoint format of FineGrainedFP8."""
    rows, columns = weight.shape
    padded = functional.pad(weight.float(), (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # (N/bn, bn, K/bk, bk)
    scale = (tiles.abs().amax(dim=(1, 3)) / FP8_MAX).clamp(min=1e-12)
    quantized = (tiles / scale[:, None, :, None]).to(FP8).flatten(2, 3).flatten(0, 1)
    return quantized[:rows, :columns].contiguous(), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The float32 weight that an FP8 weight and its scales stand for."""
    rows, columns = weight.shape
    spread = scale.float().repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    return weight.float() * spread


def _objection(matmul: str, device: str, config: Mapping[str, Any]) -> str:
    """Why a way to multiply does not work here, ``""`` where it does."""
    if matmul == "dequantize":
        return ""
    if not device.startswith("cuda"):
        return f"it needs a GPU, and the device is {device}"
    if matmul == "kernels":
        return _kernels_missing()
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "torch's block-scaled matmul with float32 scales exists for compute capability 9.0 only"
    if not hasattr(functional, "scaled_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.scaled_mm"
    if list(config.get("weight_block_size") or ()) != [128, 128]:
        return f"it takes blocks of 128 by 128, and the checkpoint has {config.get('weight_block_size')}"
    return ""


def _kernels_missing() -> str:
    """Why Transformers' own FP8 kernel cannot be had without a network."""
    if importlib.util.find_spec("kernels") is None:
        return "the package kernels is not installed"
    import os

    from transformers.integrations import finegrained_fp8

    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        finegrained_fp8.load_finegrained_fp8_kernel()
    except Exception as error:
        return f"its kernel is not in the local cache ({type(error).__name__})"
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before
    return ""
