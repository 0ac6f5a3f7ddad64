"""Which environment variables a template's imports have read: in these a requester must agree with it.

What Python code reads is watched while it is imported, so that the answer is exact, whatever is imported. What native
libraries read when they are loaded cannot be seen and stands in a table.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

NATIVE: tuple[tuple[str, str], ...] = (
    (r"PYTHON(?!BREAKPOINT).*", "the interpreter"),
    (r"LC_.*|LANG", "the interpreter's locale"),
    (r"LD_.*|GLIBC_TUNABLES|MALLOC_.*", "the C library"),
    (r"(OMP|GOMP|KMP)_.*", "the OpenMP runtime"),
    (r"(MKL|OPENBLAS|GOTO|BLIS|DNNL|ONEDNN|ATEN)_.*", "the mathematical libraries"),
    (r"PYTORCH_.*", "torch's allocators"),
    (r"TORCH_(CPP_LOG_LEVEL|SHOW_CPP_STACKTRACES|DISABLE_ADDR2LINE|WARN_ONCE)", "torch's C++ part"),
)
"""Patterns of names, and who reads them when it is loaded."""

VOLATILE = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "TERM", "COLUMNS", "LINES", "SHELL", "LS_COLORS", "WINDOWID"})
"""What differs from one terminal to the next. Some libraries look at these for the width of what they print."""

_PASSED_THROUGH = {"os", "collections.abc", "_collections_abc", __name__}
_native = re.compile("|".join(f"(?P<g{n}>{pattern})" for n, (pattern, _) in enumerate(NATIVE)))


class Reads:
    """Names that were read, each with the module that read it first."""

    def __init__(self) -> None:
        self.by: dict[str, str] = {}
        self._begun: tuple[int, int] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch ``os.environ`` for the length of a block. A copy of the whole, as for a subprocess, is no reading."""
        kind: Any = type(os.environ)
        getitem, iterate = kind.__getitem__, kind.__iter__

        def read(environ: Any, name: str) -> Any:
            frame = sys._getframe(1)
            caller = _behind(frame)
            # Views over everything ask for each name in turn, and so does dict(), from the place that has just begun.
            every = frame.f_code.co_name == "__iter__" or _place(caller) == self._begun
            if caller is not None and not every:
                self.by.setdefault(name, str(caller.f_globals.get("__name__")))
            return getitem(environ, name)

        def begin(environ: Any) -> Any:
            self._begun = _place(_behind(sys._getframe(1)))
            return iterate(environ)

        kind.__getitem__, kind.__iter__ = read, begin
        try:
            yield
        finally:
            kind.__getitem__, kind.__iter__ = getitem, iterate

    def reader(self, name: str) -> str:
        """Who has read a variable, ``""`` if nobody."""
        if name in VOLATILE:
            return ""
        native = _native.fullmatch(name)
        if native is not None:
            return NATIVE[int(str(native.lastgroup)[1:])][1]
        return self.by.get(name, "")

    def differences(self, ours: Mapping[str, str], theirs: Mapping[str, str]) -> dict[str, str]:
        """Variables that were read and whose values differ, by their readers."""
        changed = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        return {name: by for name in sorted(changed) if (by := self.reader(name))}


def _behind(frame: FrameType | None) -> FrameType | None:
    """The frame that asked, behind those of the mapping itself."""
    while frame is not None and frame.f_globals.get("__name__") in _PASSED_THROUGH:
        frame = frame.f_back
    return frame


def _place(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame), frame.f_lasti)
