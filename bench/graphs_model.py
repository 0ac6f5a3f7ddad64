"""A decoder of 8B shape with the kernels engines use (cuBLAS, attention, Triton), for the CUDA graph benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fer.engines.graphs import DecodeGraphs, Replayable

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


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    rms_norm[(x.shape[0],)](x, weight, out, x.shape[1], 1e-6, triton.next_power_of_2(x.shape[1]))
    return out


class Decoder(DecodeGraphs):
    """Greedy decoding steps; weights are drawn from a fixed seed, the same in every process."""

    def __init__(
        self, layers: int = 36, hidden: int = 4096, inner: int = 12288, groups: int = 8, length: int = 512,
        vocabulary: int = 32000, batch_sizes: Sequence[int] = SIZES,
    ) -> None:  # fmt: skip
        self.layers, self.hidden, self.inner, self.groups = layers, hidden, inner, groups
        self.length, self.vocabulary, self.batch_sizes = length, vocabulary, tuple(batch_sizes)
        self.rows = max(batch_sizes)
        self.graphs: dict[int, Replayable] = {}
        self.outputs: dict[int, Mapping[str, torch.Tensor]] = {}

    def load(self) -> None:
        torch.manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02

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
        self.cache = [torch.zeros(2, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(self.layers)]

    def allocate(self) -> None:
        self.token = torch.zeros(self.rows, dtype=torch.long, device="cuda")
        self.position = torch.zeros(self.rows, dtype=torch.long, device="cuda")
        self.row = torch.arange(self.rows, device="cuda")
        self.column = torch.arange(self.length, device="cuda")

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
        ids = (torch.arange(self.rows, device="cuda") * 7919 + 104729 * (number + 1) + size) % self.vocabulary
        self.token.copy_(ids)
        self.position.zero_()

    def use(self, size: int, graph: Replayable | None, outputs: Mapping[str, torch.Tensor] | None) -> None:
        if graph is None or outputs is None:
            self.graphs.pop(size, None)
        else:
            self.graphs[size], self.outputs[size] = graph, outputs
