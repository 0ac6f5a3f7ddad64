"""Caches into an archive: complete entries only, sorted, without times. The same caches give the same bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from fer import __version__
from fer.errors import ArchiveError
from fer.kernels import compat, container, gpus, trust
from fer.kernels import entry as entries
from fer.kernels import manifest as manifests
from fer.kernels.components import Found
from fer.kernels.entry import Odd, Stored
from fer.kernels.manifest import TARGET, Entry, File, Manifest
from fer.kernels.registry import REGISTRY

_TRIES: Final = 3
_KEPT: Final = ("json", "cubin", "hsaco")
"""What a launch needs of a group; the rest is for people."""


@dataclass(frozen=True)
class Packed:
    """What became of the caches.

    Attributes:
        digest: SHA-256 of the file.
        left_out: entries that were not packed, with the reason.
    """

    path: Path
    digest: str
    manifest: Manifest
    left_out: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which entries are packed, and how much of them.

    Attributes:
        archs: architectures, none: all.
        binary_only: leave out what only people read; the groups' lists shrink with it.
        code: pack code of the host too.
        wanted: entries by component and path; None: all.
    """

    archs: Collection[int] = ()
    binary_only: bool = False
    code: bool = True
    wanted: Callable[[str, str], bool] | None = None


@dataclass
class _Draft:
    root: Path
    component: str
    found: Found
    files: dict[str, Stored] = field(default_factory=dict)
    code: str = ""


class _Changed(Exception):
    """A file is another one than a moment ago."""

    def __init__(self, draft: _Draft) -> None:
        super().__init__(draft.found.path)
        self.draft = draft


def pack(
    roots: Mapping[str, Path],
    out: Path,
    choice: Choice | None = None,
    *,
    keep: Path | None = None,
    dry_run: bool = False,
) -> Packed:
    """Write an archive of caches that others may be using at the same time.

    Args:
        roots: folders by component's name.
        out: the archive; replaced all at once.
        keep: an archive of this user's, which may be ``out``; what the caches lack of it goes along.
        dry_run: say what would be packed and write nothing.

    Raises:
        ArchiveError: it cannot be written, or ``keep`` is damaged.
    """
    choice = choice or Choice()
    old = _manifest_of(keep)
    left_out: dict[str, str] = {}
    drafts = list(_drafts(roots, choice, left_out))
    for _ in range(_TRIES):
        manifest = _manifest(drafts, old, choice)
        if dry_run:
            return Packed(out, "", manifest, left_out)
        try:
            digest = container.write(out, manifests.encode(manifest), _blobs(manifest, drafts, keep))
            return Packed(out, digest, manifest, left_out)
        except _Changed as changed:
            left_out[changed.draft.found.path] = "it changed while it was packed"
            drafts.remove(changed.draft)
    raise ArchiveError(
        f"{out} was not written", why="entries kept changing while they were packed", fix="Try again", section="file"
    )


def _drafts(roots: Mapping[str, Path], choice: Choice, left_out: dict[str, str]) -> Iterator[_Draft]:
    for name in sorted(roots):
        for found in REGISTRY[name].complete(roots[name], _wanted(name, choice)):
            arch = found.parts.get("arch")
            if choice.archs and arch is not None and arch not in choice.archs:
                left_out[found.path] = f"it is for architecture {arch}"
                continue
            draft = _Draft(roots[name], name, found)
            if why := _read(draft, choice):
                left_out[found.path] = why
            if draft.files:
                _note_facts(draft)
                yield draft


def _wanted(name: str, choice: Choice) -> Callable[[str], bool]:
    return lambda path: choice.wanted is None or choice.wanted(name, path)


def _read(draft: _Draft, choice: Choice) -> str:
    """Size and digest of every file that is packed; why some were left out."""
    why = ""
    if choice.binary_only:
        _shrink(draft.found)
    for name in draft.found.files:
        try:
            data = entries.read(os.path.join(draft.root, draft.found.path, name))
        except Odd as odd:
            draft.files.clear()
            return f"it vanished while it was packed: {odd}"
        code = trust.code_in(name, data)
        if code and not choice.code:
            why = code
            continue
        draft.code = draft.code or code
        draft.files[name] = Stored.of(data)
    if any(not set(names) <= draft.files.keys() for names in draft.found.groups.values()):
        draft.files.clear()  # what is left of a group without one of its files is no kernel
    return why


def _note_facts(draft: _Draft) -> None:
    """What must be the same where this entry is used, and the files' times where builders look at them."""
    component = REGISTRY[draft.component]
    if facts := component.facts(draft.root):
        draft.found.parts["facts"] = dict(facts)
    if component.times:
        folder = draft.root / draft.found.path
        draft.found.parts["times"] = {name: (folder / name).stat().st_mtime_ns for name in draft.files}


def _shrink(found: Found) -> None:
    dropped: set[str] = set()
    for metadata, names in found.groups.items():
        kept = [name for name in names if name.rpartition(".")[2] in _KEPT]
        dropped |= set(names) - set(kept)
        found.groups[metadata] = kept
    found.files = [name for name in found.files if name not in dropped]


def _manifest_of(archive: Path | None) -> Manifest | None:
    if archive is None:
        return None
    with container.Reader(archive) as reader:
        return manifests.read(reader)


def _manifest(drafts: list[_Draft], old: Manifest | None = None, choice: Choice | None = None) -> Manifest:
    targets, options = _Table(), _Table()
    made = []
    for draft in sorted(drafts, key=lambda each: (each.component, each.found.path)):
        parts = dict(draft.found.parts)
        target: dict[str, Any] = {name: parts.pop(name) for name in TARGET if name in parts}
        chosen = parts.pop("options", None)
        made.append(
            Entry(
                component=draft.component,
                path=draft.found.path,
                files=tuple(File(name, each.size, each.sha256) for name, each in sorted(draft.files.items())),
                groups={name: tuple(members) for name, members in sorted(draft.found.groups.items())},
                target=targets.row(target) if target else None,
                options=options.row(chosen) if chosen is not None else None,
                parts=parts,
                code=draft.code,
            )
        )
    host = compat.host_facts() if any(each.code for each in made) else {}
    if old is not None:
        carried = [*_carried(old, made, targets.rows, host, choice or Choice())]
        host = host or (old.host if any(each.code for each in carried) else {})
        made += [_moved(old, each, targets, options) for each in carried]
    return Manifest(
        schema=manifests.SCHEMA,
        tool=__version__,
        entries=tuple(sorted(made, key=lambda each: (each.component, each.path))),
        targets=tuple(targets.rows),
        options=tuple(options.rows),
        host=host,
        soft=compat.soft_facts(gpus.look()),
    )


def _carried(
    old: Manifest, made: list[Entry], targets: list[dict[str, Any]], host: Mapping[str, Any], choice: Choice
) -> Iterator[Entry]:
    """Entries of an older archive that go along: another machine's or rank's, or what a restore had to leave out.

    What another build of Triton compiled stays behind, or the archive would grow with every upgrade; so does code for
    another host, since an archive knows of one only.
    """
    there = {(each.component, each.path) for each in made}
    for each in old.entries:
        if (each.component, each.path) in there or not (choice.wanted or _all)(each.component, each.path):
            continue
        if each.code and host and host != old.host:
            continue
        target = old.targets[each.target] if each.target is not None else None
        if target is None or not targets or any(_same_build(target, now) for now in targets):
            yield each


def _same_build(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether the same Triton compiled both; of kernels that were compiled without FER only the version is known."""
    return all(left.get(name) == right.get(name) or None in (left.get(name), right.get(name)) for name in TARGET[:2])


def _all(component: str, path: str) -> bool:
    return True


def _moved(old: Manifest, each: Entry, targets: _Table, options: _Table) -> Entry:
    """An entry with its numbers in other tables."""
    target = targets.row(old.targets[each.target]) if each.target is not None else None
    chosen = options.row(old.options[each.options]) if each.options is not None else None
    return msgspec.structs.replace(each, target=target, options=chosen)


class _Table:
    """Equal rows once, in the order in which they were met."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._known: dict[str, int] = {}

    def row(self, value: dict[str, Any]) -> int:
        import json

        text = json.dumps(value, sort_keys=True)
        if text not in self._known:
            self._known[text] = len(self.rows)
            self.rows.append(value)
        return self._known[text]


def _blobs(manifest: Manifest, drafts: list[_Draft], keep: Path | None) -> Iterator[tuple[str, bytes]]:
    """Every blob, read again: a cache may be larger than memory."""
    with contextlib.ExitStack() as opened:
        older = None
        if keep is not None:
            reader = opened.enter_context(container.Reader(keep))
            older = reader.blobs(manifests.read(reader).blobs())
        yield from _in_order(manifest, drafts, older)


def _in_order(
    manifest: Manifest, drafts: list[_Draft], older: Iterator[tuple[str, bytes]] | None
) -> Iterator[tuple[str, bytes]]:
    where: dict[str, tuple[_Draft, str]] = {}
    for draft in drafts:
        for name, stored in draft.files.items():
            where.setdefault(stored.sha256, (draft, name))
    wanted = [digest for digest, _ in manifest.blobs()]
    missing = set(wanted) - where.keys()
    ahead: dict[str, bytes] = {}  # both archives are in the order of their entries, so that this stays small
    for digest in wanted:
        if digest in missing:
            assert older is not None
            while digest not in ahead:
                found, data = next(older)
                if found in missing:
                    ahead[found] = data
            yield digest, ahead.pop(digest)
            continue
        draft, name = where[digest]
        try:
            data = entries.read(os.path.join(draft.root, draft.found.path, name))
        except Odd as odd:
            raise _Changed(draft) from odd
        if Stored.of(data).sha256 != digest:
            raise _Changed(draft)
        yield digest, data
