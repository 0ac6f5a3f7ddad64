"""First weights are not drawn where nothing can hold them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fer.weights.drawing import WithoutDrawing

MODULES: list[Callable[[], nn.Module]] = [
    lambda: nn.Embedding(5, 4, padding_idx=2),
    lambda: nn.Linear(4, 3),
    lambda: nn.Conv1d(4, 3, 2),
    lambda: nn.LSTM(4, 3),
    lambda: nn.MultiheadAttention(4, 2),
    lambda: nn.BatchNorm1d(4),
]


@pytest.mark.parametrize("make", MODULES)
def test_a_skeleton_is_the_same_without(make: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        drawn = make()
    with torch.device("meta"), WithoutDrawing():
        blank = make()
    assert repr(blank) == repr(drawn)
    assert [(name, value.shape, value.stride(), value.requires_grad) for name, value in blank.named_parameters()] == [
        (name, value.shape, value.stride(), value.requires_grad) for name, value in drawn.named_parameters()
    ]


@pytest.mark.parametrize("fill", [nn.init.normal_, nn.init.xavier_normal_, nn.init.trunc_normal_, nn.init.orthogonal_])
def test_fills_give_back_their_tensor(fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.device("meta"), WithoutDrawing():
        empty = torch.empty(4, 4)
        assert fill(empty) is empty


def test_memory_that_is_there_is_filled() -> None:
    with WithoutDrawing():
        torch.manual_seed(0)
        drawn = nn.Linear(4, 4).weight
    torch.manual_seed(0)
    assert torch.equal(drawn, nn.Linear(4, 4).weight)
    assert torch.empty(100).normal_().std() > 0
