"""An engine with decode graphs on the CPU, for the order of the stage's steps: tensors are real, graphs pretended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fer.engines.base import Engine, EngineIdentity
from fer.engines.graphs import DecodeGraphs, Replayable


class ToyGraphs(DecodeGraphs):
    batch_sizes = (4, 8)

    def __init__(self) -> None:
        self.used: dict[int, Any] = {}
        self.allocated = 0
        self.linear = nn.Linear(4, 4)

    def layout(self) -> Mapping[str, Any]:
        return {"shape": [8, 4]}

    def kv_bytes(self) -> int:
        return 4096

    def largest_kv_bytes(self) -> int:
        return 4096

    def allocate(self) -> None:
        self.allocated += 1
        self.x = torch.zeros(8, 4)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return dict(self.linear.named_parameters())

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"x": self.x}

    def step(self, size: int) -> Mapping[str, torch.Tensor]:
        return {"y": self.linear(self.x[:size])}

    def fill(self, size: int, number: int) -> None:
        self.x.fill_(number)

    def use(self, size: int, graph: Replayable | None, outputs: Mapping[str, torch.Tensor] | None) -> None:
        self.used[size] = graph


class ToyEngine(Engine):
    def __init__(self, device: str = "cuda:0", graphs: DecodeGraphs | None = None) -> None:
        self.device, self._graphs = device, graphs
        self.adopted: nn.Module | None = None

    def identity(self) -> EngineIdentity:
        return EngineIdentity(engine="toy", engine_version="1", model="toy")

    def build(self) -> nn.Module:
        return nn.Linear(1, 1, device="meta")

    def load(self) -> nn.Module:
        return nn.Linear(1, 1)

    def adopt(self, module: nn.Module) -> None:
        self.adopted = module

    def graphs(self) -> DecodeGraphs | None:
        return self._graphs
