"""Which storage goes where: the plan of an edition's slabs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fer.memory.base import ALIGNMENT

MIB = 1 << 20
GIB = 1 << 30

_SLABS_WANTED = 48
"""Attaching costs a fixed time a slab; publishing needs one slab of free memory. Some fifty slabs keep both small."""

_SMALLEST = 64 * MIB
_LARGEST = 4 * GIB


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One storage that has to be placed: its index, the kind of device it is on, its address there and its bytes."""

    storage: int
    device: str
    address: int
    nbytes: int


@dataclass(kw_only=True)
class SlabPlan:
    """One slab to be made on ``device``: its size in bytes and ``(storage, offset)`` of each storage in it."""

    device: str
    size: int = 0
    placed: list[tuple[int, int]] = field(default_factory=list)


def slab_bytes(total: int) -> int:
    """A good slab size for ``total`` bytes of weights: a fiftieth, at least 64 MiB, at most 4 GiB."""
    size = min(max(total // _SLABS_WANTED, _SMALLEST), _LARGEST)
    return -(-size // (2 * MIB)) * (2 * MIB)


def plan(pieces: Sequence[Piece], granularity: dict[str, int], *, wanted: int = 0) -> list[SlabPlan]:
    """Place every storage.

    Storages keep the order of their addresses, which is the order of the allocator's segments, so that moving them
    slab by slab empties whole segments one after the other and the allocator can give them back. A storage larger
    than a slab gets a slab of its own. Storages of zero bytes are not placed.

    Args:
        pieces: the storages.
        granularity: bytes each slab's size must be a multiple of, by device kind.
        wanted: slab size in bytes; 0 lets :func:`slab_bytes` choose.
    """
    limit = wanted or slab_bytes(sum(piece.nbytes for piece in pieces))
    slabs: list[SlabPlan] = []
    for device in sorted({piece.device for piece in pieces}):
        current: SlabPlan | None = None
        mine = (piece for piece in pieces if piece.device == device and piece.nbytes)
        for piece in sorted(mine, key=lambda piece: piece.address):
            room = -(-piece.nbytes // ALIGNMENT) * ALIGNMENT
            if current is None or current.size + room > limit:
                current = SlabPlan(device=device)
                slabs.append(current)
            current.placed.append((piece.storage, current.size))
            current.size += room
    for slab in slabs:
        step = granularity[slab.device]
        slab.size = -(-slab.size // step) * step
    return slabs
