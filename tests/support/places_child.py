"""An engine in a bad place: another user's, or a full one. Prints one JSON line.

    python -m tests.support.places_child '{"folder": "...", "as": 65534, "full": "...", "options": {...}}'

``as`` is the user it becomes, ``full`` a directory that a file system without room for one file is mounted on, in a
namespace of this process. What cannot be done here is told as ``{"skip": "why"}``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import fer.memory
import fer.weights.keeper
from fer.errors import FerError
from tests.support import recovery_model

_NEW_MOUNTS, _PRIVATE = 0x20000, (1 << 18) | (1 << 14)


def import_all(transformers: bool) -> None:
    """Import what a start would import on its way."""
    packages = [fer.weights, fer.weights.keeper, fer.memory]
    for package in packages:
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    if transformers:
        importlib.import_module("fer.engines.transformers")


def fill(place: str) -> None:
    """Mount a full file system. Raises OSError where this process may not."""
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    checked(libc.unshare(_NEW_MOUNTS))
    checked(libc.mount(None, b"/", None, _PRIVATE, None))
    # The root of the file system is the only inode that it has.
    checked(libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, b"size=4k,nr_inodes=1,mode=0700"))
    try:
        Path(place, "file").touch()
    except OSError:
        return
    raise OSError(0, "a tmpfs takes no notice of nr_inodes here")


def start(asked: dict[str, Any]) -> dict[str, Any]:
    """Recover; what came of it."""
    folder = Path(asked["folder"])
    try:
        if asked.get("transformers"):
            from fer.engines.transformers import TransformersEngine

            TransformersEngine(folder).identity()
        engine = recovery_model.engine(folder)
        told = fer.recover(engine, **asked.get("options", {})).stages["weights"]
    except FerError as error:
        return {"error": error.to_dict()}
    return {
        "path": told.path,
        "why": told.why,
        "details": told.details,
        "answer": recovery_model.answer(engine.module),
    }


def main() -> None:
    asked = json.loads(sys.argv[1])
    row: dict[str, Any] = {}
    try:
        if "full" in asked:
            fill(asked["full"])
        if "as" in asked:
            import_all(bool(asked.get("transformers")))  # the other user may not be able to read this installation
            os.setgroups([])
            os.setgid(asked["as"])
            os.setuid(asked["as"])
    except OSError as error:
        row = {"skip": f"{type(error).__name__}: {error.strerror}"}
    print(json.dumps(row or start(asked), default=str), flush=True)


if __name__ == "__main__":
    main()
