"""Room for a load: editions nobody uses give way, editions in use are named."""

from __future__ import annotations

from fer.errors import OutOfMemory
from fer.memory import host
from fer.memory.base import Backend
from fer.weights import layout
from fer.weights.client import KeeperClient
from fer.weights.wire import EditionInfo

GIB = 1 << 30


def make(client: KeeperClient, backend: Backend, needed: int, *, publish: bool = True) -> list[EditionInfo]:
    """Evict unleased editions of the backend's GPU until ``needed`` bytes are free, least recently used first.

    Args:
        publish: also make room for what publishing needs beside the weights.

    Returns:
        What was evicted.

    Raises:
        OutOfMemory: it still does not fit, and editions that are in use hold memory there. Where nothing of FER's is
            in the way the engine is left to try: ``needed`` is an estimate.
    """
    free = backend.room().free
    wanted = needed + (_beside(backend, needed) if publish else 0)
    if wanted <= free:
        return []
    answer = client.make_room(backend.gpu, wanted - free)
    free = backend.room().free
    if needed > free and answer.leased:
        holders = [
            f"edition {info.edition} ({info.bytes / GIB:.1f} GiB) used by "
            + ", ".join(f"{holder.label or 'process'} {holder.pid}" for holder in info.holders)
            for info in answer.leased
        ]
        raise OutOfMemory(
            f"these weights need {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB are free on {backend.gpu}",
            why="editions in use are never evicted: " + "; ".join(holders),
            fix="Stop an engine that uses one of them, then run: fer evict EDITION",
            needed=needed,
            free=free,
            holders=holders,
        )
    return list(answer.evicted)


def _beside(backend: Backend, needed: int) -> int:
    """Bytes that publishing needs beside the weights: a slab to fill, and what a slab leaves free in any case."""
    slab = min(needed, layout.slab_bytes(needed))
    return slab + (host.spare(backend.room().total) if backend.kind == "host" else 0)
