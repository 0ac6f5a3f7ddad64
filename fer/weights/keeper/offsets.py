"""Places in a GPU's weights range, so that editions of one device never overlap in any process."""

from __future__ import annotations

from collections.abc import Iterable

from fer.errors import Refused
from fer.memory.base import HOST
from fer.weights.keeper.records import State

ALIGNMENT = 2 << 20
"""Bytes; the granularity of CUDA's virtual memory management."""
RANGE = 512 << 30
"""Bytes of a device's weights range."""


def rounded(size: int) -> int:
    """``size`` up to the next multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def first_fit(taken: Iterable[tuple[int, int]], size: int) -> int | None:
    """The lowest offset with ``size`` free bytes between the taken (offset, size) places; None where none is left."""
    start = 0
    for offset, length in sorted(taken):
        if offset - start >= rounded(size):
            break
        start = max(start, offset + rounded(length))
    return start if start + rounded(size) <= RANGE else None


def place(state: State, gpu: str, size: int) -> int:
    """The offset for a new edition of ``size`` bytes on a GPU; always 0 on the host, whose memory has no fixed address.

    Raises:
        Refused: ``no_range``.
    """
    if gpu == HOST:
        return 0
    kept = [(e.offset, e.total) for e in state.editions.values() if e.key.gpu == gpu]
    making = [(t.offset, t.total) for t in state.transactions.values() if t.key.gpu == gpu]
    offset = first_fit([*kept, *making], max(size, 1))
    if offset is None:
        raise Refused(
            f"no {size} bytes are free in the weights range of {gpu}",
            why=f"{len(kept)} editions and {len(making)} transactions lie in its {RANGE} bytes",
            fix="Evict editions with `fer evict`.",
            code="no_range",
        )
    return offset
