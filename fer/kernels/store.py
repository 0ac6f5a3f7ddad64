"""Where archives and records of starts lie, and what is removed from a cache."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fer.errors import FerError
from fer.kernels import coverage, entry
from fer.paths import home as default_home

SUFFIX: Final = ".ferkernels"
KEPT_STARTS: Final = 8
_SETTLED_S: Final = 3600.0
"""An entry that changed within this time may be under way, and is never removed."""

_GONE: Final = ".fer-gone."


def folder(home: Path | None = None) -> Path:
    """The folder of archives, records and the memo of Triton's key."""
    return (home or default_home()) / "kernels"


def prefix_for(engine: str, model: str) -> str:
    """Beginning of the names of one engine's archives of one model; every rank of a launch shares them."""
    return hashlib.sha256(f"{engine}\0{model}".encode()).hexdigest()[:24]


def path_for(home: Path | None, prefix: str, arch: str) -> Path:
    """Where an archive lies; there is one for each kind of GPU, so that machines with one home do not take turns."""
    return folder(home) / f"{prefix}.{arch}{SUFFIX}"


def of_prefix(home: Path | None, prefix: str) -> dict[str, Path]:
    """Archives of one engine and model by architecture."""
    found = folder(home).glob(f"{prefix}.*{SUFFIX}")
    return {path.name.removesuffix(SUFFIX).rpartition(".")[2]: path for path in sorted(found)}


def archives(home: Path | None = None) -> list[Path]:
    """All archives, by name."""
    return sorted(folder(home).glob(f"*{SUFFIX}"))


def starts(home: Path | None = None) -> list[Path]:
    """Folders with the records of past starts, the oldest first."""
    return sorted((folder(home) / "starts").glob("*"), key=lambda path: path.name)


def new_start(home: Path | None = None) -> Path:
    """A private folder for the records of a start that begins now; the oldest ones go.

    Raises:
        OSError: it cannot be made.
        PeerRefused: what is there is not private.
    """
    from fer.paths import ensure_private

    ensure_private(folder(home))
    ensure_private(folder(home) / "starts")
    made = folder(home) / "starts" / f"{time.time_ns():020d}-{os.getpid()}"
    made.mkdir(mode=0o700)
    for old in starts(home)[:-KEPT_STARTS]:
        shutil.rmtree(old, ignore_errors=True)
    return made


@dataclass(frozen=True)
class Removed:
    """One entry that was removed, or would be."""

    path: Path
    bytes: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is removed from a cache.

    Attributes:
        older_than_s: seconds since an entry was written.
        most_bytes: what the cache may hold; the oldest entries go first.
        version: entries of other versions of Triton go.
        damaged: entries that a lookup would refuse go.
    """

    older_than_s: float | None = None
    most_bytes: int | None = None
    version: str = ""
    damaged: bool = False
    dry_run: bool = False


def prune_cache(root: Path, rules: Rules, *, home: Path | None = None) -> list[Removed]:
    """Remove entries from Triton's cache. Never one that is being written, or that one of the last starts looked up."""
    from fer.kernels import unpack

    used = {record.key for start in starts(home) for record in coverage.read(start)}
    found: list[tuple[float, int, Path | None]] = []
    gone: list[Removed] = []
    now = time.time()
    for each in entry.entries_in(str(root)):
        written = _written(Path(each.path))
        size = _size(Path(each.path))
        if each.name in used or now - written < _SETTLED_S:
            found.append((written, size, None))
            continue
        why = _why_remove(Path(each.path), rules, now - written)
        if why:
            gone.append(Removed(Path(each.path), size, why))
        else:
            found.append((written, size, Path(each.path)))
    if rules.most_bytes is not None:
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found, key=lambda each: each[0]):
            if total > rules.most_bytes and path is not None:
                gone.append(Removed(path, size, "the cache is larger than it may be"))
                total -= size
    if not rules.dry_run:
        for removed in gone:
            _remove(removed.path)
        unpack.tidy(root)
        _remove_old(root, now)
    return gone


def prune_archives(home: Path | None = None, *, everything: bool = False, dry_run: bool = False) -> list[Removed]:
    """Remove archives that cannot be read, or all; and what killed writers left, once it is an hour old."""
    from fer.kernels import unpack

    gone = []
    for path in archives(home):
        why = "all are to go" if everything else ""
        if not why:
            try:
                unpack.verify(path)
            except FerError as error:
                why = str(error)
        if why:
            gone.append(Removed(path, path.stat().st_size, why))
    for path in folder(home).glob(f".*{SUFFIX}.*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _SETTLED_S:
                gone.append(Removed(path, path.stat().st_size, "a killed writer left it"))
    if not dry_run:
        for removed in gone:
            removed.path.unlink(missing_ok=True)
    return gone


def damage(root: Path, only: Collection[str] = ()) -> dict[str, str]:
    """Entries of a cache that a lookup would refuse, with the reason. Reads every byte."""
    return {
        each.name: why
        for each in sorted(entry.entries_in(str(root)), key=lambda found: found.name)
        if (not only or each.name in only) and (why := damage_of(each.path))
    }


def damage_of(folder: str) -> str:
    """Why a lookup would refuse an entry, ``""`` for one that is sound or empty."""
    from fer.kernels.components import verified

    try:
        for metadata in entry.groups_in(folder):
            verified(folder, entry.group_names(folder, metadata) or [], metadata)
        for name in entry.loose_in(folder):
            verified(folder, [name], "", name)
    except entry.Odd as odd:
        return str(odd)
    return ""


def _why_remove(path: Path, rules: Rules, age: float) -> str:
    if rules.older_than_s is not None and age > rules.older_than_s:
        return "it is older than wanted"
    if rules.version:
        version = _version(str(path))
        if version and version != rules.version:
            return f"it was compiled by Triton {version}"
    return damage_of(str(path)) if rules.damaged else ""


def _version(path: str) -> str:
    import json

    for metadata in entry.groups_in(path):
        with contextlib.suppress(entry.Odd, ValueError, AttributeError):
            return str(json.loads(entry.read(os.path.join(path, metadata))).get("triton_version", ""))
    return ""


def _written(path: Path) -> float:
    """When the newest of an entry's files was written."""
    times = [path.stat().st_mtime]
    with contextlib.suppress(OSError):
        times += [each.stat().st_mtime for each in path.iterdir()]
    return max(times)


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(each.stat().st_size for each in path.iterdir())
    return 0


def _remove(path: Path) -> None:
    """Renamed first: a reader sees the whole entry or none."""
    gone = path.with_name(f"{_GONE}{secrets.token_hex(6)}")
    with contextlib.suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _remove_old(root: Path, now: float) -> None:
    """What an interrupted removal left, and quarantined entries a week after they were found."""
    for path in [*root.glob(f"{_GONE}*"), *(root / entry.QUARANTINE).glob("*")]:
        with contextlib.suppress(OSError):
            if path.name.startswith(_GONE) or now - path.stat().st_mtime > 7 * 86400:
                shutil.rmtree(path, ignore_errors=True)
