"""Processes that the command line starts, and their ends."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from fer.errors import WaitTimeout

DEATH_LIMIT_S = 30.0
"""Seconds a killed process may take to be gone; the kernel frees large memory meanwhile."""


def line_of(process: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """The one line that the process writes to its stdout; empty where it ends without it.

    Raises:
        WaitTimeout: neither happened in time.
    """
    assert process.stdout is not None
    descriptor, collected, deadline = process.stdout.fileno(), b"", time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not collected.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise WaitTimeout(f"the engine gave no answer in {limit_s:.0f} s", fix="Try a smaller model")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                break
            collected += piece
    return collected


def sweep(runtime_dir: Path) -> None:
    """Kill what is left: an interrupt may come while an engine is about to start a keeper.

    Whatever detached itself still has the directory's name, which nobody else uses, in its environment or arguments.
    """
    name = os.fsencode(runtime_dir)
    for _ in range(20):  # a parent that restarts what dies may be among them
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if name in (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        found = [pid for pid in found if pid != os.getpid()]
        if not found:
            return
        for pid in found:
            kill_and_wait(pid)


def kill_and_wait(pid: int) -> None:
    """SIGKILL a process, a child or not, and wait until it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            selector.select(DEATH_LIMIT_S)
    finally:
        os.close(pidfd)


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP become KeyboardInterrupt, so that what was started is ended then as well."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    former = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
