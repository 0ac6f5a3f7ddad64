"""What in a cache is code of the host: it would run in the process that loads it, so it has to be trusted first.

Binaries for a GPU and texts that a GPU's compiler reads are data to this process. Everything else (shared objects,
Python files, pickles, build files) is taken from an archive only where somebody said that its maker is trusted. Names
are judged by a list of what is known to be harmless, and contents must be what the name says.
"""

from __future__ import annotations

from typing import Final

from fer.kernels import elf

_DEVICE: Final = {"cubin": elf.CUDA, "hsaco": elf.AMDGPU}
_TEXT: Final = frozenset({"source", "ttir", "ttgir", "llir", "ptx", "amdgcn", "glir", "json", "txt", "cu"})


def code_in(name: str, data: bytes) -> str:
    """Why a file is code of the host, or may be; ``""`` for data and device code."""
    extension = name.rpartition(".")[2]
    if extension in _DEVICE:
        return "" if elf.machine(data) == _DEVICE[extension] else f"{name} is no binary of a GPU"
    if extension not in _TEXT:
        return f"{name} is code of the host, or may be"
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return f"{name} is no text"
    return f"{name} is no text" if "\0" in text else ""
