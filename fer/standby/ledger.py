"""What the rows of a cache hold, written down where it outlives the process: an engine after this one can go on.

A memfd beside the cache: for each row the tokens it has taken in, and how many positions of the cache are theirs for
certain. That number is raised only after the step that filled a position has ended, and is made zero before a row is
used anew. So whatever moment the process is killed at, what is written is true.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np

from fer.errors import MappingError
from fer.memory.fd import Fd
from fer.memory.seal import fixed_memfd, is_fixed_size

_MAGIC: Final = 0x3152474C524546  # "FERLGR1"
_HEAD: Final = 64


class Ledger:
    """Rows of one cache; written by one process at a time, in one thread.

    Args:
        fd: of a ledger of as many rows and positions; stays the caller's.

    Attributes:
        fd: the ledger's own, for whoever is to keep it.

    Raises:
        MappingError: it is none.
    """

    def __init__(self, fd: Fd, rows: int, length: int) -> None:
        self.size = bytes_for(rows, length)
        if not is_fixed_size(fd, self.size):
            raise MappingError("there is no word about the cache", why=f"it is no memfd of {self.size} bytes")
        memory = mmap.mmap(fd.fileno(), self.size)
        head = np.frombuffer(memory, "<i8", 3)
        found = tuple(head.tolist())
        if found not in ((_MAGIC, rows, length), (0, 0, 0)):
            raise MappingError("there is no word about the cache", why=f"it is {found}, not of {rows} x {length}")
        head[:] = (_MAGIC, rows, length)
        self.fd, self.rows, self.length = fd.dup(), rows, length
        self._filled = np.frombuffer(memory, "<i8", rows, _HEAD)
        self._ids = np.frombuffer(memory, "<i4", rows * length, _HEAD + 8 * rows).reshape(rows, length)

    @classmethod
    def create(cls, rows: int, length: int) -> Ledger:
        """An empty one. Raises OSError where the system has no memory for it."""
        with fixed_memfd("fer-ledger", bytes_for(rows, length)) as fd:
            return cls(fd, rows, length)

    def empty(self, row: int) -> None:
        """A row holds nothing; to be said before it is used anew."""
        self._filled[row] = 0

    def set_aside(self, row: int) -> int:
        """Make a row empty for a while; what to give to :meth:`put_back` if nothing was written to it."""
        filled = int(self._filled[row])
        self.empty(row)
        return filled

    def put_back(self, row: int, filled: int) -> None:
        """A row holds what it held before it was set aside."""
        self._filled[row] = filled

    @contextmanager
    def aside(self, row: int) -> Iterator[None]:
        """Around what writes to a row and undoes that; killed in the middle of it, the row is empty."""
        filled = self.set_aside(row)
        yield
        self.put_back(row, filled)

    def fill(self, row: int, ids: Sequence[int], made: int) -> None:
        """A row has taken in these tokens, and made one that its next step takes in."""
        self._filled[row] = 0
        held = ids[: self.length]
        self._ids[row, : len(held)] = held
        if len(held) < self.length:
            self._ids[row, len(held)] = made
        self._filled[row] = len(held)

    def step(self, made: Iterable[int]) -> None:
        """Each of the first rows has taken in its last token, and made another."""
        for row, token in enumerate(made):
            filled = int(self._filled[row]) + 1
            if 1 < filled <= self.length:
                self._filled[row] = filled
                if filled < self.length:
                    self._ids[row, filled] = token

    @contextmanager
    def moving(self, source: int, target: int) -> Iterator[None]:
        """Around the copy of a row in the cache: afterwards ``target`` is what ``source`` was."""
        self.empty(target)
        yield
        self._ids[target] = self._ids[source]
        self._filled[target] = self._filled[source]

    @contextmanager
    def swapping(self, one: int, other: int) -> Iterator[None]:
        """Around the exchange of two rows in the cache; killed in the middle of that, both are empty."""
        held = int(self._filled[one]), int(self._filled[other])
        self.empty(one)
        self.empty(other)
        yield
        ids = self._ids[one].copy()
        self._ids[one], self._ids[other] = self._ids[other], ids
        self._filled[other], self._filled[one] = held

    def find(self, ids: Sequence[int], rows: Iterable[int]) -> int | None:
        """Of these rows the one that holds all of these tokens but the last, and least beyond; None if none does.

        Answers to the same prompt are the same text: a longer one finds no row where a shorter one has taken it.
        """
        count = len(ids) - 1
        if not 0 < count < self.length:
            return None
        wanted = np.asarray(ids[:count], "<i4")
        # A full row may have lost its last position to padding.
        long = (row for row in rows if count <= self._filled[row] < self.length)
        fitting = (row for row in long if np.array_equal(self._ids[row, :count], wanted))
        return min(fitting, key=lambda row: int(self._filled[row]), default=None)

    def held(self) -> list[int]:
        """Rows that hold anything."""
        return np.flatnonzero(self._filled).tolist()


def bytes_for(rows: int, length: int) -> int:
    """Bytes of a ledger."""
    return _HEAD + 8 * rows + 4 * rows * length
