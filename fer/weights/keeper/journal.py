"""The keeper's memory of itself: one memfd with two slots, written in turn.

A keeper killed in the middle of a write leaves the other slot whole. The memfd lies in the fd store, so the next
keeper finds it; nothing is ever on disk, since nothing of it is worth keeping after a reboot.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib

from fer.errors import FerBug
from fer.memory.fd import Fd
from fer.memory.seal import memfd

SLOT = 32 << 20
"""Bytes of one slot; pages that are never written take no memory."""
_HEADER = struct.Struct("<8sQQI")  # magic, number of the write, bytes, checksum of number and bytes and content
_MAGIC = b"FERJRNL1"


class Journal:
    """Keeps the last thing written."""

    def __init__(self, fd: Fd) -> None:
        """Take over a journal made by :meth:`create`, here or in a keeper that is gone."""
        self.fd = fd
        self._map = mmap.mmap(fd.fileno(), 2 * SLOT)
        self._number = max((number for number, _ in self._slots()), default=0)

    @classmethod
    def create(cls) -> Journal:
        """An empty journal."""
        fd = memfd("fer-journal")
        os.ftruncate(fd.fileno(), 2 * SLOT)
        return cls(fd)

    def write(self, content: bytes) -> None:
        """Replace what is kept; a kill at any moment leaves the old or the new content."""
        if len(content) > SLOT - _HEADER.size:
            raise FerBug(f"a journal entry of {len(content)} bytes", why=f"a slot has {SLOT}")
        number = self._number + 1
        start = (number % 2) * SLOT
        body = start + _HEADER.size
        self._map[body : body + len(content)] = content
        self._map[start:body] = _HEADER.pack(_MAGIC, number, len(content), _checksum(number, content))
        self._number = number

    def read(self) -> bytes | None:
        """The newest whole content, None where there is none."""
        slots = self._slots()
        return max(slots)[1] if slots else None

    def _slots(self) -> list[tuple[int, bytes]]:
        """Number and content of the slots that are whole."""
        found = []
        for start in (0, SLOT):
            magic, number, size, checksum = _HEADER.unpack_from(self._map, start)
            if magic == _MAGIC and number and size <= SLOT - _HEADER.size:
                content = self._map[start + _HEADER.size : start + _HEADER.size + size]
                if _checksum(number, content) == checksum:
                    found.append((number, content))
        return found

    def close(self) -> None:
        """Unmap and close."""
        self._map.close()
        self.fd.close()


def _checksum(number: int, content: bytes) -> int:
    return zlib.crc32(content, zlib.crc32(struct.pack("<QQ", number, len(content))))
