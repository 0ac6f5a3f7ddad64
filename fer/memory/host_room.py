"""How much host memory this process may still take: the kernel's figure and every cgroup limit above us.

A memfd never fails for want of memory: the OOM killer ends the process (or the engine beside it) instead. So the
question is asked before. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from fer.memory.base import Room

_UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a huge page-rounded number


def host_room(proc: Path = Path("/proc")) -> Room:
    """The tightest of the kernel's available memory and the cgroup limits (v1 and v2) up the tree, in bytes.

    Args:
        proc: where procfs is; tests give a made-up one.
    """
    facts = _table(proc / "meminfo", colon=True)
    total = facts.get("MemTotal", 0) * 1024
    rooms = [Room(free=facts.get("MemAvailable", facts.get("MemFree", 0)) * 1024, total=total)]
    for folder, legacy in _cgroups(proc):
        room = _legacy_room(folder) if legacy else _unified_room(folder)
        if room is not None:
            rooms.append(room)
    return Room(free=max(0, min(room.free for room in rooms)), total=min(room.total for room in rooms))


def _unified_room(folder: Path) -> Room | None:
    # memory.high counts as a limit too: past it the kernel throttles until hardly anything moves.
    limits = [n for n in (_number(folder / "memory.max"), _number(folder / "memory.high")) if n is not None]
    used = _number(folder / "memory.current")
    if not limits or used is None:
        return None
    reclaimable = _table(folder / "memory.stat").get("inactive_file", 0)
    return Room(free=min(limits) - used + reclaimable, total=min(limits))


def _legacy_room(folder: Path) -> Room | None:
    limit = _number(folder / "memory.limit_in_bytes")
    used = _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _UNLIMITED:
        return None
    reclaimable = _table(folder / "memory.stat").get("total_inactive_file", 0)
    return Room(free=limit - used + reclaimable, total=limit)


def _cgroups(proc: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of this process's memory cgroups from its own up to the mount's root; True for v1."""
    own: dict[bool, str] = {}
    for line in _lines(proc / "self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            own[False] = path
        elif "memory" in controllers.split(","):
            own[True] = path
    for legacy, mount, root in _mounts(proc):
        if legacy not in own:
            continue
        try:
            # Inside a container the mount shows only part of the tree; our path counts from the tree's real root.
            below = PurePosixPath(own[legacy]).relative_to(root)
        except ValueError:
            below = PurePosixPath()
        parts = [part for part in below.parts if part != ".."]
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth]), legacy


def _mounts(proc: Path) -> Iterator[tuple[bool, Path, str]]:
    """Memory cgroup mounts as (v1?, mount point, root of the mount in its tree)."""
    for line in _lines(proc / "self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield False, Path(fields[4]), fields[3]
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield True, Path(fields[4]), fields[3]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None  # "max" is no limit


def _table(path: Path, *, colon: bool = False) -> dict[str, int]:
    pairs = (line.replace(":", " ", 1).split() if colon else line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}
