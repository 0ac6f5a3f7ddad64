"""Synthetic models of a stated size: what the weights benchmarks load, publish and attach."""

from __future__ import annotations

import functools

import torch
from torch import nn

from fer.engines.module import ModuleEngine

GIB = 1 << 30

HIDDEN = 4096


class Block(nn.Module):
    """As many matrices as asked for, in bf16, under the names a model would give them."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__()
        for number, count in enumerate(rows):
            self.register_parameter(
                f"w{number}", nn.Parameter(torch.empty(count, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
            )


class Stack(nn.Module):
    """``tensors`` matrices of ``total`` bytes together, in blocks of ``each``."""

    def __init__(self, *, tensors: int, total: int, each: int = 20) -> None:
        super().__init__()
        rows_in_all = total // (2 * HIDDEN)
        rows = [rows_in_all // tensors + (n < rows_in_all % tensors) for n in range(tensors)]
        self.layers = nn.ModuleList(Block(rows[start : start + each]) for start in range(0, tensors, each))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            x = x + sum((x @ w.t()).sum(-1, keepdim=True) for w in block.parameters())
        return x


class Rank1T(nn.Module):
    """One rank of eight of a 1T-parameter mixture of experts in block-wise FP8: about 120 GiB in thousands of tensors.

    Shapes: 61 layers, hidden 7168, 384 experts of 2048 over 8 ranks, latent attention; scales per 128 x 128 block.
    """

    def __init__(self, *, layers: int = 61, experts: int = 48, hidden: int = 7168, inner: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(163840 // 8, hidden, dtype=torch.bfloat16), requires_grad=False)
        self.layers = nn.ModuleList(nn.Module() for _ in range(layers))
        for layer in self.layers:
            self._attention(layer, hidden)
            for expert in range(experts):
                for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                    self._fp8(layer, f"e{expert}_{name}", rows, columns)

    @staticmethod
    def _fp8(layer: nn.Module, name: str, rows: int, columns: int) -> None:
        weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale = torch.empty(-(-rows // 128), -(-columns // 128), dtype=torch.float32)
        layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))
        layer.register_parameter(name + "_scale_inv", nn.Parameter(scale, requires_grad=False))

    def _attention(self, layer: nn.Module, hidden: int) -> None:
        for name, rows, columns in (
            ("q_a", 1536, hidden),
            ("q_b", 1536 * 2, 1536),
            ("kv_a", 576, hidden),
            ("kv_b", 4096, 512),
            ("o", hidden, 2048),
        ):
            self._fp8(layer, name, rows, columns)
        layer.register_buffer("norm", torch.empty(hidden, dtype=torch.bfloat16))


def fill(module: nn.Module) -> None:
    """Random bits everywhere, the same in every run; never zeros, which hide what was not written."""
    for number, tensor in enumerate([*module.parameters(), *module.buffers()]):
        generator = torch.Generator(device=tensor.device).manual_seed(number)
        words = tensor.data.view(-1).view(torch.uint8)
        words[: words.numel() // 8 * 8].view(torch.int64).random_(0, 1 << 62, generator=generator)


def nothing(module: nn.Module) -> None:
    """For engines whose memory was filled where it lies."""


def engine(*, model: str, device: str, tensors: int = 8000, total: int = 16 * GIB) -> ModuleEngine:
    """A ModuleEngine over ``Stack`` (``model="stack"``) or ``Rank1T`` (``model="1t"``)."""
    builder = Rank1T if model == "1t" else functools.partial(Stack, tensors=tensors, total=total)
    return ModuleEngine(builder, fill, device=device, first_token=_touch)


def _touch(module: nn.Module) -> None:
    next(module.parameters()).view(torch.uint8)[0, 0].item()
