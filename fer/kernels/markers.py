"""Completion markers: a sweep of warm-ups that an engine would repeat on a warm cache has been done.

DeepGEMM's cache holds every kernel after one start, and engines walk through all shapes again, because nothing says
that the walk came to its end. A marker says so, for exactly one engine, model, layout, GPU and range of shapes; it is
written after the last shape and never before, and it names the entries the walk left, so that it is worth nothing
without them. Markers go into archives with the kernels they speak of.

An engine's plug-in puts its sweep into one call, on every rank::

    marker = Marker(engine="sglang 0.5.23", model=digest, tp=8, arch="90a", sweep="deepgemm", first=1, last=16384)
    why = markers.walk(marker, warm_up_all_shapes, agree=all_ranks_say)

Adapters of FER's own have :func:`of_engine` for the marker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fer.errors import FerError
from fer.kernels import coverage, entry, gpus, store
from fer.kernels.registry import MARKER, REGISTRY
from fer.paths import ensure_private

if TYPE_CHECKING:
    from fer.engines.base import EngineIdentity

log = logging.getLogger("fer")
_RANGE: Final = ("first", "last")


@dataclass(frozen=True, kw_only=True)
class Marker:
    """What exactly was completed.

    Attributes:
        engine: name and version.
        model: digest of the model's configuration.
        tp: size of the tensor-parallel group.
        arch: GPU architecture with its suffix, such as ``"90a"``; ``""`` where it is unknown, and then nothing is left
            out.
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
        """The marker's folder: everything but the range, so that a wider range can replace a narrower one."""
        fixed = {key: value for key, value in asdict(self).items() if key not in _RANGE}
        digest = hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:24]
        return f"{re.sub('[^a-z0-9]+', '-', self.sweep.lower()).strip('-')[:40] or 'sweep'}-{digest}"


def of_engine(identity: EngineIdentity, *, sweep: str, first: int, last: int, component: str = "triton") -> Marker:
    """The marker of an engine that is described to FER; of the one kind of GPU in this machine."""
    from fer.environment import package_version

    # Not its path and its weights: they choose no kernel.
    told = {
        field.name: getattr(identity, field.name)
        for field in dataclasses.fields(identity)
        if field.name not in ("engine", "engine_version", "model", "revision", "checkpoint", "sources", "ranks")
    }
    told["packages"] = {name: str(package_version(name)) for name in ("torch", "triton", *identity.packages)}
    ranks = identity.ranks
    told["layout"] = [ranks.pp_size, ranks.dp_size, ranks.ep_size]
    seen = gpus.look()
    return Marker(
        engine=f"{identity.engine} {identity.engine_version}",
        model=hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest(),
        tp=ranks.tp_size,
        arch=str(seen.archs[0]) if seen and len(seen.archs) == 1 else "",
        sweep=sweep,
        first=first,
        last=last,
        component=component,
    )


def walk(
    marker: Marker,
    work: Callable[[], object],
    *,
    root: Path | None = None,
    home: Path | None = None,
    agree: Callable[[bool], bool] = bool,
) -> str:
    """Do a sweep unless it has been done, and write its marker once it came to its end.

    To be called by every rank: one that walks alone would wait for the others' part in it.

    Args:
        work: the sweep; whatever it raises is raised, and no marker is written.
        root: the component's cache; where this process has it by default.
        agree: True where every rank of the launch says True, as :meth:`fer.engines.base.Engine.agree`.

    Returns:
        why it had to be done; ``""`` where it was left out.
    """
    root = REGISTRY[marker.component].where(os.environ) if root is None else root
    try:
        why = why_not(marker, root, home=home) if root is not None else f"{marker.component} has no cache here"
    except Exception as error:  # a warm-up too many is no reason to end a start
        why = f"markers cannot be read: {type(error).__name__}: {error}"
        log.exception("completion markers cannot be read; the sweep %s is done", marker.sweep)
    if agree(not why):
        return ""
    try:
        work()
    except Exception:
        agree(False)  # the others wait for a word
        raise
    if agree(True) and root is not None and marker.arch:
        try:
            write(marker, root, home=home)
        except (FerError, OSError) as error:
            log.warning("the sweep %s is done again by the next start: %s", marker.sweep, error)
    return why or "another rank has to"


def folder(home: Path | None = None) -> Path:
    """Where markers lie, each in a folder of its own; without ``home``, where the start under way has its own files."""
    return _folder(home) / "markers"


def _folder(home: Path | None) -> Path:
    started = Path(os.environ.get(coverage.VARIABLE, ""))
    if home is None and started.parent.name == "starts":
        return started.parent.parent
    return store.folder(home)


def write(marker: Marker, root: Path, *, home: Path | None = None) -> Path:
    """Say that a walk came to its end; call it after full success.

    Args:
        root: the component's cache, whose complete entries the marker names: of Triton's, those that this start
            looked up, as far as that was recorded.

    Raises:
        OSError, PeerRefused: it cannot be written, or the folder is not private.
    """
    ensure_private(_folder(home))
    ensure_private(folder(home))
    place = folder(home) / marker.name
    ensure_private(place)
    used = _looked_up() if marker.component == "triton" else None
    complete = REGISTRY[marker.component].complete(root, lambda path: used is None or path in used)
    data = {"schema": 1, **asdict(marker), "entries": sorted(found.path for found in complete)}
    return Path(entry.write(str(place), MARKER, json.dumps(data, sort_keys=True).encode()))


def _looked_up() -> Collection[str] | None:
    """Triton's kernels that this start looked up, in any of its processes; None where nothing was recorded."""
    started = os.environ.get(coverage.VARIABLE)
    keys = {record.key for record in coverage.read(Path(started))} if started else set()
    return keys or None


def done(marker: Marker, root: Path, *, home: Path | None = None) -> bool:
    """Whether the walk can be left out: it was completed for this range or a wider one, and its kernels are there."""
    return not why_not(marker, root, home=home)


def why_not(marker: Marker, root: Path, *, home: Path | None = None) -> str:
    """Why a walk has to be done, ``""`` where it has been."""
    if not marker.arch:
        return "the GPU's architecture is not known"
    known = _load(folder(home) / marker.name / MARKER)
    if known is None:
        return "no completed walk of this engine, model, layout and GPU is known"
    fixed = {key: value for key, value in asdict(marker).items() if key not in _RANGE}
    if any(known.get(key) != value for key, value in fixed.items()):
        return "the marker is for something else"
    first, last, entries = known.get("first"), known.get("last"), known.get("entries")
    if not (
        isinstance(first, int)
        and isinstance(last, int)
        and isinstance(entries, list)
        and all(isinstance(each, str) for each in entries)
    ):
        return "the marker cannot be read"
    if not (first <= marker.first and marker.last <= last):
        return f"the walk was for {first} to {last}, not for {marker.first} to {marker.last}"
    wanted = set(entries)
    there = {found.path for found in REGISTRY[marker.component].complete(root, lambda path: path in wanted)}
    missing = [path for path in entries if path not in there]
    if missing:
        return f"{len(missing)} of its {len(entries)} kernels are missing: {missing[0]}"
    return "" if entries else "the walk left no kernels"


def _load(path: Path) -> Mapping[str, Any] | None:
    with contextlib.suppress(entry.Odd, ValueError, RecursionError):
        data = json.loads(entry.read(os.fspath(path)))
        return data if isinstance(data, dict) and data.get("schema") == 1 else None
    return None
