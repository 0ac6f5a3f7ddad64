"""Memory of a card that there is none of: processes take pieces of it, and whose process has gone has given them back.

A folder beside the service's log. ``size`` holds how many pieces there are, and is the test's to write; each process
makes a file ``PID.WHAT`` for what it has. Weights are one piece however many share them, a cache is one each.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fer.errors import OutOfMemory


class Room:
    """One card."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def grow(self, pieces: int) -> None:
        """From now on it has so many."""
        self._folder.mkdir(exist_ok=True)
        whole = self._folder / "size.new"
        whole.write_text(str(pieces))
        whole.replace(self._folder / "size")

    def take(self, what: str) -> None:
        """Take one piece for this process; without a size there is room for everything. Raises OutOfMemory."""
        if not (self._folder / "size").exists():
            return
        with open(self._folder / "lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            used, size = self.used(), int((self._folder / "size").read_text())
            if what not in used and len(used) + 1 > size:
                free = max(0, size - len(used))
                why = f"1 piece is needed, {free} free"
                raise OutOfMemory("the pretended card is full", why=why, needed=1, free=free)
            (self._folder / f"{os.getpid()}.{what}").touch()

    def could(self, what: str) -> bool:
        """Whether there is room for one piece more just now."""
        try:
            self.take(what)
        except OutOfMemory:
            return False
        self.give(what)
        return True

    def give(self, what: str) -> None:
        """Give this process's piece back."""
        (self._folder / f"{os.getpid()}.{what}").unlink(missing_ok=True)

    def used(self) -> list[str]:
        """What processes that live have: weights by name, and each cache."""
        found = []
        for path in self._folder.glob("[0-9]*.*"):
            pid, _, what = path.name.partition(".")
            if _lives(int(pid)):
                found.append(what if what.startswith("weights") else f"{what} of {pid}")
        return sorted({*found})


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
