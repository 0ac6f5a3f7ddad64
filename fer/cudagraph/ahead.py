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
        for path in sorted(store.find(home), key=_age):
            with suppress(FerError, KeyError, TypeError, ValueError):
                group = archives.facts_of(path)[0]["fingerprint"]["group"]
                if (group["engine"]["name"], group["model"]) == wanted and len(_read) < MOST:
                    archive = archives.read(path)
                    _read[archive.digest] = archive


def take(path: Path, digest: str) -> Archive:
    """The archive at ``path``, whose directory has this digest: read ahead, or now.

    Raises:
        ArchiveError: as :func:`fer.cudagraph.archive.read`.
    """
    return _read.get(digest) or archives.read(path)


def forget() -> None:
    """Let go of what was read: the start has what it wants of that."""
    _read.clear()


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # it is being replaced
        return 0.0
