"""What the parts of a capture share: live storages, nodes in the making, slots, and looking into the skeleton."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch

from fer.errors import UnsupportedState
from fer.weights.records import Keep, Place, Step, Value

MAX_NODES: Final = 2_000_000
"""Things a module may hold; beyond it is data, not state."""
MAX_DEPTH: Final = 100
"""Levels of nesting, modules included."""

KEEP: Final = Keep()


class Nothing:
    """The skeleton has nothing in this slot."""


class Unknown:
    """There is no skeleton to look at."""


NOTHING: Final[Any] = Nothing()
UNKNOWN: Final[Any] = Unknown()


@dataclass(kw_only=True)
class LiveStorage:
    """One torch storage of a loaded module.

    Attributes:
        index: its index among the manifest's storages.
        nbytes: its size in bytes.
        device: where it lives.
        address: of its first byte.
        tensors: indices of the tensors over it.
        names: paths of those tensors.
    """

    index: int
    storage: torch.UntypedStorage | None
    nbytes: int
    device: torch.device
    address: int
    tensors: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def take(self) -> torch.UntypedStorage:
        """Hand over the only reference this record holds, so that the storage can die once its tensors have moved."""
        storage, self.storage = self.storage, None
        assert storage is not None, "a storage is taken once"
        return storage


@dataclass(kw_only=True)
class Made:
    """A node in the making. ``dirty``: it differs from the skeleton's; ``wanted``: some slot refers to it."""

    index: int
    live: Any
    base: Any
    place: Place | None
    path: str
    depth: int
    dirty: bool = False
    wanted: bool = False
    changes: dict[str, Any] = field(default_factory=dict)
    attrs: dict[str, Value] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a value was found: the nearest node above it, the steps from there, its path for people."""

    node: Made
    steps: tuple[Step, ...]
    path: str
    depth: int

    def step(self, step: Step, path: str) -> Slot:
        return Slot(node=self.node, steps=(*self.steps, step), path=path, depth=self.depth + 1)


def refuse(path: str, why: str, fix: str = "Run with mode=off, or keep it out of the module") -> NoReturn:
    """Refuse something by its path."""
    raise UnsupportedState(f"{path or 'the module'} cannot be kept", why=why, fix=fix, path=path)


def dotted(path: str, name: str) -> str:
    """The path of an attribute."""
    return f"{path}.{name}" if path else name


_ABSENT: Final = object()


def part(base: Any, *, key: Any = _ABSENT, attr: str = "") -> Any:
    """The skeleton's part under ``key`` or ``attr``, ``NOTHING`` where it has none, ``UNKNOWN`` without a skeleton."""
    if base is UNKNOWN or base is NOTHING:
        return base
    try:
        return getattr(base, attr, NOTHING) if key is _ABSENT else base[key]
    except (KeyError, IndexError, TypeError):
        return NOTHING


def is_missing(base: Any) -> bool:
    """Whether there is no skeleton, or nothing on it."""
    return base is UNKNOWN or base is NOTHING
