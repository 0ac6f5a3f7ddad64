"""Where archives lie, and what can be said of all of them without a GPU."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fer.cudagraph import archive as archives
from fer.cudagraph import sections, state
from fer.errors import ArchiveError
from fer.paths import home as default_home


def folder(home: Path | None = None) -> Path:
    """The folder of archives."""
    return (home or default_home()) / "graphs"


def path_for(home: Path | None, *, model: str, rank: str, device: str, place: int) -> Path:
    """Where the archive of one model on one kind of GPU lies; what must match beyond that stands in the archive.

    Args:
        model: the engine's name of the model, with the engine.
        rank: the rank's coordinates.
        device: the GPU's name.
        place: the GPU's place in the arena, which decides the addresses.
    """
    text = "\0".join((model, rank, device, str(place)))
    return folder(home) / (hashlib.sha256(text.encode()).hexdigest()[:24] + archives.SUFFIX)


@dataclass
class Listed:
    """One archive as the command line shows it; ``trouble`` says why it cannot be used, ``""`` if it can."""

    path: Path
    bytes: int
    trouble: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    proof: str = ""
    why: str = ""
    quarantined: Mapping[str, str] = field(default_factory=dict)


def find(home: Path | None = None) -> list[Path]:
    """All archives, by name."""
    return sorted(folder(home).glob(f"*{archives.SUFFIX}"))


def look(path: Path) -> Listed:
    """What an archive says of itself, without its tables; damage is part of the answer."""
    size = path.stat().st_size if path.exists() else 0
    try:
        facts, digest = archives.facts_of(path)
    except (ArchiveError, ValueError) as error:
        return Listed(path, size, trouble=str(error))
    known = state.load(path, digest)
    return Listed(path, size, facts=facts, proof=known.proof, why=known.why, quarantined=known.quarantined)


def damage(path: Path) -> list[str]:
    """Names of damaged parts of an archive, ``[]`` for a sound one. Reads all of it, every binary's digest too."""
    try:
        found = sections.Sections(path).verify()
        if found:
            return found
        archive = archives.read(path)
        for number, image in enumerate(archive.tables.images):
            try:
                archives.check_image(image)
            except ArchiveError:
                found.append(f"binary {number}")
        for name, wanted in archive.facts.get("digests", {}).items():
            if archive.tables.digest(archive.graph(name)) != wanted:
                found.append(f"graph {name}")
    except ArchiveError as error:
        return [str(error.fields.get("section", "file"))]
    except KeyError:
        return ["graphs"]
    return found


def prune(home: Path | None = None, *, everything: bool = False, older_than_s: float | None = None) -> list[Path]:
    """Remove archives that cannot be used: damaged ones, those whose proof failed; on demand old ones, or all.

    Files that a killed writer left behind go too, once they are an hour old.
    """
    gone = []
    now = time.time()
    for path in find(home):
        listed = look(path)
        old = older_than_s is not None and now - path.stat().st_mtime > older_than_s
        if everything or old or listed.trouble or listed.proof == "failed":
            path.unlink(missing_ok=True)
            state.beside(path).unlink(missing_ok=True)
            gone.append(path)
    for path in folder(home).glob(f".*{archives.SUFFIX}*"):
        if everything or now - path.stat().st_mtime > 3600:
            path.unlink(missing_ok=True)
            gone.append(path)
    return gone
