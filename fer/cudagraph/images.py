"""Binaries as bytes: how long an image is that a library hands over by address, which kernels and globals it holds."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import Final, Literal

ELF: Final = b"\x7fELF"
FATBIN: Final = 0xBA55ED50
WRAPPER: Final = 0x466243B1
_MAX_IMAGE: Final = 4 << 30

SHT_NOBITS: Final = 8
SHT_SYMTAB: Final = 2
STT_OBJECT: Final = 1


@dataclass(frozen=True)
class Loaded:
    """An image as it was handed to the driver.

    Attributes:
        kind: ``elf`` (a cubin), ``fatbin`` (several of them, one of which the driver chose), ``text`` (PTX), or
            ``unknown``.
        address, size: where it lay; only of a ``fatbin`` behind a wrapper, which lies in a library, is that still so.
        data: a copy of it, where it had to be copied at once; empty otherwise.
    """

    kind: Literal["elf", "fatbin", "text", "unknown"]
    address: int = 0
    size: int = 0
    data: bytes = b""


@dataclass(frozen=True)
class Global:
    """One variable of a module: symbol, size in bytes, initial value, whether only this binary knows its name."""

    name: str
    size: int
    initial: bytes
    local: bool
    section: str


@dataclass(frozen=True)
class _Section:
    name: int
    kind: int
    offset: int
    size: int
    link: int
    entry: int


def look(address: int) -> Loaded:
    """Recognise an image in this process's memory and copy it where it may go away."""
    magic = ctypes.c_uint32.from_address(address).value
    wrapped = magic == WRAPPER
    if wrapped:
        address = ctypes.c_uint64.from_address(address + 8).value
        magic = ctypes.c_uint32.from_address(address).value
    if magic == FATBIN:
        header = ctypes.c_uint16.from_address(address + 6).value
        size = header + ctypes.c_uint64.from_address(address + 8).value
        if size > _MAX_IMAGE:
            return Loaded("unknown")
        return Loaded("fatbin", address, size, b"" if wrapped else ctypes.string_at(address, size))
    head = ctypes.string_at(address, 4)
    if head == ELF:
        size = elf_size(ctypes.string_at(address, 64))
        return Loaded("elf", address, size, ctypes.string_at(address, size))
    if head[:2] in (b"//", b"\n/") or head.startswith(b".ver"):
        return Loaded("text")
    return Loaded("unknown")


def elf_size(header: bytes) -> int:
    """Length of a 64-bit ELF file from its header: cubins end with one of their two tables."""
    phoff, shoff = struct.unpack_from("<QQ", header, 0x20)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", header, 0x36)
    return int(max(shoff + shentsize * shnum, phoff + phentsize * phnum, len(header)))


def kernels_in(image: bytes | memoryview) -> list[str]:
    """Names of the kernels and device functions in a cubin; none for anything else."""
    return [name[6:] for name, _ in _named(bytes(image)) if name.startswith(".text.")]


def globals_in(image: bytes | memoryview) -> list[Global]:
    """Variables of a cubin: ``__device__`` and ``__constant__`` ones, not kernels' parameters and literals."""
    data = bytes(image)
    named = _named(data)
    found = []
    for _, table in named:
        if table.kind != SHT_SYMTAB or not table.entry:
            continue
        strings = named[table.link][1]
        for at in range(table.offset, table.offset + table.size, table.entry):
            name, info, _, index, value, size = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 != STT_OBJECT or not size or not 0 < index < len(named):
                continue
            section, place = named[index]
            if not section.startswith((".nv.global", ".nv.constant3")):
                continue
            text = _string(data, strings.offset + name)
            start = place.offset + value
            initial = bytes(size) if place.kind == SHT_NOBITS else data[start : start + size]
            found.append(Global(text, size, initial, info >> 4 == 0, section))
    return found


def _named(data: bytes) -> list[tuple[str, _Section]]:
    """Sections with their names, in order; none for what is no 64-bit ELF file."""
    if data[:4] != ELF or len(data) < 64:
        return []
    (shoff,) = struct.unpack_from("<Q", data, 0x28)
    entry, count, names = struct.unpack_from("<HHH", data, 0x3A)
    if shoff + entry * count > len(data) or names >= count:
        return []
    sections = []
    for at in range(shoff, shoff + entry * count, entry):
        name, kind, _, _, offset, size, link, _, _, each = struct.unpack_from("<IIQQQQIIQQ", data, at)
        sections.append(_Section(name, kind, offset, size, link, each))
    base = sections[names].offset
    return [(_string(data, base + section.name), section) for section in sections]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode(errors="replace")
