"""Completion markers: a sweep of warm-ups that an engine would repeat on a warm cache has been done.

DeepGEMM's cache holds every kernel after one start, and engines walk through all shapes again, because nothing says
that the walk came to its end. A marker says so, for exactly one engine, model, layout, GPU and range of shapes; it is
written after the last shape and never before, and it names the entries the walk left, so that it is worth nothing
without them.

::

    marker = Marker(engine="sglang 0.5.23", model=digest, tp=8, arch="90a", sweep="deepgemm", first=1, last=16384)
    if not markers.done(marker, root):
        warm_up_all_shapes()
        markers.write(marker, root)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fer.kernels import entry, store
from fer.kernels.registry import REGISTRY
from fer.paths import ensure_private


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What exactly was completed.

    Attributes:
        engine: name and version.
        model: digest of the model's configuration.
        tp: size of the tensor-parallel group.
        arch: GPU architecture with its suffix, such as ``"90a"``.
        sweep: which warm-up.
        first, last: range of shapes that was walked, both included.
        component: the cache that the walk filled.
    """

    engine: str
    model: str
    tp: int
    arch: str
    sweep: str
    first: int
    last: int
    component: str = "deepgemm"

    @property
    def name(self) -> str:
        """The marker's file: everything but the range, so that a wider range can replace a narrower one."""
        fixed = {key: value for key, value in asdict(self).items() if key not in ("first", "last")}
        text = json.dumps(fixed, sort_keys=True)
        return f"{self.sweep}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def folder(home: Path | None = None) -> Path:
    """Where markers lie."""
    return store.folder(home) / "markers"


def write(marker: Marker, root: Path, *, home: Path | None = None) -> Path:
    """Say that a walk came to its end; call it after full success, on one rank.

    Args:
        root: the component's cache, whose complete entries the marker names.

    Raises:
        OSError, PeerRefused: it cannot be written, or the folder is not private.
    """
    place = folder(home)
    ensure_private(store.folder(home))
    ensure_private(place)
    entries = sorted(found.path for found in REGISTRY[marker.component].complete(root, lambda path: True))
    data = {"schema": 1, **asdict(marker), "entries": entries}
    return Path(entry.write(str(place), marker.name, json.dumps(data, sort_keys=True).encode()))


def done(marker: Marker, root: Path, *, home: Path | None = None) -> bool:
    """Whether the walk can be left out: it was completed for this range or a wider one, and its kernels are there."""
    return not why_not(marker, root, home=home)


def why_not(marker: Marker, root: Path, *, home: Path | None = None) -> str:
    """Why a walk has to be done, ``""`` where it has been."""
    known = _load(folder(home) / marker.name)
    if known is None:
        return "no completed walk of this engine, model, layout and GPU is known"
    fixed = {key: value for key, value in asdict(marker).items() if key not in ("first", "last")}
    if any(known.get(key) != value for key, value in fixed.items()):
        return "the marker is for something else"
    first, last, entries = known.get("first"), known.get("last"), known.get("entries")
    if not (isinstance(first, int) and isinstance(last, int) and isinstance(entries, list)):
        return "the marker cannot be read"
    if not (first <= marker.first and marker.last <= last):
        return f"the walk was for {first} to {last}, not for {marker.first} to {marker.last}"
    there = {found.path for found in REGISTRY[marker.component].complete(root, lambda path: path in set(entries))}
    missing = [path for path in entries if path not in there]
    if missing:
        return f"{len(missing)} of its {len(entries)} kernels are missing: {missing[0]}"
    return "" if entries else "the walk left no kernels"


def _load(path: Path) -> Mapping[str, Any] | None:
    try:
        data = json.loads(entry.read(os.fspath(path)))
    except (entry.Odd, ValueError):
        return None
    return data if isinstance(data, dict) and data.get("schema") == 1 else None
