"""The state of a loaded module: what capture, restore and the structure digest offer to publish and attach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from fer.weights.records import ModuleState
from fer.weights.state_restore import rehearse, restore
from fer.weights.state_walk import Capture, capture
from fer.weights.structure import Survey, first_difference, meta_leftovers, structure_digest, survey, where_it_parts
from fer.weights.walk_parts import LiveStorage

__all__ = [
    "Capture",
    "LiveStorage",
    "ModuleState",
    "Survey",
    "capture",
    "first_difference",
    "matches",
    "meta_leftovers",
    "rehearse",
    "restore",
    "structure_digest",
    "survey",
    "where_it_parts",
]


def matches(names: Iterable[str], patterns: Sequence[str]) -> bool:
    """Whether one of the paths fits one of the ``fnmatch`` patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
