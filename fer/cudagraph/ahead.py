"""Archives read by a process that waits to be started, before it knows which of them its start will use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fer.cudagraph import archive as archives
from fer.cudagraph import store
from fer.cudagraph.archive import Archive
from fer.errors import FerError
from fer.paths import check_private

if TYPE_CHECKING:
    from fer.engines.base import Engine

MOST: Final = 8
"""Archives of one model that are read, the newest first: a host has one for each of its GPUs."""

_read: dict[str, Archive] = {}


def read(engine: Engine, home: Path | None) -> None:
    """Read the archives of an engine's model. What is wrong with one is told by a start that wants it."""
    identity = engine.identity()
    wanted = (identity.engine, os.path.abspath(identity.model) if os.path.exists(identity.model) else identity.model)
    with suppress(FerError, OSError):
        check_private(store.folder(home))
        for path in sorted(store.find(home), key=lambda path: path.stat().st_mtime, reverse=True):
            with suppress(FerError, KeyError, TypeError, ValueError):
                facts, digest = archives.facts_of(path)
                group = facts["fingerprint"]["group"]
                if (group["engine"]["name"], group["model"]) == wanted and len(_read) < MOST:
                    _read[digest] = archives.read(path)


def take(path: Path, digest: str) -> Archive:
    """The archive at ``path``, whose directory has this digest: read ahead, or now. The others are let go of.

    Raises:
        ArchiveError: as :func:`fer.cudagraph.archive.read`.
    """
    found = _read.get(digest)
    _read.clear()
    return found if found is not None else archives.read(path)
