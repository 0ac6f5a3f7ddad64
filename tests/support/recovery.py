"""Starts engines as processes and talks to them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from fer.weights.client import KeeperClient
from tests.support.descriptors import Open, open_descriptors
from tests.support.keeper import read_line, wait_until
from tests.support.processes import Children
from tests.support.zygote import Forked

WAIT_S = 60.0


class EngineProcess:
    """One engine in a process; see ``tests/support/engine_child.py`` for what may be asked.

    Args:
        fresh: start an interpreter of its own, which takes seconds; otherwise the engine's process is forked.
    """

    def __init__(self, children: Children, folder: Path, *, fresh: bool = False, **asked: Any) -> None:
        module, argument = "tests.support.engine_child", json.dumps({"folder": str(folder), **asked})
        streams = {"stdin": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process: subprocess.Popen[str] | Forked
        if fresh:
            self.process = children.spawn([sys.executable, "-m", module, argument], **streams)
        else:
            self.process = children.fork(module, argument, **streams)
        self.log: list[str] = []

    def row(self) -> dict[str, Any]:
        """The next JSON line; everything else the child wrote is kept in :attr:`log`."""
        while line := read_line(self.process.stdout, WAIT_S):
            if line.startswith("{"):
                return dict(json.loads(line))
            self.log.append(line)
        raise AssertionError("the engine said nothing more:\n" + "\n".join(self.log[-40:]))

    def result(self) -> dict[str, Any]:
        """The row of the recovery, past the rows of faults that fired."""
        row = self.row()
        while set(row) == {"fired"}:
            row = self.row()
        return row

    def ask(self, what: str) -> dict[str, Any]:
        """Send a command to the running engine."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.row()

    def wait(self) -> int:
        """Wait until it has ended; its exit status."""
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait(WAIT_S)


def keeper() -> KeeperClient:
    """A connection to the test's keeper."""
    return KeeperClient.connect(label="test")


def wait_for_digests() -> None:
    """Wait until the only edition has its digests, of the checkpoint and of the tensors."""

    def are_there() -> bool:
        (info,) = client.status().editions
        return info.digests

    with keeper() as client:
        wait_until(are_there, "digests", WAIT_S)


def keeper_descriptors() -> list[str]:
    """What the keeper has open, sorted; the connection that looks is counted in, each time alike."""
    with keeper() as client:
        client.status()  # by now it has seen the ends of all connections that ended before
        held: Open = open_descriptors(client.keeper_pid)
    # Numbers of sockets and memfds change with every connection; what they are does not.
    return sorted(what.split(":[")[0] for what in held.values())
