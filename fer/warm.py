"""Tokenizers and configurations that a launcher's template has made ahead, for the engines forked from it.

A plain dictionary in the process's memory, filled before a fork and read after it. What is asked for is given only if
every file that it was made of is unchanged: by inode, size and times, else by its digest. Standard library only.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["tokenizer", "config"]
LARGEST = 256 << 20
"""Bytes of a file that still counts as a tokenizer's or a configuration's. Weights are larger or named so."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_Facts = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class _File:
    facts: _Facts
    digest: str


@dataclass
class _Entry:
    files: dict[str, _File]
    value: Any


_template: list[Callable[[], str]] = []
_held: dict[tuple[Kind, str], _Entry] = {}


def watch(changed: Callable[[], str]) -> None:
    """In a template: what tells the first of its files that is not as it was, ``""`` for none."""
    _template[:] = [changed]


def stale() -> str:
    """In a launcher's engines: the first file that its template was made of and that has changed, ``""`` for none."""
    return _template[0]() if _template else ""


def hold(kind: Kind, folder: Path, make: Callable[[], Any]) -> None:
    """Make something of a folder's files and hold it for later processes.

    Raises:
        OSError: a file cannot be read.
        Exception: whatever ``make`` raises; nothing is held then.
    """
    before = _files(folder)
    value = make()
    _held[kind, str(folder)] = _Entry(
        {name: _File(facts, _digest(folder / name)) for name, facts in before.items()}, value
    )
    if _files(folder) != before:  # written to meanwhile: nobody knows which state was read
        del _held[kind, str(folder)]


def take(kind: Kind, folder: Path) -> Any | None:
    """What is held of a resolved folder, for the caller to own; None where nothing is, or its files have changed.

    A configuration is copied and can be taken again. A tokenizer is given once: the next caller makes its own.
    """
    entry = _held.get((kind, str(folder)))
    if entry is None or not _unchanged(folder, entry.files):
        return None
    if kind == "tokenizer":
        return _held.pop((kind, str(folder))).value
    return copy.deepcopy(entry.value)


def folders() -> list[str]:
    """Folders of which something is held."""
    return sorted({folder for _, folder in _held})


def files() -> list[Path]:
    """Every file that something held was made of."""
    return sorted({Path(folder, name) for (_, folder), entry in _held.items() for name in entry.files})


def forget() -> None:
    """Hold nothing any more."""
    _held.clear()


def _unchanged(folder: Path, known: dict[str, _File]) -> bool:
    try:
        found = _files(folder)
        return found.keys() == known.keys() and all(
            facts == known[name].facts or _digest(folder / name) == known[name].digest for name, facts in found.items()
        )
    except OSError:
        return False


def _files(folder: Path) -> dict[str, _Facts]:
    """Everything in a folder that may have a part in its tokenizer or configuration."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file() or entry.name.endswith(_WEIGHTS):
                continue
            facts = entry.stat()
            if facts.st_size <= LARGEST:
                found[entry.name] = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    return found


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
