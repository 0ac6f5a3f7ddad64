"""Real child processes that never outlive the test that started them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support import zygote

WAIT_S = 20.0
"""Seconds; the bound of every wait for a process in tests."""

ROOT = Path(__file__).resolve().parents[2]


class Children:
    """Child processes of one test; :meth:`end` kills those that are left, with what they started in their group."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str] | zygote.Forked] = []

    def spawn(self, arguments: Sequence[str | Path], **options: Any) -> subprocess.Popen[str]:
        """Start a command in a session of its own; its output is piped as text unless ``options`` say otherwise."""
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT} | options
        child = subprocess.Popen([str(a) for a in arguments], start_new_session=True, **options)
        self._started.append(child)
        return child

    def python(self, code: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start this interpreter on a piece of code."""
        return self.spawn([sys.executable, "-c", code, *arguments], **options)

    def fork(self, module: str, *arguments: str, **options: Any) -> zygote.Forked:
        """``python -m module``, forked from a process that has imported torch; see :mod:`tests.support.zygote`."""
        child = zygote.shared.fork(module, *arguments, **options)
        self._started.append(child)
        return child

    def kill(self, child: subprocess.Popen[str] | zygote.Forked) -> None:
        """SIGKILL, and wait until it is gone."""
        child.kill()
        child.wait(WAIT_S)

    def end(self) -> None:
        """Kill every child that is left, and close its pipes."""
        for child in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()  # one that was forked may not have its own group yet
            child.wait(WAIT_S)
            for pipe in (child.stdin, child.stdout, child.stderr):
                if pipe is not None:
                    pipe.close()
        self._started.clear()


def stopped(pid: int) -> bool:
    """Whether a process stands still: SIGSTOP was sent, and each of its threads has come to obey."""
    states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state == "T" for state in states)


def halt(pid: int) -> None:
    """SIGSTOP, and wait until it stands still: a thread that runs elsewhere goes on for a moment after the signal."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + WAIT_S
    while not stopped(pid):
        assert time.monotonic() < deadline, f"process {pid} was sent SIGSTOP and goes on"
        time.sleep(0.001)


def with_variable(name: str, value: str) -> Iterator[int]:
    """Pids of other processes that were started with this environment variable.

    This finds daemons too: whatever they detach from, they keep the environment that they were started with.
    """
    wanted = f"{name}={value}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue  # gone, or another user's
        if wanted in environment.split(b"\0"):
            yield int(entry.name)


def kill_all_with(name: str, value: str) -> list[int]:
    """SIGKILL every process with this variable until none is left; their pids.

    Repeated because a parent that restarts what dies may be among them.
    """
    killed: list[int] = []
    for _ in range(20):
        pids = list(with_variable(name, value))
        if not pids:
            break
        for pid in pids:
            kill_and_wait(pid)
        killed += pids
    return killed


def kill_and_wait(pid: int, timeout: float = WAIT_S) -> None:
    """SIGKILL a process, a child or not, and wait until it has died."""
    import select

    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # poll() and not select(): a test may have filled the low numbers.
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(timeout * 1000)
    finally:
        os.close(pidfd)
