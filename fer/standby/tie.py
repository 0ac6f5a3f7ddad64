"""A process that ends when another one does, by the kernel alone: no parent, no thread and no poll takes part.

The one that must outlive nobody holds the read end of a pipe, set up so that its hang-up is delivered as SIGKILL. The
other holds the only write end and never writes. ``PR_SET_PDEATHSIG`` would not do: it follows the parent, which for a
forked engine is the launcher, and the thread that forked.

The holder of the write end sees the other's end in turn, as the hang-up of the pipe; with :func:`show_end_at_once`
before the kernel has taken the process apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import threading

from fer.memory.fd import Fd

_F_SETSIG, _F_GETSIG = 10, 11
"""Which signal announces input and hang-up; Linux, missing in Python's module."""
_SYS_CLOSE_RANGE, _CLOSE_RANGE_UNSHARE = 436, 2
"""Linux 5.9, under the same number on all architectures but Alpha; older C libraries have no function for it."""


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


def show_end_at_once() -> bool:
    """Let the other side see the end of this process, which must not exec, as soon as it begins; whether that could be.

    Threads share one table of descriptors, which is closed by the last of them to go, and that is as a rule the one
    that has to free the process's memory first: 80 ms where 800 MiB were written to (``bench.first_sign``). So a thread
    gets a table of its own with the pipe's read end alone, and the others lose theirs. If this thread is not the last,
    its table is closed at once; if it is, that of all others has been. ``unshare`` would do the same, but containers
    forbid it.
    """
    held = _own()
    if held is None:
        return False
    libc = ctypes.CDLL(None)
    apart, done = threading.Event(), threading.Event()

    def close_range(first: int, last: int, flags: int = 0) -> bool:
        numbers = ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_uint(flags)
        return bool(libc.syscall(ctypes.c_long(_SYS_CLOSE_RANGE), *numbers) == 0)

    def hold() -> None:
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the main thread
            if close_range(held + 1, 0xFFFFFFFF, _CLOSE_RANGE_UNSHARE):
                close_range(0, held - 1)
                apart.set()
        finally:
            done.set()
        while apart.is_set():
            libc.pause()

    try:
        threading.Thread(target=hold, name="tie", daemon=True).start()
    except RuntimeError:  # the system gives no thread; the end is seen later then
        return False
    done.wait()
    if apart.is_set():
        os.close(held)
    return apart.is_set()


def _own() -> int | None:
    """The read end that this process holds, if it is bound to another."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if fcntl.fcntl(int(name), _F_GETSIG) == signal.SIGKILL:
                return int(name)
    return None
