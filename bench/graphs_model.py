"""A decoder of 8B shape with the kernels engines use (cuBLAS, attention, Triton), for the CUDA graph benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fer.engines.graphs import DEEP, DecodeGraphs, Replayable

SIZES = (1, 2, 4, 8, 12, 16, *range(24, 257, 8))
HEAD = 128


@triton.jit
def rms_norm(x, weight, out, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value) / columns + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (value * scale * factor).to(tl.bfloat16), mask=inside)


@triton.jit
def add_rms_norm(x, delta, weight, total, out, columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(delta + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + row * columns + column, value.to(tl.bfloat16), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value) / columns + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (value * scale * factor).to(tl.bfloat16), mask=inside)


@triton.jit
def silu_multiply(both, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(both + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * columns + columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16), mask=inside)


@triton.jit
def write_cache(qkv, keys, values, position, hidden, groups, length, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    row, head, column = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    source = qkv + row * (hidden + 2 * groups * WIDTH) + hidden + head * WIDTH + column
    target = ((row * groups + head) * length + tl.load(position + row)) * WIDTH + column
    tl.store(keys + target, tl.load(source))
    tl.store(values + target, tl.load(source + groups * WIDTH))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    rms_norm[(x.shape[0],)](x, weight, out, x.shape[1], 1e-6, triton.next_power_of_2(x.shape[1]))
    return out


class Decoder(DecodeGraphs):
    """Greedy decoding steps; weights are drawn from a fixed seed, the same in every process."""

    deep = True

    def __init__(
        self, layers: int = 36, hidden: int = 4096, inner: int = 12288, groups: int = 8, length: int = 512,
        vocabulary: int = 32000, batch_sizes: Sequence[int] = SIZES, fused: bool = True, device: str = "cuda",
    ) -> None:  # fmt: skip
        self.layers, self.hidden, self.inner, self.groups = layers, hidden, inner, groups
        self.length, self.vocabulary, self.batch_sizes = length, vocabulary, tuple(batch_sizes)
        self.rows, self.fused, self.device = max(batch_sizes), fused, device
        self.graphs: dict[int, Replayable] = {}
        self.outputs: dict[int, Mapping[str, torch.Tensor]] = {}

    def load(self) -> None:
        torch.manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=self.device, dtype=torch.bfloat16) * 0.02

        hidden, inner, kv = self.hidden, self.inner, self.groups * HEAD
        self.embedding = draw(self.vocabulary, hidden)
        self.blocks = [
            {
                "before": 1 + draw(hidden), "qkv": draw(hidden, hidden + 2 * kv), "out": draw(hidden, hidden),
                "after": 1 + draw(hidden), "up": draw(hidden, 2 * inner), "down": draw(inner, hidden),
            }
            for _ in range(self.layers)
        ]  # fmt: skip

    def allocate_kv(self) -> None:
        shape = (self.rows, self.groups, self.length, HEAD)
        self.cache = [torch.zeros(2, *shape, device=self.device, dtype=torch.bfloat16) for _ in range(self.layers)]

    def allocate(self) -> None:
        self.token = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self.position = torch.zeros(self.rows, dtype=torch.long, device=self.device)
        self.row = torch.arange(self.rows, device=self.device)
        self.column = torch.arange(self.length, device=self.device)

    def layout(self) -> Mapping[str, Any]:
        return {"shape": [self.layers, 2, self.rows, self.groups, self.length, HEAD], "dtype": "bfloat16"}

    def largest_kv_bytes(self) -> int:
        return 2 * self.rows * self.groups * self.length * HEAD * 2

    def kv_bytes(self) -> int:
        return self.layers * (self.largest_kv_bytes() + (2 << 20))

    def weight_bytes(self) -> int:
        kv = self.groups * HEAD
        layer = self.hidden * (2 * self.hidden + 2 * kv + 3 * self.inner)
        return 2 * (self.layers * layer + self.vocabulary * self.hidden) + (4 << 30)

    def weights(self) -> Mapping[str, torch.Tensor]:
        found = {f"{number}.{name}": w for number, each in enumerate(self.blocks) for name, w in each.items()}
        return {"embedding": self.embedding, **found}

    def tensors(self) -> Mapping[str, torch.Tensor]:
        found = {f"kv.{number}": each for number, each in enumerate(self.cache)}
        return {**found, "token": self.token, "position": self.position, "row": self.row, "column": self.column}

    def step(self, size: int) -> Mapping[str, torch.Tensor]:
        return self._fused(size) if self.fused else self._plain(size)

    def _fused(self, size: int) -> Mapping[str, torch.Tensor]:
        """As engines do it: a dozen kernels a layer."""
        hidden, groups, position = self.hidden, self.groups, self.position[:size]
        x = self.embedding[self.token[:size]]
        seen = (self.column[None, :] <= position[:, None])[:, None, None, :]
        bias = (
            torch.where(seen, 0.0, float("-inf")).to(torch.bfloat16).expand(size, groups, hidden // HEAD // groups, -1)
        )
        delta = torch.zeros_like(x)
        block = triton.next_power_of_2(hidden)
        for weights, (keys, values) in zip(self.blocks, self.cache, strict=True):
            total, normed = torch.empty_like(x), torch.empty_like(x)
            add_rms_norm[(size,)](x, delta, weights["before"], total, normed, hidden, 1e-6, block)
            qkv = normed @ weights["qkv"]
            write_cache[(size, groups)](qkv, keys, values, position, hidden, groups, self.length, HEAD)
            q = qkv[:, :hidden].view(size, groups, -1, HEAD)
            attended = torch.nn.functional.scaled_dot_product_attention(q, keys[:size], values[:size], attn_mask=bias)
            delta = attended.reshape(size, hidden) @ weights["out"]
            x, normed = torch.empty_like(x), torch.empty_like(x)
            add_rms_norm[(size,)](total, delta, weights["after"], x, normed, hidden, 1e-6, block)
            both = normed @ weights["up"]
            inner = torch.empty(size, self.inner, device=x.device, dtype=x.dtype)
            silu_multiply[(size, triton.cdiv(self.inner, 1024))](both, inner, self.inner, 1024)
            delta = inner @ weights["down"]
        logits = (x + delta) @ self.embedding.t()
        return {"token": torch.argmax(logits, -1), "logits": logits}

    def _plain(self, size: int) -> Mapping[str, torch.Tensor]:
        hidden, groups, position = self.hidden, self.groups, self.position[:size]
        kv = groups * HEAD
        x = self.embedding[self.token[:size]]
        mask = (self.column[None, :] <= position[:, None])[:, None, None, :]
        for weights, (keys, values) in zip(self.blocks, self.cache, strict=True):
            q, k, v = (norm(x, weights["before"]) @ weights["qkv"]).split((hidden, kv, kv), -1)
            keys[self.row[:size], :, position] = k.reshape(size, groups, HEAD)
            values[self.row[:size], :, position] = v.reshape(size, groups, HEAD)
            # The query heads of one key head stand in for query positions: the same mask serves all of them.
            attended = torch.nn.functional.scaled_dot_product_attention(
                q.reshape(size, groups, -1, HEAD), keys[:size], values[:size], attn_mask=mask
            )
            x = x + attended.reshape(size, hidden) @ weights["out"]
            gate, up = (norm(x, weights["after"]) @ weights["up"]).chunk(2, -1)
            x = x + (torch.nn.functional.silu(gate) * up) @ weights["down"]
        logits = x @ self.embedding.t()
        return {"token": torch.argmax(logits, -1), "logits": logits}

    def fill(self, size: int, number: int) -> None:
        ids = (torch.arange(self.rows, device=self.device) * 7919 + 104729 * (number + 1) + size) % self.vocabulary
        self.token.copy_(ids)
        if number == DEEP:
            self.position.copy_(self.length - 1 - self.row % 64)
        else:
            self.position.zero_()

    def use(self, size: int, graph: Replayable | None, outputs: Mapping[str, torch.Tensor] | None) -> None:
        if graph is None or outputs is None:
            self.graphs.pop(size, None)
        else:
            self.graphs[size], self.outputs[size] = graph, outputs
