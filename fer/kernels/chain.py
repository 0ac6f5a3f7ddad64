"""The user's own cache manager, behind FER's: asked where FER's cache has nothing, and given what was compiled.

``TRITON_CACHE_MANAGER`` of the user moves to :data:`VARIABLE`, which child processes inherit too. The class is looked
for when the first kernel is, as Triton would. Whatever it does, a start goes on: at its first exception it is left out
for the rest of the process, and named. What it returns is verified before a kernel is made of it.

What it stores is its own: FER neither changes, nor moves away, nor lists a file that it has put, also where both use
the same folder and it keeps files in a form of its own there.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

VARIABLE: Final = "FER_KERNELS_NEXT_MANAGER"
log = logging.getLogger("fer")

_classes: dict[str, Any] = {}
_left_out: dict[str, str] = {}


def trouble(environ: Mapping[str, str] | None = None) -> str:
    """Why the user's manager is left out in this process, ``""`` where it is not or there is none."""
    return _left_out.get((os.environ if environ is None else environ).get(VARIABLE, ""), "")


def behind(key: str) -> Next | None:
    """The user's manager for one entry; None where there is none, or it was left out."""
    name = os.environ.get(VARIABLE, "")
    if not name or name in _left_out:
        return None
    try:
        if name not in _classes:
            _classes[name] = _load(name)
        return Next(name, _classes[name](key))
    except Exception as error:  # the user's code: whatever it is, kernels can be had without it
        _leave_out(name, error)
        return None


def _load(name: str) -> Any:
    """The class, by Triton's own rules."""
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise TypeError("it is not of the form MODULE:CLASS")
    found = getattr(importlib.import_module(module), attribute)
    if not any(each.__name__ == "CacheManager" for each in found.mro()):
        raise TypeError("it is no CacheManager")
    if found.__module__ == "fer.kernels.manager":
        raise TypeError("it is FER's own, which would stand behind itself")
    return found


def _leave_out(name: str, error: Exception) -> None:
    if name not in _left_out:
        _left_out[name] = f"{name} failed and is left out: {type(error).__name__}: {error}"
        log.warning("the cache manager %s; kernels are looked up and stored without it", _left_out[name])


class Next:
    """The user's manager of one entry. No method raises: None stands for nothing, and for a failure."""

    def __init__(self, name: str, manager: Any) -> None:
        self.name, self._manager = name, manager
        self._paths: dict[str, str] = {}

    def _call(self, method: str, *arguments: Any) -> Any:
        if self.name in _left_out:
            return None
        try:
            return getattr(self._manager, method)(*arguments)
        except Exception as error:  # as above
            _leave_out(self.name, error)
            return None

    def get_file(self, filename: str) -> str | None:
        """Path of a file."""
        path = self._call("get_file", filename)
        return path if isinstance(path, str) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of a group's files, by name."""
        group = self._call("get_group", filename)
        if not isinstance(group, dict):
            return None
        return group if all(isinstance(text, str) for pair in group.items() for text in pair) else None

    def put(self, data: Any, filename: str, binary: bool) -> str | None:
        """Give it a file; where it is now."""
        path = self._call("put", data, filename, binary)
        if not isinstance(path, str):
            return None
        self._paths[filename] = path
        return path

    def put_group(self, filename: str, group: Mapping[str, str]) -> None:
        """Tell it that a group is complete; with its own paths, as if it were alone."""
        self._call("put_group", filename, {name: self._paths.get(name, path) for name, path in group.items()})
