"""The files a template is made of, and whether they are still the same.

Modules, the libraries they have mapped, the interpreter, and what pip writes: the folders that hold distributions, in
which a newly installed package shows, and the RECORD of each. A change makes the template stale.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

_Facts = tuple[int, int, int, int]
_MAPPED = re.compile(r"^\S+ \S+ \S+ \S+ [1-9]\d* +(/.*)$", re.MULTILINE)


def _facts(path: str) -> _Facts | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class Files:
    """Files and how they were when this object was made."""

    def __init__(self, further: Iterable[Path] = ()) -> None:
        names = {*_modules(), *_libraries(), *_distributions(), *map(str, further)}
        self._facts = {name: facts for name in names if (facts := _facts(name)) is not None}

    def __len__(self) -> int:
        return len(self._facts)

    def changed(self) -> str:
        """The first file that is not as it was, ``""`` if all are."""
        return next((name for name, facts in self._facts.items() if _facts(name) != facts), "")


def _modules() -> set[str]:
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    # Some libraries give modules of their own making a name that is no path.
    return {name for name in found if isinstance(name, str) and os.path.isabs(name)}


def _libraries() -> set[str]:
    maps = Path("/proc/self/maps").read_text("utf-8", "surrogateescape")
    found = {path.removesuffix(" (deleted)") for path in _MAPPED.findall(maps)}
    return {path for path in found if not path.startswith(("/dev/", "/memfd:", "/proc/", "/SYSV"))}


def _distributions() -> set[str]:
    found = {sys.executable, str(Path(sys.prefix, "pyvenv.cfg"))}
    for folder in sys.path:
        try:
            records = [str(path) for path in Path(folder).glob("*.dist-info/RECORD")]
        except OSError:
            continue
        found |= {folder, *records} if records else set()
    return found
