"""What an archive says of itself: its entries, what their keys are made of, and what must match where they are used."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from fer.errors import ArchiveIncompatible
from fer.kernels.container import MAX_FILE, Reader

SCHEMA: Final = 1
MAX_ENTRIES: Final = 1_000_000
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_PART: Final = re.compile(r"[^/\\\0-\x1f\x7f]{1,255}")
_MAX_PATH: Final = 1024
TARGET: Final = ("version", "triton", "backend", "arch", "compiler", "env")
"""Parts of a kernel's key that belong to the installation and the process, not to the kernel."""


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Name in its entry, bytes, and SHA-256 of one file."""

    name: str
    size: int
    sha256: str


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One folder of one cache: what is restored as a whole or not at all.

    Attributes:
        component: which cache; see :mod:`fer.kernels.components`.
        path: the folder, relative to the cache's.
        groups: Triton's groups: names of files by the name of their metadata.
        target, options: numbers in the manifest's tables; None where nothing is known.
        parts: what else the key is made of, see :mod:`fer.kernels.parts`.
        code: why it would run in the host's process, ``""`` for an entry that holds data and device code only.
    """

    component: str
    path: str
    files: tuple[File, ...]
    groups: dict[str, tuple[str, ...]] = {}
    target: int | None = None
    options: int | None = None
    parts: dict[str, Any] = {}
    code: str = ""

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """All of an archive but its blobs.

    Attributes:
        tool: FER's version that wrote it.
        targets: distinct sets of the parts :data:`TARGET`.
        options: distinct sets of compile options.
        host: what code of the host depends on; empty in an archive without such code.
        soft: the GPU and driver it was packed beside; a difference is told, and refuses nothing.
    """

    schema: int
    tool: str
    entries: tuple[Entry, ...]
    targets: tuple[dict[str, Any], ...] = ()
    options: tuple[dict[str, Any], ...] = ()
    host: dict[str, Any] = {}
    soft: dict[str, Any] = {}

    def parts_of(self, entry: Entry) -> dict[str, Any]:
        """All that is known of what an entry's key is made of."""
        target = self.targets[entry.target] if entry.target is not None else {}
        options = {"options": self.options[entry.options]} if entry.options is not None else {}
        return {**target, **options, **entry.parts}

    def blobs(self) -> Iterator[tuple[str, int]]:
        """Digest and size of every blob, in the order of the file."""
        seen = set()
        for entry in self.entries:
            for file in entry.files:
                if file.sha256 not in seen:
                    seen.add(file.sha256)
                    yield file.sha256, file.size

    @property
    def bytes(self) -> int:
        """Of all entries when they are unpacked."""
        return sum(entry.bytes for entry in self.entries)


class _Schema(msgspec.Struct):
    schema: int


def encode(manifest: Manifest) -> bytes:
    """Equal manifests give equal bytes, in every process."""
    return msgspec.json.encode(manifest, order="deterministic")


def read(reader: Reader) -> Manifest:
    """The manifest of an opened archive, with every name and figure in it checked.

    Raises:
        ArchiveIncompatible: it has another schema.
        ArchiveError: it is no manifest.
        ArchiveUntrusted: a name in it leads out of its entry, or a figure is beyond the limits.
    """
    try:
        schema = msgspec.json.decode(reader.manifest, type=_Schema).schema
        if schema != SCHEMA:
            raise ArchiveIncompatible(
                f"{reader.path} has schema {schema}",
                why=f"this version of FER reads {SCHEMA}",
                fix="Pack it again with this version",
            )
        manifest = msgspec.json.decode(reader.manifest, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise reader.bad("manifest.json", str(error)) from error
    _check(reader, manifest)
    return manifest


def is_inside(path: str) -> bool:
    """Whether a relative path stays below where it starts, on every system."""
    parts = path.split("/")
    return len(path) <= _MAX_PATH and all(_PART.fullmatch(part) and part not in (".", "..") for part in parts)


def _check(reader: Reader, manifest: Manifest) -> None:
    if len(manifest.entries) > MAX_ENTRIES:
        raise reader.hostile(f"it names {len(manifest.entries)} entries")
    sizes: dict[str, int] = {}
    places = [(entry.component, entry.path) for entry in manifest.entries]
    if places != sorted(set(places)):
        raise reader.bad("manifest.json", "its entries are not in order, or one is there twice")
    for entry in manifest.entries:
        if not is_inside(entry.path) or not _PART.fullmatch(entry.component):
            raise reader.hostile(f"an entry is named {entry.path!r}")
        names = [file.name for file in entry.files]
        if names != sorted(set(names)) or not names:
            raise reader.bad("manifest.json", f"the files of {entry.path} are not in order, or one is there twice")
        for file in entry.files:
            if not is_inside(file.name):
                raise reader.hostile(f"a file is named {file.name!r}")
            if not 0 <= file.size <= MAX_FILE:
                raise reader.hostile(f"{file.name!r} has {file.size} bytes")
            if not _SHA256.fullmatch(file.sha256) or sizes.setdefault(file.sha256, file.size) != file.size:
                raise reader.bad("manifest.json", f"the digest of {file.name} is none")
        _check_links(reader, manifest, entry, set(names))
    reader.limit(manifest.bytes)


def _check_links(reader: Reader, manifest: Manifest, entry: Entry, names: set[str]) -> None:
    for number, table in ((entry.target, manifest.targets), (entry.options, manifest.options)):
        if number is not None and not 0 <= number < len(table):
            raise reader.bad("manifest.json", f"{entry.path} names row {number} of a table of {len(table)}")
    for metadata, members in entry.groups.items():
        if metadata not in members or not names.issuperset(members):
            raise reader.bad("manifest.json", f"a group of {entry.path} names files that are not there")
