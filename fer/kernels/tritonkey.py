"""Triton's key of itself, remembered on disk.

``triton_key()`` hashes the sources of the compiler and the whole of ``libtriton.so``, 0.5 GB, once in every process
that needs a kernel. The answer is the same as long as the files are: it is kept by path, size, times and inode of every
file that could be hashed. Files that changed while they were hashed, or a moment before, are hashed again next time,
since a file system's clock is coarser than a writer's second thought.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from fer.errors import FerError
from fer.paths import check_private, ensure_private
from fer.paths import home as default_home

SCHEMA: Final = 1
_SETTLED_NS: Final = 2_000_000_000
_SUFFIXES: Final = (".py", ".so", ".pyd")
_HASHED: Final = ("_C", "runtime", "compiler", "backends", "language")
"""Folders of the package that hold what some version of Triton hashes: more than any one does."""


def stamp(package: Path) -> list[list[Any]]:
    """Path, size, times and inode of every file that may be part of the key, in order of path.

    Raises:
        OSError: a file vanished meanwhile.
    """
    found: list[list[Any]] = []
    for path in sorted(_files(package)):
        facts = os.stat(path)
        # The change time too: nobody can set it back.
        found.append([path, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino, facts.st_dev])
    return found


def memoised(package: Path, compute: Callable[[], str], *, home: Path | None = None) -> str:
    """``compute()``, or what it gave for these very files before.

    Never fails for want of the memo: without one that can be read or written the key is computed.

    Args:
        package: Triton's folder.
        compute: Triton's own ``triton_key``.
        home: FER's folder.
    """
    try:
        before = stamp(package)
    except OSError:
        return compute()
    place = path_for(package, home)
    if found := _load(place, before):
        return found
    started = time.time_ns()
    key = compute()
    with contextlib.suppress(OSError, FerError):
        newest = max(max(each[2], each[3]) for each in before)
        if stamp(package) == before and newest + _SETTLED_NS < started:
            _save(place, before, key)
    return key


def known(package: Path, *, home: Path | None = None) -> str:
    """The key of these very files if it is remembered, else ``""``; hashes nothing and imports no Triton."""
    try:
        return _load(path_for(package, home), stamp(package))
    except OSError:
        return ""


def path_for(package: Path, home: Path | None = None) -> Path:
    """Where the memo of one installation lies."""
    name = hashlib.sha256(os.fsencode(os.path.realpath(package))).hexdigest()[:16]
    return (home or default_home()) / "kernels" / f"triton-key-{name}.json"


def _files(package: Path) -> Iterator[str]:
    """Sources and libraries, through links (as an editable installation has), each folder once."""
    seen: set[tuple[int, int]] = set()
    for top in _HASHED:
        todo = [os.path.join(package, top)]
        while todo:
            folder = todo.pop()
            with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
                for each in found:
                    if each.name == "__pycache__":
                        continue
                    if each.name.endswith(_SUFFIXES):
                        yield each.path
                    elif each.is_dir():
                        facts = os.stat(each.path)
                        if (facts.st_dev, facts.st_ino) not in seen:
                            seen.add((facts.st_dev, facts.st_ino))
                            todo.append(each.path)


def _load(place: Path, stamped: list[list[Any]]) -> str:
    try:
        check_private(place.parent)  # whoever writes the memo chooses which kernels are found
        data = json.loads(place.read_bytes())
        key = data["key"]
        if data["schema"] == SCHEMA and data["files"] == stamped and data["sum"] == _sum(key, stamped):
            return str(key)
    except (OSError, FerError, ValueError, KeyError, TypeError, RecursionError):
        pass  # as if there were none
    return ""


def _save(place: Path, stamped: list[list[Any]], key: str) -> None:
    from fer.kernels.entry import write

    ensure_private(place.parent)
    data = {"schema": SCHEMA, "key": key, "files": stamped, "sum": _sum(key, stamped)}
    write(str(place.parent), place.name, json.dumps(data).encode())


def _sum(key: str, stamped: list[list[Any]]) -> str:
    """A changed bit in the memo must not become another key."""
    return hashlib.sha256(json.dumps([key, stamped]).encode()).hexdigest()
