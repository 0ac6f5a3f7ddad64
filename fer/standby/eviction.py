"""Giving up an edition of a model that a service serves no more."""

from __future__ import annotations

import time
from pathlib import Path

from fer.errors import FerError, LeasesStand, Refused
from fer.weights.client import KeeperClient

LEASES_S = 5.0
"""Seconds for leases of engines that have just ended: the keeper hears of that from their sockets."""


def evict(edition: str, runtime_dir: Path | None = None) -> str:
    """Have the keeper evict an edition that nobody uses; ``""``, or why it is still there.

    One that others use as well stays, and is no error: it is theirs too. Waits, so it is nothing for an event loop.
    """
    deadline = time.monotonic() + LEASES_S
    try:
        with KeeperClient.connect(runtime_dir, label="fer serve") as client:
            while True:
                try:
                    client.evict(edition)
                    return ""
                except LeasesStand as error:
                    if time.monotonic() >= deadline:
                        return str(error)
                time.sleep(0.05)
    except Refused as error:
        # Evicted already, as for want of room.
        return "" if error.fields.get("code") == "unknown_edition" else str(error)
    except FerError as error:
        return str(error)
