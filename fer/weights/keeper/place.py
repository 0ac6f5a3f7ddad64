"""A keeper's files in its runtime directory, and whether they are still its own.

Whatever cleans up ``/tmp`` or ``/run/user`` may take them away. Nobody reaches that keeper any more, the next engine
starts another one in its place, and the memory of the first would be held for nobody.
"""

from __future__ import annotations

import os
from pathlib import Path

from fer import paths
from fer.memory.fd import Fd
from fer.weights.keeper import sockets

LOOK_S = 2.0
"""Seconds between two looks."""

_Inode = tuple[int, int]


class Place:
    """The lock and the socket of a keeper.

    Attributes:
        look_at: monotonic seconds at which the next look is due, None for never.
        lost: why the place is not the keeper's any more, empty as long as it is.
    """

    def __init__(self, directory: Path, lock: Fd, now: float, *, fresh: bool) -> None:
        """Take note of what is there; ``fresh``: this keeper made it, and no keeper before it."""
        self.directory = directory
        facts = os.fstat(lock.fileno())
        self._lock: _Inode = (facts.st_dev, facts.st_ino)
        # A socket beside a lock that is not ours is another keeper's, which came while we were dead.
        ours = fresh or _inode(directory / sockets.LOCK) == self._lock
        self._socket = _inode(directory / paths.SOCKET) if ours else None
        self.lost = ""
        # Where a file system shows even a new file under other numbers, a look would tell nothing.
        self._stable = not (fresh and self._wrong())
        self.look_at: float | None = now if self._stable else None

    def look(self, now: float) -> bool:
        """True where this look finds that the place was lost."""
        if self.lost:
            self.look_at = None
            return False
        self.lost = self._wrong()
        self.look_at = now + LOOK_S
        return bool(self.lost)

    def clear(self) -> None:
        """Remove the socket, unless another keeper's is there."""
        if not self._stable or _inode(self.directory / paths.SOCKET) == self._socket:
            sockets.remove(self.directory)

    def _wrong(self) -> str:
        for name, ours in ((sockets.LOCK, self._lock), (paths.SOCKET, self._socket)):
            try:
                found = _inode(self.directory / name)
            except OSError:
                continue  # it cannot be seen, which says nothing
            if found != ours:
                return f"{self.directory / name} " + ("was removed" if found is None else "is another keeper's")
        return ""


def _inode(path: Path) -> _Inode | None:
    """What is there; None for nothing. Raises OSError where that cannot be told."""
    try:
        facts = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_dev, facts.st_ino
