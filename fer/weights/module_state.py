"""The state of a loaded module: what capture, restore and the structure digest offer to publish and attach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch

from fer.weights.records import Leaf, ModuleState
from fer.weights.state_restore import rehearse, restore
from fer.weights.state_walk import Capture, capture
from fer.weights.structure import Survey, first_difference, meta_leftovers, structure_digest, survey
from fer.weights.walk_parts import LiveStorage

__all__ = [
    "Capture",
    "LiveStorage",
    "ModuleState",
    "Survey",
    "capture",
    "dtype_of",
    "first_difference",
    "matches",
    "meta_leftovers",
    "rehearse",
    "restore",
    "structure_digest",
    "survey",
    "tensor_names",
]


def dtype_of(leaf: Leaf) -> torch.dtype:
    """The torch dtype of a recorded tensor.

    Raises:
        AttributeError: this torch has no such dtype.
    """
    found = getattr(torch, leaf.dtype)
    assert isinstance(found, torch.dtype)
    return found


def tensor_names(state: ModuleState) -> list[list[str]]:
    """The paths of every plain tensor, by index; a registered path stands first."""
    return [leaf.names for leaf in state.tensors]


def matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """Whether one of the paths fits one of the ``fnmatch`` patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
