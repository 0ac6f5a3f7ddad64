"""Editions of models that a service served, or tried to: which the keeper holds, and giving them up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fer.errors import FerError, LeasesStand, Refused
from fer.fingerprint import Fingerprint
from fer.weights.client import KeeperClient

LEASES_S = 5.0
"""Seconds for leases of engines that have just ended: the keeper hears of that from their sockets."""


class Editions:
    """What the keeper holds. Calls are made in threads: they wait.

    Args:
        runtime_dir: the keeper's; None: wherever one listens.
    """

    def __init__(self, runtime_dir: Path | None = None) -> None:
        self._runtime_dir = runtime_dir

    async def of(self, model: Path | None) -> set[str]:
        """Editions that were made from this folder; none where no keeper says so."""
        return await asyncio.to_thread(self._of, model) if model is not None else set()

    async def evict(self, edition: str) -> str:
        """Have the keeper evict an edition that nobody uses; ``""``, or why it is still there.

        One that others use as well stays, and is no error: it is theirs too.
        """
        return await asyncio.to_thread(self._evict, edition)

    def _of(self, model: Path) -> set[str]:
        try:
            with KeeperClient.connect(self._runtime_dir, label="fer serve") as client:
                found = client.status().editions
        except FerError:
            return set()
        names = {str(model.absolute()), str(model.resolve())}  # engines follow links
        return {info.edition for info in found if _model(info.fields) in names}

    def _evict(self, edition: str) -> str:
        deadline = time.monotonic() + LEASES_S
        try:
            with KeeperClient.connect(self._runtime_dir, label="fer serve") as client:
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


def _model(fields: bytes) -> str:
    try:
        return str(Fingerprint.from_json(fields).group.get("model", ""))
    except (FerError, ValueError):
        return ""
