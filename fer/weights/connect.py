"""The way to the keeper, by mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fer.errors import KeeperError, KeeperUnavailable
from fer.weights.client import KeeperClient
from fer.weights.keeper.start import Started, shares_cgroup, start_keeper

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
    looked_in: list[str] = []
    try:
        return KeeperClient.connect(options.runtime_dir, label=label), ""
    except KeeperUnavailable as error:
        if options.mode == "client":
            raise
        if "hangs" in error.fields:  # another could not take its place, and would hold the weights a second time
            return None, str(error)
        looked_in = error.fields.get("looked_in", [])
    except KeeperError as error:
        if options.mode == "client":
            raise
        return None, f"no keeper to be trusted: {error}"
    try:
        started = start_keeper(options.runtime_dir)
        return KeeperClient.connect(started.runtime_dir, label=label), _note(started, looked_in)
    except KeeperError as error:
        return None, f"no keeper could be started: {error}"


def ends_with_us(client: KeeperClient) -> bool:
    """Whether the keeper is in this process's cgroup, and so ends with the engine's unit or container."""
    return shares_cgroup(client.keeper_pid)


def _note(started: Started, looked_in: list[str]) -> str:
    """What an operator should know of a keeper that was started just now."""
    if started.how == "running":  # somebody else was quicker
        return ""
    how = {"systemd-run": "in a unit of its own", "detached": "detached from this process"}[started.how]
    end = ", in this engine's cgroup: it will end with the engine's unit or container" if started.shares_cgroup else ""
    passed = f" (passed over: {started.passed_over})" if started.passed_over else ""
    place = f" in {started.runtime_dir}" if passed or len(looked_in) > 1 else ""
    return f"no keeper listened in {' or '.join(looked_in)}; one was started{place} {how}{end}{passed}"
