"""One owner object for each descriptor."""

from __future__ import annotations

import fcntl
import os
import resource
from types import TracebackType
from typing import Self

_WIDE = 1024
"""Entries for which the kernel's table of descriptors is made; two editions of many slabs fit."""


class Fd:
    """Owns one open descriptor and closes it exactly once.

    A closed number is forgotten at once: the kernel hands it out again to whoever opens next, and closing it a
    second time would close a stranger's file.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int) -> None:
        self._number = -1  # first, since __del__ runs for a refused number too
        if number < 0:
            raise ValueError(f"not a descriptor: {number}")
        self._number = number

    def fileno(self) -> int:
        """The number, for system calls; ownership stays here."""
        if self._number < 0:
            raise ValueError("this descriptor is closed")
        return self._number

    def detach(self) -> int:
        """Hand the number to the caller, who now owns it."""
        number, self._number = self.fileno(), -1
        return number

    def dup(self) -> Fd:
        """A second descriptor of the same open file, close-on-exec."""
        return Fd(os.dup(self.fileno()))

    @property
    def closed(self) -> bool:
        return self._number < 0

    def close(self) -> None:
        """Close, if still open."""
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Fd({self._number})" if self._number >= 0 else "Fd(closed)"


def widen_table() -> None:
    """Make this process's table of descriptors large now, while that is free.

    The kernel starts with room for 64 and makes the table larger when it is full. In a process with several threads
    (torch's, the CUDA driver's) it then waits for all processors to pass a quiescent state: 8 to 16 ms in the middle
    of an attach of 64 slabs, measured on an H200. A single-threaded process, as at import or right after a fork, does
    not wait.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    wanted = _WIDE if limit == resource.RLIM_INFINITY else min(_WIDE, limit)
    if wanted < 1:
        return
    with open(os.devnull, "rb") as some:
        # The lowest free number from there on: opening it grows the table, closing it does not shrink it.
        os.close(fcntl.fcntl(some.fileno(), fcntl.F_DUPFD_CLOEXEC, wanted - 1))


os.register_at_fork(after_in_child=widen_table)  # a fork copies only as much of the table as is in use
