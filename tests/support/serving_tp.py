"""``fer serve --tp 2`` itself, with a model that two ranks share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.keeper import wait_until
from tests.support.processes import Children
from tests.support.serving import START_S, RealService

LIMIT_S = START_S


class TensorParallel(RealService):
    """The command, in a process.

    Args:
        more: further arguments of the command.
    """

    def __init__(self, children: Children, folder: Path, log: Path, *more: str) -> None:
        super().__init__(children, folder, log, "--tp", "2", *more)

    def whole(self, members: int, restarts: int = 0) -> dict[str, Any]:
        """Wait until one engine serves and all others stand by, each with both ranks."""

        def holds(status: dict[str, Any]) -> bool:
            roles = sorted(member["role"] for member in status["members"])
            ranks = all(len(member["processes"]) == 2 for member in status["members"])
            there = ranks and roles == ["active", *(members - 1) * ["standby"]]
            return there and status["restarts"] == restarts

        wait_until(lambda: holds(self.status()), "all engines are there", LIMIT_S)
        return self.status()

    def ranks(self, role: str = "active") -> list[int]:
        """Pids of the ranks of the first engine in a role, rank 0 first."""
        member = next(m for m in self.status()["members"] if m["role"] == role)
        return [process["pid"] for process in member["processes"]]

    def how(self) -> set[str]:
        """How processes were started."""
        return {process["via"] for member in self.status()["members"] for process in member["processes"]}
