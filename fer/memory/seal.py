"""Sealed memfds: bytes that cannot change, whoever holds the descriptor. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import os

from fer.errors import ProtocolError
from fer.memory.fd import Fd

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""What a finished memfd must carry: neither bytes, nor size, nor the seals themselves can change."""

_MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; also adds F_SEAL_EXEC


def memfd(name: str) -> Fd:
    """An empty memfd that can be sealed, not executable where the kernel knows how (Linux 6.3)."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return Fd(os.memfd_create(name, flags | _MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return Fd(os.memfd_create(name, flags))


def add_seals(fd: Fd | int) -> None:
    """Seal a memfd for good.

    Raises:
        OSError: ``EBUSY`` while any process has a shared mapping of it, or a device has its pages pinned.
    """
    fcntl.fcntl(_number(fd), fcntl.F_ADD_SEALS, SEALS)


def sealed_bytes(name: str, data: bytes | bytearray | memoryview) -> Fd:
    """A sealed memfd that holds ``data``.

    Args:
        name: shown in ``/proc/PID/fd``, for people.
    """
    fd = memfd(name)
    try:
        rest = memoryview(data).cast("B")
        while rest:  # one write moves at most 2 GiB
            rest = rest[os.write(fd.fileno(), rest) :]
        add_seals(fd)
    except BaseException:
        fd.close()
        raise
    return fd


def read_sealed(fd: Fd | int, limit: int) -> bytes:
    """The bytes of a sealed memfd; the descriptor stays the caller's.

    Raises:
        ProtocolError: it is no sealed memfd, or holds more than ``limit`` bytes.
    """
    number = _number(fd)
    if not _is_sealed(number):
        raise ProtocolError(
            "a received descriptor is no sealed memfd", why="its bytes could change while they are read"
        )
    size = os.fstat(number).st_size
    if size > limit:
        raise ProtocolError(f"a received memfd holds {size} bytes", why=f"at most {limit} are accepted here")
    parts: list[bytes] = []
    offset = 0
    while offset < size:
        # pread, because the file offset is shared with whoever else holds the descriptor
        part = os.pread(number, size - offset, offset)
        if not part:
            raise ProtocolError(f"a sealed memfd of {size} bytes ended at {offset}")
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


FIXED = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""What memory must carry that several processes write to, one after another: its size cannot change."""


def fixed_memfd(name: str, size: int) -> Fd:
    """A memfd of zeros whose bytes can be written for ever, and whose size cannot change."""
    fd = memfd(name)
    try:
        os.ftruncate(fd.fileno(), size)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, FIXED)
    except BaseException:
        fd.close()
        raise
    return fd


def is_fixed_size(fd: Fd | int, size: int) -> bool:
    """True for a memfd of exactly ``size`` bytes that will stay so, and may be written. Never raises OSError."""
    number = _number(fd)
    try:
        seals = fcntl.fcntl(number, fcntl.F_GET_SEALS)
        fixed = seals & FIXED == FIXED and not seals & fcntl.F_SEAL_WRITE
        return size > 0 and fixed and os.fstat(number).st_size == size
    except OSError:
        return False


def is_sealed_slab(fd: Fd | int, size: int) -> bool:
    """True for a memfd of exactly ``size`` bytes that can change neither in bytes nor in size. Never raises OSError."""
    number = _number(fd)
    try:
        return size > 0 and _is_sealed(number) and os.fstat(number).st_size == size
    except OSError:
        return False


def _is_sealed(number: int) -> bool:
    try:
        return fcntl.fcntl(number, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:  # EINVAL: no memfd; EBADF: opened with O_PATH
        return False


def _number(fd: Fd | int) -> int:
    return fd if isinstance(fd, int) else fd.fileno()
