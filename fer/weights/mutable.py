"""Which tensors an engine writes while it serves."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase


def matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """True where one of a tensor's paths matches one of the engine's ``mutable`` patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)
