"""An allocator torch can call without Python's lock: a bump pointer in a few bytes of machine code.

torch calls a pluggable allocator while it holds its own lock. A callback written in Python waits for Python's lock
there, and another thread that holds Python's lock and frees a tensor waits for torch's: both wait for ever. So what
torch calls is not Python: some 60 bytes that move a cursor to the end of memory that FER mapped beforehand, and answer
null when that is used up. The other function torch needs, for freeing, does nothing; ranges are given back whole.
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
_X86_64_FREE: Final = bytes.fromhex("c3")  # ret

_AARCH64: Final = (
    bytes.fromhex("ea03a0d2")  # movz x10, #0x1f, lsl #16
    + bytes.fromhex("eaff9ff2")  # movk x10, #0xffff
    + bytes.fromhex("09000a8b")  # add x9, x0, x10
    + bytes.fromhex("29012a8a")  # bic x9, x9, x10
    + bytes.fromhex("8a010058")  # ldr x10, state
    + bytes.fromhex("40fd5fc8")  # again: ldaxr x0, [x10]
    + bytes.fromhex("0b00098b")  # add x11, x0, x9
    + bytes.fromhex("4c0540f9")  # ldr x12, [x10, #8]
    + bytes.fromhex("7f010ceb")  # cmp x11, x12
    + bytes.fromhex("88000054")  # b.hi none
    + bytes.fromhex("4bfd0dc8")  # stlxr w13, x11, [x10]
    + bytes.fromhex("4dffff35")  # cbnz w13, again
    + bytes.fromhex("c0035fd6")  # ret
    + bytes.fromhex("5f3f03d5")  # none: clrex
    + bytes.fromhex("000080d2")  # mov x0, #0
    + bytes.fromhex("c0035fd6")  # ret
    + b"%s"  # state: .quad
)
_AARCH64_FREE: Final = bytes.fromhex("c0035fd6")  # ret

_CODE: Final = {"x86_64": (_X86_64, _X86_64_FREE), "aarch64": (_AARCH64, _AARCH64_FREE)}
_alive: list[tuple[object, ...]] = []


def code_for(machine: str, state: int) -> tuple[bytes, int]:
    """The two functions for a processor, over the two words at ``state``; and where the second one begins.

    Raises:
        MappingError: this processor has no such code.
    """
    if machine not in _CODE:
        raise MappingError(
            f"torch cannot allocate in named ranges on {machine}",
            why=f"the allocator is machine code, written for {' and '.join(_CODE)}",
        )
    allocate, free = _CODE[machine]
    head, tail = allocate.split(b"%s")
    code = head + struct.pack("<Q", state) + tail
    return code + free, len(code)


class BumpAllocator:
    """Cursor and limit of one range, and the two functions over them.

    Attributes:
        allocate: address of ``void *(ssize_t size, int device, cudaStream_t stream)``.
        free: address of ``void (void *, ssize_t, int, cudaStream_t)``.

    Raises:
        MappingError: this processor has no such code, or the system forbids making memory executable.
    """

    def __init__(self, start: int, limit: int) -> None:
        self._state = (ctypes.c_uint64 * 2)(start, limit)
        code, free = code_for(platform.machine(), ctypes.addressof(self._state))
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self._code.write(code)
        self._view = (ctypes.c_ubyte * mmap.PAGESIZE).from_buffer(self._code)
        base = ctypes.addressof(self._view)
        # Linux brings the instruction cache up to date for a page that becomes executable for the first time.
        if ctypes.CDLL(None, use_errno=True).mprotect(
            ctypes.c_void_p(base), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC
        ):
            raise MappingError(
                "the system forbids executable memory",
                why=f"errno {ctypes.get_errno()}",
                fix="Allow it, or set cudagraph=false.",
            )
        self.allocate, self.free = base, base + free
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
