"""What a cache is to FER, and Triton's: where it lies, what of it is complete, and what its traps are.

A component is a folder of entries; an entry is a folder (or a single file) that is restored as a whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fer.kernels import entry, parts
from fer.kernels.entry import Odd, Sidecar


@dataclass
class Found:
    """One complete entry of a cache.

    Attributes:
        path: relative to the cache; ``/`` between folders.
        files: names relative to the entry.
        groups: Triton's; see :class:`fer.kernels.manifest.Entry`.
        parts: what its key is made of, as far as it is known.
    """

    path: str
    files: list[str]
    groups: dict[str, list[str]] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)


Wanted = Callable[[str], bool]
"""Whether an entry is asked for, by its path; others are not even read."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One cache.

    Attributes:
        name: in manifests and on the command line.
        where: its folder under these variables, None where it has none.
        complete: its complete entries; what is being written is left out.
        places: paths that its entries have, as a regular expression; an archive that names others is refused.
        relocatable: entries mean the same in another folder.
        traps: what one has to know; shown by ``fer kernels inspect``.
        facts: what has to be the same where entries are used, beyond what their keys hold; asked for the folder they
            are in, or would be in. What is unknown (``""``, None) equals nothing.
        mutable: a key's content changes over time, so that what is there and complete is newer, not damaged.
        times: builders compare files' times, so that they are kept with the entry and set again.
    """

    name: str
    where: Callable[[Mapping[str, str]], Path | None]
    complete: Callable[[Path, Wanted], Iterator[Found]]
    places: str
    relocatable: bool
    traps: str = ""
    facts: Callable[[Path], Mapping[str, Any]] = lambda root: {}
    mutable: bool = False
    times: bool = False


# -- Triton


def triton_root(environ: Mapping[str, str]) -> Path | None:
    """Triton's cache, by its own rules; None where it has no home to put one into."""
    if chosen := environ.get("TRITON_CACHE_DIR"):
        return Path(chosen)
    home = environ.get("TRITON_HOME") or environ.get("HOME") or _home_of_user()
    return Path(home) / ".triton" / "cache" if home else None


def _home_of_user() -> str:
    found = os.path.expanduser("~")
    return "" if found in ("~", "/") else found


def _triton_entries(root: Path, wanted: Wanted) -> Iterator[Found]:
    for each in sorted(entry.entries_in(str(root)), key=lambda found: found.name):
        found = triton_entry(each.path) if wanted(each.name) else None
        if found is not None:
            yield found


def triton_helpers(root: Path) -> set[str]:
    """Entries without kernels: host libraries and results of autotuning, which no listener tells of."""
    return {each.name for each in entry.entries_in(str(root)) if entry.loose_in(each.path)}


def triton_entry(folder: str) -> Found | None:
    """One kernel's folder, with every file verified; None where nothing in it is complete and sound."""
    made = Found(os.path.basename(folder), [])
    for metadata in entry.groups_in(folder):
        try:
            names = entry.group_names(folder, metadata)
            if names is None:
                continue
            sidecar = verified(folder, names, metadata)
        except Odd:
            continue  # half written, or damaged: the next lookup compiles it
        made.groups[metadata] = sorted(names)
        made.files += names
        made.parts = made.parts or sidecar.parts or _told_by_metadata(folder, metadata)
    for name in entry.loose_in(folder):
        try:
            verified(folder, [name], "", name)
        except Odd:
            continue
        made.files.append(name)
    made.files = sorted(set(made.files))
    return made if made.files else None


def verified(folder: str, names: list[str], metadata: str, sidecar_of: str = "") -> Sidecar:
    """The sidecar of files that are as they were written, or that look whole where they have none. Raises Odd."""
    sidecar = entry.load_sidecar(folder, sidecar_of or metadata)
    if sidecar is None:
        return entry.inspect(folder, names, metadata)
    entry.verify(folder, names, sidecar, metadata)
    return sidecar


def _told_by_metadata(folder: str, metadata: str) -> dict[str, Any]:
    import json

    return parts.of_metadata(json.loads(entry.read(os.path.join(folder, metadata))))


TRITON: Final = Component(
    name="triton",
    where=triton_root,
    complete=_triton_entries,
    places="[A-Z2-7]{52}",
    relocatable=True,
    traps="helper libraries (.so) are for one Python, one C library and one place of the packages",
)
