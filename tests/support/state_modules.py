"""Modules and helper objects such as engines build, for tests of module state."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch import nn


class Kind(enum.Enum):
    PLAIN = 1
    ABSORBED = 2


class Pair(NamedTuple):
    left: Any
    right: Any


class Helper:
    """A plain object between a module and its tensors."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("__dict__", "__hidden", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__hidden = 1

    def hide(self, value: object) -> None:
        self.__hidden = value

    def hidden(self) -> object:
        return self.__hidden


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: torch.Tensor | None = None
    factor: float = 1.0


class LoadedParameter(nn.Parameter):
    """As engines derive them, to hang a loader on."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6))
        self.bias = nn.Parameter(torch.empty(6))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.scale: float | None = None

    def load(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(24.0).reshape(4, 6))
            self.bias.copy_(torch.arange(6.0))
            self.table.copy_(torch.tensor([1.0, float("nan"), -0.0]))


def build_nothing() -> nn.Module:
    return nn.Module()


class Grouped(nn.Module):
    """A router whose helper refers to a parameter of its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Layer()
        self.topk = Helper(correction_bias=self.gate.bias, k=2)
