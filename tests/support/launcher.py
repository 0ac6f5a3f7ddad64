"""Launchers of tests, and programs for them to fork."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from fer.standby import launcher_client
from fer.standby.launcher_wire import Status
from tests.support.descriptors import Open, open_descriptors
from tests.support.keeper import read_line
from tests.support.processes import WAIT_S, Children

START_S = 100.0
"""Seconds; a template that imports torch and Transformers takes most of it on a busy machine."""


class Launcher:
    """A launcher in a process of its own, which serves when this object is made. It imports next to nothing by default.

    Attributes:
        process: of which ``pid`` is the template's.
        said: the line it printed when it served.
    """

    def __init__(
        self, children: Children, *arguments: str | Path, imports: tuple[str, ...] = ("json",), **options: Any
    ):
        command: list[str | Path] = [sys.executable, "-m", "fer.standby.launcher", *arguments]
        for module in imports:
            command += ["--import", module]
        self.process = children.spawn(command, **options)
        self.pid = self.process.pid
        self.said = read_line(self.process.stdout, START_S)
        if not self.said:
            _, err = self.process.communicate(timeout=WAIT_S)
            raise AssertionError(f"the launcher ended at once: {err}")
        self._before = open_descriptors(self.pid)

    def status(self) -> Status:
        """What it says of itself."""
        return launcher_client.ask("default")

    def leaked(self) -> Open:
        """What it still has open, after a while, and had not when it began to serve."""
        pause, left = select.poll(), self._more()
        for _ in range(200):  # it closes a connection only after the other side has got its answer
            if not left:
                break
            pause.poll(10)
            left = self._more()
        return left

    def _more(self) -> Open:
        return {n: what for n, what in open_descriptors(self.pid).items() if n not in self._before}

    def await_generation(self, number: int) -> Status:
        """Wait until a fresh template serves in the same process."""
        assert self.process.stdout is not None
        while read_line(self.process.stdout, START_S):
            found = self.status()
            if found.generation >= number:
                return found
        raise AssertionError("the launcher ended")


def script(folder: Path, code: str, name: str = "engine.py") -> Path:
    """A Python file."""
    path = folder / name
    path.write_text(code)
    return path


def fer_run(
    children: Children, *command: str | Path, options: tuple[str, ...] = (), **more: Any
) -> subprocess.Popen[str]:
    """``fer run -- COMMAND``, in a process."""
    return children.spawn([sys.executable, "-m", "fer", "run", *options, "--", *command], **more)


def finish(process: subprocess.Popen[str], timeout: float = START_S) -> tuple[int, str, str]:
    """Exit code, output and errors of a process that ends by itself."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def await_end(pid: int, timeout: float = WAIT_S) -> bool:
    """Wait until a process that is no child of ours has died; False if it lives on."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(pidfd)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return not await_end(pid, 0.0)
