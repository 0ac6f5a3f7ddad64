"""The way to the keeper, by mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fer.errors import KeeperError, KeeperUnavailable
from fer.weights.client import KeeperClient

if TYPE_CHECKING:
    from fer.options import Options


def connect(options: Options, *, label: str = "") -> tuple[KeeperClient | None, str]:
    """A connection to the keeper, and what is to be said about how it was had.

    Args:
        options: ``mode="daemon"`` starts a keeper where none listens, ``mode="client"`` never does.
        label: shown by ``fer status`` beside this process's leases.

    Returns:
        The client and a note (``""`` where there is nothing to say); or None and the reason why there is none.

    Raises:
        KeeperError: ``mode="client"`` and there is no keeper, or not one to be trusted.
    """
    try:
        return KeeperClient.connect(options.runtime_dir, label=label), ""
    except KeeperUnavailable:
        if options.mode == "client":
            raise
    except KeeperError as error:
        if options.mode == "client":
            raise
        return None, f"no keeper to be trusted: {error}"
    from fer.weights.keeper.start import start_keeper

    try:
        started = start_keeper(options.runtime_dir)
        return KeeperClient.connect(options.runtime_dir, label=label), started.note
    except KeeperError as error:
        return None, f"no keeper could be started: {error}"
