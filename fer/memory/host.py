"""Slabs in host memory: memfds, written through a shared mapping, then sealed and mapped privately.

A slab is writable only in its maker and only until :meth:`HostMapping.protect`. After that the kernel itself
guarantees the bytes: the memfd's seals forbid writing to whoever holds it, and every reader maps it private and
read-only, so that a stray write ends the writer by SIGSEGV and touches nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fer.errors import MappingError, OutOfMemory, SlabLost
from fer.memory import seal
from fer.memory.base import HOST, Backend, Mapping, Room
from fer.memory.fd import Fd
from fer.memory.host_room import host_room

if TYPE_CHECKING:
    import torch

_MAP_FIXED = 0x10
_MAP_FIXED_NOREPLACE = 0x100000  # Linux 4.17; before that the address is only a hint, which the result tells
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MAP_FAILED = ctypes.c_void_p(-1).value

_READ = mmap.PROT_READ
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _call(name: str, *arguments: int) -> int:
    """The one gate to libc: the result, or OSError with the kernel's reason."""
    result: Any = getattr(_libc, name)(*arguments)
    if result in (_MAP_FAILED, -1):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return int(result or 0)


def _map(fd: Fd, size: int, protection: int, flags: int, *, address: int = 0) -> int:
    """Map a memfd, at ``address`` where it is free, elsewhere otherwise."""
    if address:
        with contextlib.suppress(OSError):
            return _call("mmap", address, size, protection, flags | _MAP_FIXED_NOREPLACE, fd.fileno(), 0)
    return _call("mmap", 0, size, protection, flags, fd.fileno(), 0)


def _advise(address: int, size: int, advice: int) -> None:
    """Advice a kernel may not know or grant; never needed for right results."""
    with contextlib.suppress(OSError):
        _call("madvise", address, size, advice)


def _release(address: int, size: int, fd: Fd | None, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child did not inherit a slab in the making; its addresses may be a stranger's by now
    with contextlib.suppress(OSError):
        _call("munmap", address, size)
    if fd is not None:
        fd.close()


class HostMapping(Mapping):
    """A memfd in this process. Closed at the latest when nothing refers to it any more."""

    kind = HOST

    def __init__(self, address: int, size: int, *, fd: Fd | None, moved: bool) -> None:
        self.address, self.size, self.moved = address, size, moved
        self.writable = fd is not None
        self._fd = fd
        self._closer = weakref.finalize(self, _release, address, size, fd, os.getpid())
        self._closer.atexit = False  # tensors may outlive us in a dying interpreter; the kernel unmaps anyway

    def export(self) -> Fd:
        if self._fd is None or self._fd.closed:
            raise MappingError(
                "only the process that made a slab can export it", why="this one attached it or closed it"
            )
        return self._fd.dup()

    def protect(self) -> None:
        if not self.writable:
            return
        fd = self._fd
        if fd is None or not self._closer.alive:
            raise MappingError("a closed slab cannot be protected")
        # The order is the trap: sealing fails with EBUSY while any shared mapping stands, even a read-only one. So the
        # private mapping replaces the shared one first (atomically, tensors stay valid), and only then come the seals.
        _call("mmap", self.address, self.size, _READ, mmap.MAP_PRIVATE | _MAP_FIXED, fd.fileno(), 0)
        try:
            seal.add_seals(fd)
        except OSError as error:
            _call("mmap", self.address, self.size, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd.fileno(), 0)
            _advise(self.address, self.size, _MADV_DONTFORK)
            raise MappingError(
                f"a slab of {self.size} bytes cannot be sealed",
                why="it is still mapped shared somewhere, or its pages are pinned"
                if error.errno == errno.EBUSY
                else str(error),
                fix="Unregister it from pinned memory and end the processes that map it; the slab stays writable here.",
            ) from error
        self.writable = False

    def unfilled(self) -> int:
        """Bytes that were promised to the slab and not yet taken from the system; 0 once it is protected."""
        if self._fd is None or self._fd.closed or not self.writable:
            return 0
        return max(0, self.size - os.fstat(self._fd.fileno()).st_blocks * 512)

    def forget_descriptor(self) -> None:
        if self._fd is not None and not self.writable:
            self._fd.close()

    def close(self) -> None:
        self._closer()

    @property
    def closed(self) -> bool:
        return not self._closer.alive


class HostBackend(Backend):
    """Slabs in host memory.

    Sizes are rounded to pages and no further: a memfd needs no more, and pages that nobody touches cost nothing.

    Args:
        room: free and total bytes for new slabs; tests give a small one.
    """

    kind = HOST
    device = "cpu"
    gpu = HOST
    granularity = mmap.PAGESIZE
    base = 0

    def __init__(self, room: Callable[[], Room] = host_room) -> None:
        self._room = room
        self._making: weakref.WeakSet[HostMapping] = weakref.WeakSet()

    def create(self, size: int, *, address: int = 0) -> HostMapping:
        if size <= 0:
            raise ValueError(f"a slab of {size} bytes")
        size = -(-size // self.granularity) * self.granularity
        self._check_room(size)
        fd = seal.memfd("fer-slab")
        try:
            os.ftruncate(fd.fileno(), size)
            where = _map(fd, size, _READ_WRITE, mmap.MAP_SHARED, address=address)
        except OSError as error:
            fd.close()
            raise MappingError(f"a host slab of {size} bytes could not be made", why=str(error)) from error
        # A forked child would inherit the shared mapping and hold off the seals for as long as it lives.
        _advise(where, size, _MADV_DONTFORK)
        _advise(where, size, _MADV_HUGEPAGE)
        mapping = HostMapping(where, size, fd=fd, moved=bool(address) and where != address)
        self._making.add(mapping)
        return mapping

    def attach(self, fd: Fd, size: int, *, address: int = 0) -> HostMapping:
        with fd:
            if not seal.is_sealed_slab(fd, size):
                raise SlabLost(
                    f"a received descriptor is no sealed slab of {size} bytes",
                    why="only a memfd of the stated size with all its seals is mapped",
                )
            try:
                where = _map(fd, size, _READ, mmap.MAP_PRIVATE, address=address)
            except OSError as error:
                raise MappingError(f"a host slab of {size} bytes could not be mapped", why=str(error)) from error
        _advise(where, size, _MADV_HUGEPAGE)
        return HostMapping(where, size, fd=None, moved=bool(address) and where != address)

    def room(self) -> Room:
        room = self._room()
        promised = sum(mapping.unfilled() for mapping in list(self._making))
        return Room(free=max(0, room.free - promised), total=room.total)

    def storage(self, mapping: Mapping, offset: int, nbytes: int) -> torch.UntypedStorage:
        from fer.memory import torch_private

        return torch_private.storage_within(mapping, offset, nbytes, self.device)

    def _check_room(self, size: int) -> None:
        room = self.room()
        margin = spare(room.total)
        if size + margin > room.free:
            raise OutOfMemory(
                f"a host slab of {size} bytes does not fit",
                why=f"{room.free} bytes are available and {margin} stay free for everything else",
                fix="Free memory, raise the cgroup's limit, or evict kept weights with `fer evict`.",
                needed=size,
                free=max(0, room.free - margin),
            )


def spare(total: int) -> int:
    """Bytes to leave free: a fiftieth of the memory, between 64 MiB and 1 GiB."""
    return min(max(total // 50, 64 << 20), 1 << 30)
