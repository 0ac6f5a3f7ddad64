"""An allocator torch can call without Python's lock: a bump pointer in a few bytes of machine code.

torch calls a pluggable allocator while it holds its own lock. A callback written in Python waits for Python's lock
there, and another thread that holds Python's lock and frees a tensor waits for torch's: both wait for ever. So what
torch calls is not Python: 56 bytes that move a cursor to the end of memory that FER mapped beforehand, and answer null
when that is used up. The other function torch needs, for freeing, does nothing; ranges are given back whole.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from typing import Final

from fer.errors import MappingError

ROUND: Final = 2 << 20
"""Sizes are rounded up to this many bytes, the granularity of GPU memory."""

_X86_64: Final = (
    bytes.fromhex("4c8d87ffff1f00")  # lea r8, [rdi + 0x1fffff]
    + bytes.fromhex("4981e00000e0ff")  # and r8, -0x200000
    + bytes.fromhex("48b9")
    + b"%s"  # mov rcx, state
    + bytes.fromhex("488b01")  # again: mov rax, [rcx]
    + bytes.fromhex("4a8d1400")  # lea rdx, [rax + r8]
    + bytes.fromhex("483b5108")  # cmp rdx, [rcx + 8]
    + bytes.fromhex("7708")  # ja none
    + bytes.fromhex("f0480fb111")  # lock cmpxchg [rcx], rdx
    + bytes.fromhex("75ec")  # jne again
    + bytes.fromhex("c3")  # ret
    + bytes.fromhex("31c0c3")  # none: xor eax, eax; ret
)
_FREE: Final = bytes.fromhex("c3")
_alive: list[tuple[object, ...]] = []


class BumpAllocator:
    """Cursor and limit of one range, and the two functions over them.

    Attributes:
        allocate: address of ``void *(ssize_t size, int device, cudaStream_t stream)``.
        free: address of ``void (void *, ssize_t, int, cudaStream_t)``.

    Raises:
        MappingError: this processor has no such code, or the system forbids making memory executable.
    """

    def __init__(self, start: int, limit: int) -> None:
        if platform.machine() != "x86_64":
            raise MappingError(
                f"torch cannot allocate in named ranges on {platform.machine()}",
                why="the allocator is machine code, written for x86_64 so far",
            )
        self._state = (ctypes.c_uint64 * 2)(start, limit)
        head, tail = _X86_64.split(b"%s")
        code = head + struct.pack("<Q", ctypes.addressof(self._state)) + tail
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._code.write(code + _FREE)
        self._view = (ctypes.c_ubyte * mmap.PAGESIZE).from_buffer(self._code)
        base = ctypes.addressof(self._view)
        if ctypes.CDLL(None, use_errno=True).mprotect(
            ctypes.c_void_p(base), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC
        ):
            raise MappingError(
                "the system forbids executable memory",
                why=f"errno {ctypes.get_errno()}",
                fix="Allow it, or set cudagraph=false.",
            )
        self.allocate, self.free = base, base + len(code)
        # torch calls `free` when it drops its pool, which may be after everything of ours is gone.
        _alive.append((self._state, self._code, self._view))

    @property
    def cursor(self) -> int:
        """First address that was not handed out yet."""
        return int(self._state[0])

    @property
    def limit(self) -> int:
        """First address that is not mapped."""
        return int(self._state[1])

    @limit.setter
    def limit(self, value: int) -> None:
        self._state[1] = value

    def take(self, size: int) -> int:
        """Allocate from Python; 0 where there is no room."""
        kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        return int(kind(self.allocate)(size, 0, None) or 0)
