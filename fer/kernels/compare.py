"""Where two archives differ, and which kernels of an archive a start would not find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fer.kernels import compat, inductor, parts, store
from fer.kernels.compat import Live
from fer.kernels.manifest import Entry, Manifest


@dataclass(frozen=True)
class Difference:
    """One thing that differs; a side that lacks it says ``(absent)``."""

    what: str
    left: str
    right: str


def archives(left: Manifest, right: Manifest) -> list[Difference]:
    """Entries that one side lacks, with the kernel of the other side that is nearest; files that differ; facts."""
    sides = [{(each.component, each.path): each for each in side.entries} for side in (left, right)]
    found: list[Difference] = []
    for place in sorted(sides[0].keys() | sides[1].keys()):
        one, other = sides[0].get(place), sides[1].get(place)
        if one is not None and other is not None:
            found += _files(one, other)
        elif one is not None:
            found.append(Difference(name_of(one), "kept", _near(left, one, right)))
        elif other is not None:
            found.append(Difference(name_of(other), _near(right, other, left), "kept"))
    for what in ("host", "soft"):
        a, b = getattr(left, what), getattr(right, what)
        for name in sorted({*a, *b}):
            if a.get(name) != b.get(name):
                found.append(Difference(name, str(a.get(name, "(absent)")), str(b.get(name, "(absent)"))))
    return found


def name_of(each: Entry) -> str:
    """What an entry is called for people: the kernel's function, else what is in it."""
    function = str(each.parts.get("function", ""))
    return f"{function or each.files[0].name} ({each.path[:12]})"


@dataclass(frozen=True)
class Expected:
    """One entry of an archive as a start here would meet it; ``why`` is ``""`` for one that would be found."""

    entry: Entry
    why: str


def expected(manifest: Manifest, root: Path | None, here: Live | None) -> Iterator[Expected]:
    """Of each of an archive's kernels: would it be found in this cache, and if not, why.

    Args:
        root: Triton's cache; None: as if every entry were restored.
    """
    for each in manifest.entries:
        why = compat.why_not(manifest, each, here) if here is not None else ""
        if not why and root is not None and each.component == "inductor":
            why = _without_binaries(each, root)
        if not why and root is not None and each.component == "triton":
            place = root / each.path
            why = (
                "it is not in the cache"
                if not place.is_dir()
                else store.damage_of(str(place)) or _incomplete(place, each)
            )
        yield Expected(each, why)


def _without_binaries(each: Entry, root: Path) -> str:
    """torch's artifacts are restored, and say nothing of kernels that Triton's cache has to hold."""
    needs = each.parts.get("needs")
    missing = inductor.missing([str(key) for key in needs], root) if isinstance(needs, list) else []
    return f"{len(missing)} of its kernels' binaries are not in Triton's cache: {missing[0]}" if missing else ""


def _incomplete(place: Path, each: Entry) -> str:
    missing = [file.name for file in each.files if not (place / file.name).is_file()]
    return f"{missing[0]} is missing" if missing else ""


def _near(manifest: Manifest, each: Entry, other: Manifest) -> str:
    if not each.groups:
        return "(absent)"
    mine = manifest.parts_of(each)
    return f"(absent): {parts.why_missed(mine, map(other.parts_of, other.entries))}"


def _files(one: Entry, other: Entry) -> Iterator[Difference]:
    left, right = ({file.name: file for file in each.files} for each in (one, other))
    for name in sorted(left.keys() | right.keys()):
        a, b = left.get(name), right.get(name)
        if a != b:
            sides = [f"{file.size} bytes, {file.sha256[:12]}" if file else "(absent)" for file in (a, b)]
            yield Difference(f"{name_of(one)} {name}", *sides)
