"""The container of an archive: named binary sections with checksums, some compressed, some mapped as they are.

::

    header      magic, version, count, digest of the directory
    directory   for each section: name, codec, offset, stored bytes, raw bytes, SHA-256 of the stored bytes
    sections    aligned, so that tables and binaries can be used where they lie

All numbers are little-endian. Nothing in it is ever executed or unpickled. A file appears under its name only when it
is complete (written beside it, synced, renamed).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zstandard

from fer.errors import ArchiveError

MAGIC: Final = b"FERGRAPH"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sII32s16x")  # 64 bytes
_ENTRY: Final = struct.Struct("<16sIIQQQ32s")
_RAW, _ZSTD = 0, 1
_PAGE: Final = 4096
_MAX_SECTIONS: Final = 64
_MAX_RAW: Final = 64 << 30
_MAX_UNPACKED: Final = 4 << 30  # tables and contents are a few megabytes
_FRAME_HEADER: Final = 18


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One section: where it lies in the file, and what its bytes must hash to."""

    name: str
    codec: int
    offset: int
    stored: int
    raw: int
    digest: bytes


class Sections:
    """An open archive file. Sections are checked when they are read.

    Raises:
        ArchiveError: the file is no archive, is of another version, or its directory is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size < _HEADER.size:
                    raise ArchiveError(
                        f"{path} is no archive of graphs", why=f"it has {self.size} bytes", section="header"
                    )
                self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except OSError as error:
            raise ArchiveError(f"{path} cannot be read", why=error.strerror or str(error), section="file") from error
        self.digest, self.entries = self._directory()

    def _directory(self) -> tuple[str, dict[str, Entry]]:
        magic, version, count, digest = _HEADER.unpack_from(self._map)
        if magic != MAGIC:
            raise self._bad("header", "the file does not begin as one")
        if version != VERSION:
            raise self._bad("header", f"its format is {version}, this version of FER reads {VERSION}")
        end = _HEADER.size + count * _ENTRY.size
        if count > _MAX_SECTIONS or end > self.size:
            raise self._bad("directory", f"{count} sections do not fit")
        table = self._map[_HEADER.size : end]
        if hashlib.sha256(table).digest() != digest:
            raise self._bad("directory", "its checksum does not match")
        found: dict[str, Entry] = {}
        for at in range(0, len(table), _ENTRY.size):
            name, codec, _, offset, stored, raw, section = _ENTRY.unpack_from(table, at)
            text = name.rstrip(b"\0").decode(errors="replace")
            entry = Entry(name=text, codec=codec, offset=offset, stored=stored, raw=raw, digest=section)
            if codec not in (_RAW, _ZSTD) or offset + stored > self.size or raw > (_MAX_RAW, _MAX_UNPACKED)[codec]:
                raise self._bad(entry.name, "it reaches past the end of the file: the file is truncated")
            found[entry.name] = entry
        return hashlib.sha256(digest).hexdigest(), found

    def read(self, name: str) -> memoryview:
        """A section's bytes, checked and decompressed; raw sections are views of the mapped file.

        Raises:
            ArchiveError: it is missing or damaged. Field: ``section``.
        """
        view = self.view(name)
        entry = self.entries[name]
        if hashlib.sha256(view).digest() != entry.digest:
            raise self._bad(name, "its checksum does not match")
        if entry.codec == _RAW:
            return view
        try:
            if zstandard.frame_content_size(view[:_FRAME_HEADER]) != entry.raw:  # memory is taken as the frame says
                raise self._bad(name, "it has another length than recorded")
            raw = zstandard.ZstdDecompressor().decompress(bytes(view), max_output_size=entry.raw)
        except zstandard.ZstdError as error:
            raise self._bad(name, str(error)) from error
        return memoryview(raw)

    def view(self, name: str) -> memoryview:
        """A section's stored bytes without a check: for binaries, which are checked one by one when they are used."""
        if name not in self.entries:
            raise self._bad(name, "the section is missing")
        entry = self.entries[name]
        return memoryview(self._map)[entry.offset : entry.offset + entry.stored]

    def verify(self) -> list[str]:
        """Names of damaged sections; reads the whole file."""
        damaged = []
        for name in self.entries:
            try:
                self.read(name)
            except ArchiveError:
                damaged.append(name)
        return damaged

    def _bad(self, section: str, why: str) -> ArchiveError:
        return ArchiveError(
            f"{self.path} is damaged in its section {section}",
            why=why,
            fix="Remove it with `fer graphs prune`; the next start captures the graphs and saves them again",
            section=section,
        )


def write(path: Path, sections: Mapping[str, bytes], *, raw: frozenset[str] = frozenset(), level: int = 3) -> None:
    """Write an archive atomically, readable by this user alone; sections named in ``raw`` are not compressed.

    Raises:
        ArchiveError: the folder cannot be written to or the disk is full; nothing is left behind.
    """
    packer = zstandard.ZstdCompressor(level=level)
    placed: list[tuple[int, bytes]] = []
    directory = b""
    offset = _HEADER.size + len(sections) * _ENTRY.size
    for name, data in sections.items():
        plain = name in raw
        body = data if plain else packer.compress(data)
        align = _PAGE if plain and body else 64 if body else 1  # nothing is written for an empty one
        offset = -(-offset // align) * align
        digest = hashlib.sha256(body).digest()
        directory += _ENTRY.pack(name.encode(), _RAW if plain else _ZSTD, 0, offset, len(body), len(data), digest)
        placed.append((offset, body))
        offset += len(body)
    header = _HEADER.pack(MAGIC, VERSION, len(sections), hashlib.sha256(directory).digest())
    replace_file(path, [(0, header + directory), *placed])


def replace_file(path: Path, parts: list[tuple[int, bytes]]) -> None:
    """Put a file of these parts (offset and bytes) under ``path``, all at once.

    Raises:
        ArchiveError: as :func:`write`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written", why=error.strerror or str(error), section="file") from error
    try:
        with os.fdopen(handle, "wb") as file:
            for offset, body in parts:
                file.seek(offset)
                file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise ArchiveError(f"{path} cannot be written", why=error.strerror or str(error), section="file") from error
