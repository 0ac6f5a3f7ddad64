"""The header of an ELF file: whether the file is whole, and what runs it."""

from __future__ import annotations

import struct
from typing import Final

MAGIC: Final = b"\x7fELF"
CUDA, AMDGPU = 190, 224
"""``e_machine`` of device binaries; anything else is code of a host."""

_HEADER: Final = struct.Struct("<16sHHIQQQIHHHHHH")  # ELF64


def machine(data: bytes) -> int:
    """``e_machine``; 0 for bytes that are no 64-bit ELF file."""
    if len(data) < _HEADER.size or not data.startswith(MAGIC) or data[4] != 2:
        return 0
    return int(_HEADER.unpack_from(data)[2])


def damage(data: bytes) -> str:
    """Why these bytes are no whole ELF file, ``""`` where they are one as far as its headers say."""
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        return "it is no ELF file"
    if data[4] != 2:
        return "it is no 64-bit ELF file"
    fields = _HEADER.unpack_from(data)
    programs, sections = fields[5], fields[6]
    program_size, program_count, section_size, section_count = fields[9:13]
    end = max(programs + program_size * program_count, sections + section_size * section_count)
    return f"it ends at {len(data)} of at least {end} bytes" if end > len(data) else ""
