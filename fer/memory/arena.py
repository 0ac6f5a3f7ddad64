"""Fixed virtual addresses: where each device's memory lies in every process. Standard library only.

::

    BASE + index * 1 TiB ┬ weights  512 GiB   kept editions; the keeper hands out offsets in here
                         ├ kv       256 GiB
                         ├ static    32 GiB   buffers of captured graphs
                         ├ scratch   32 GiB
                         └ pool     192 GiB   torch's pools inside captured graphs

``index`` counts the host's GPUs in PCI bus order, because CUDA's own numbers change with ``CUDA_VISIBLE_DEVICES``.
One TiB a device, not more: wider spans would put the seventh device at 0x55.., where Linux places programs and heaps.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final

GIB: Final = 1 << 30
BASE: Final = 0x3A7B_0000_0000
SPAN: Final = 1024 * GIB
DEVICES: Final = 26
"""As many spans fit below 0x5500_0000_0000."""


@dataclass(frozen=True, kw_only=True)
class Range:
    """One named part of a device's span; ``offset`` and ``size`` in bytes."""

    name: str
    offset: int
    size: int


WEIGHTS: Final = Range(name="weights", offset=0, size=512 * GIB)
KV: Final = Range(name="kv", offset=512 * GIB, size=256 * GIB)
STATIC: Final = Range(name="static", offset=768 * GIB, size=32 * GIB)
SCRATCH: Final = Range(name="scratch", offset=800 * GIB, size=32 * GIB)
POOL: Final = Range(name="pool", offset=832 * GIB, size=192 * GIB)
RANGES: Final = (WEIGHTS, KV, STATIC, SCRATCH, POOL)


def address_of(index: int, part: Range = WEIGHTS) -> int:
    """First address of a named range of the ``index``-th GPU in PCI bus order."""
    if not 0 <= index < DEVICES:
        raise ValueError(f"GPU {index} has no place in the arena; it holds {DEVICES}")
    return BASE + index * SPAN + part.offset


class Spans:
    """Which parts of one reserved range are in use in this process."""

    def __init__(self, address: int, size: int) -> None:
        self._start, self._end = address, address + size
        self._used: list[tuple[int, int]] = []  # (start, end), sorted, disjoint

    def take(self, address: int, size: int) -> bool:
        """Mark a part as used; False where it reaches outside or touches a used part."""
        end = address + size
        if size <= 0 or address < self._start or end > self._end:
            return False
        place = bisect.bisect_left(self._used, (address, end))
        if place and self._used[place - 1][1] > address:
            return False
        if place < len(self._used) and self._used[place][0] < end:
            return False
        self._used.insert(place, (address, end))
        return True

    def give(self, address: int) -> None:
        """Free the part that begins at ``address``; nothing happens where none does."""
        place = bisect.bisect_left(self._used, (address, 0))
        if place < len(self._used) and self._used[place][0] == address:
            del self._used[place]


def runs(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ``(address, size)`` parts that touch, so that one driver call serves each run."""
    joined: list[tuple[int, int]] = []
    for address, size in sorted(parts):
        if joined and sum(joined[-1]) == address:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((address, size))
    return joined
