"""The file of an archive: a tar in one zstd frame, with a manifest first. Reading and writing of its members.

::

    manifest.json      what is in it; see fer.kernels.manifest
    manifest.sha256    the manifest's digest, 64 hexadecimal digits
    blobs/<sha256>     contents of files, each once, in the order in which the manifest first names them

Names of files stand in the manifest alone, so that nothing in the tar leads anywhere. ``tar --zstd -tf`` reads it, but
only what this module would have written is accepted: no links, devices, modes, times, owners or other names, in no
other order. Equal input gives equal bytes, as long as the zstd library is the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, cast

import zstandard

from fer.errors import ArchiveError, ArchiveUntrusted

MANIFEST, DIGEST, BLOBS = "manifest.json", "manifest.sha256", "blobs/"
MAX_MANIFEST: Final = 256 << 20
MAX_FILE: Final = 2 << 30
MAX_TOTAL: Final = 64 << 30
MAX_RATIO: Final = 500
"""Raw bytes for one byte of the file, for archives above :data:`_FREE` bytes: kernels compress to a tenth."""

_FREE: Final = 64 << 20
_FREE_MANIFEST: Final = 4 << 20
_BLOCK: Final = 512
_END: Final = bytes(2 * _BLOCK)
_BLOB: Final = re.compile(r"blobs/([0-9a-f]{64})")
_LEVEL: Final = 3
_WINDOW: Final = 128 << 20
_KINDS: Final = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a directory",
    b"6": "a pipe",
}


def write(path: Path, manifest: bytes, blobs: Iterable[tuple[str, bytes]]) -> str:
    """Write an archive all at once, readable by this user alone; the SHA-256 of the file.

    Args:
        blobs: digest and bytes, in the manifest's order.

    Raises:
        ArchiveError: the folder cannot be written to, or the disk is full; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary.open("xb") as file:
            os.fchmod(file.fileno(), 0o600)
            digested = _Digested(file)
            packer = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=False)
            with packer.stream_writer(cast(IO[bytes], digested), closefd=False) as out:
                digest = hashlib.sha256(manifest).hexdigest()
                for name, data in ((MANIFEST, manifest), (DIGEST, digest.encode())):
                    _member(out, name, data)
                for name, data in blobs:
                    _member(out, BLOBS + name, data)
                out.write(_END)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be written", why=error.strerror or str(error), section="file") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return digested.digest.hexdigest()


class _Digested:
    """Passes bytes on and hashes them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _member(out: Any, name: str, data: bytes) -> None:
    out.write(_header(name, len(data)))
    out.write(data)
    out.write(bytes(-len(data) % _BLOCK))


def _header(name: str, size: int) -> bytes:
    """A tar header (POSIX ustar) without times and owners."""
    named, sized = name.encode("ascii"), b"%011o" % size
    checksum = b"%06o\0 " % (_BARE_SUM + sum(named) + sum(sized))
    return b"".join((named.ljust(100, b"\0"), _BEFORE_SIZE, sized, _BEFORE_SUM, checksum, _BEHIND))


_BEFORE_SIZE: Final = b"0000644\0" + 2 * b"0000000\0"  # mode and ids
_BEFORE_SUM: Final = b"\0" + b"00000000000\0"  # the time
_BEHIND: Final = (b"0" + bytes(100) + b"ustar\x0000").ljust(_BLOCK - 156, b"\0")  # a regular file, no link
_BARE_SUM: Final = sum(_BEFORE_SIZE + _BEFORE_SUM + 8 * b" " + _BEHIND)
"""Of a header without a name and a size; its own field counts as blanks."""


class Reader:
    """An archive, read once from front to back. Use as a context manager; the manifest has been read then.

    Attributes:
        manifest: the manifest's bytes, whose digest fits.
        digest: their SHA-256; it names the archive's content.
        size: bytes of the file.

    Raises:
        ArchiveError: it is missing, cut off or damaged.
        ArchiveUntrusted: it holds what FER never writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise ArchiveError(f"{path} cannot be read", why=error.strerror or str(error), section="file") from error
        unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        # Across frames, so that anything behind the first one is noticed.
        self._stream = unpacker.stream_reader(self._file, read_size=1 << 20, read_across_frames=True, closefd=False)
        try:
            self.manifest = self._named(MANIFEST, min(MAX_MANIFEST, max(_FREE_MANIFEST, MAX_RATIO * self.size)))
            self.digest = hashlib.sha256(self.manifest).hexdigest()
            if self._named(DIGEST, 64) != self.digest.encode():
                raise self.bad(MANIFEST, "its checksum does not match")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Repeatable."""
        self._file.close()

    def limit(self, total: int) -> None:
        """Refuse an archive that claims to hold more than is plausible, before any of it is read."""
        if total > MAX_TOTAL or (total > _FREE and total > MAX_RATIO * self.size):
            raise self.hostile(f"it would take {total} bytes out of {self.size}")

    def blobs(self, wanted: Iterable[tuple[str, int]]) -> Iterator[tuple[str, bytes]]:
        """Every blob by digest, verified, in order; afterwards the archive has been read to its end.

        Args:
            wanted: digest and size of each, as the manifest tells them.
        """
        for digest, size in wanted:
            data = self._blob(BLOBS + digest, size)
            if hashlib.sha256(data).hexdigest() != digest:
                raise self.bad(BLOBS + digest, "its checksum does not match")
            yield digest, data
        if self._exactly(len(_END), "the end") != _END or self._read(1):
            raise self.bad("the end", "there is more in it than its manifest says")

    def _blob(self, name: str, size: int) -> bytes:
        """A member of exactly this name and size, in one read."""
        padding = bytes(-size % _BLOCK)
        whole = self._read(_BLOCK + size + len(padding))
        header, data = whole[:_BLOCK], whole[_BLOCK : _BLOCK + size]
        if header != _header(name, size):  # looked at only to say what is wrong
            if len(header) < _BLOCK:
                raise self.truncated(name)
            found, told = self._parse(header)
            why = f"{found or 'the end'} stands in its place" if found != name else f"it has {told} bytes"
            raise self.bad(name, why if found != name else f"{why} instead of {size}")
        if len(whole) < _BLOCK + size + len(padding):
            raise self.truncated(name)
        if whole[_BLOCK + size :] != padding:
            raise self.bad(name, "its padding is not empty")
        return data

    def _named(self, name: str, most: int) -> bytes:
        found, size = self._parse(self._exactly(_BLOCK, name))
        if found != name:
            raise self.bad(name, f"{found or 'the end'} stands in its place")
        if size > most:
            raise self.hostile(f"{name} has {size} bytes; {most} is the most")
        data = self._exactly(size, name)
        if any(self._exactly(-size % _BLOCK, name)):
            raise self.bad(name, "its padding is not empty")
        return data

    def _parse(self, header: bytes) -> tuple[str, int]:
        """Name and size of a member; only headers that FER writes are understood."""
        if header == bytes(_BLOCK):
            return "", 0
        try:
            checksum = int(header[148:156].strip(b"\0 "), 8)
            size = int(header[124:136].strip(b"\0 "), 8)
        except ValueError:
            raise self.bad("a header", "it is not readable") from None
        if size < 0:
            raise self.bad("a header", "it has a size below zero")
        if checksum != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
            raise self.bad("a header", "its checksum does not match")
        name = header[:100].rstrip(b"\0").decode("ascii", "replace")
        if kind := _KINDS.get(header[156:157]):
            raise self.hostile(f"{name!r} is {kind}")
        if size > MAX_FILE:
            raise self.hostile(f"{name!r} has {size} bytes; {MAX_FILE} is the most")
        if name not in (MANIFEST, DIGEST) and not _BLOB.fullmatch(name):
            raise self.hostile(f"it holds {name!r}")
        if header != _header(name, size):
            raise self.hostile(f"the header of {name!r} has a mode, an owner or a time")
        return name, size

    def _exactly(self, count: int, what: str) -> bytes:
        data = self._read(count)
        if len(data) != count:
            raise self.truncated(what)
        return data

    def _read(self, count: int) -> bytes:
        try:
            data = bytes(self._stream.read(count)) if count else b""
            while len(data) < count and (more := self._stream.read(count - len(data))):
                data += more
            return data
        except zstandard.ZstdError as error:
            raise self.bad("the compressed data", str(error)) from error
        except OSError as error:
            raise self.bad("file", error.strerror or str(error)) from error

    def truncated(self, section: str) -> ArchiveError:
        """The error for a file that was cut off."""
        return self.bad(section, "the file ends before it: it is truncated")

    def bad(self, section: str, why: str) -> ArchiveError:
        """The error for damage."""
        return ArchiveError(
            f"{self.path} is damaged in {section}",
            why=why,
            fix="Get it or pack it again; until then kernels are compiled as usual",
            section=section,
        )

    def hostile(self, why: str) -> ArchiveUntrusted:
        """The error for what only somebody else would have written."""
        return ArchiveUntrusted(
            f"{self.path} is refused", why=f"{why}, which FER never writes", fix="Find out who made this file"
        )
