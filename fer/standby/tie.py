"""A process that ends when another one does, by the kernel alone: no parent, no thread and no poll takes part.

The one that must outlive nobody holds the read end of a pipe, set up so that its hang-up is delivered as SIGKILL. The
other holds the only write end and never writes. ``PR_SET_PDEATHSIG`` would not do: it follows the parent, which for a
forked engine is the launcher, and the thread that forked.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal

from fer.memory.fd import Fd

_F_SETSIG = 10
"""Which signal announces input and hang-up; Linux, missing in Python's module."""


def make() -> tuple[Fd, Fd]:
    """The read end for the process that is to end, which has to be named by :func:`bind`, and the write end to hold."""
    held, alarm = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(held, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(held, fcntl.F_SETFL, fcntl.fcntl(held, fcntl.F_GETFL) | os.O_ASYNC)
    return Fd(held), Fd(alarm)


def bind(held: int, pid: int) -> None:
    """Name the process that is killed at the hang-up. The tie lasts as long as anybody has the read end open."""
    fcntl.fcntl(held, fcntl.F_SETOWN, pid)


def bind_myself(held: int) -> bool:
    """Name this process. False where the other side had gone before, so that no signal will come."""
    bind(held, os.getpid())
    poll = select.poll()
    poll.register(held, 0)  # POLLHUP always counts
    return not poll.poll(0)
