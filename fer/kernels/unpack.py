"""An archive into caches: beside the target first, verified while it is written, then renamed entry by entry.

What is there already and sound stays, what is there and damaged goes to the quarantine. An archive that turns out to be
damaged half-way leaves whole entries, each of which was verified, and nothing of the others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from fer.errors import ArchiveError, ArchiveUntrusted
from fer.kernels import compat, entry, trust
from fer.kernels import manifest as manifests
from fer.kernels.compat import Live, Trial
from fer.kernels.container import Reader
from fer.kernels.entry import Odd, Sidecar, Stored
from fer.kernels.manifest import Entry, Manifest
from fer.kernels.registry import REGISTRY, files_below

STAGE: Final = ".fer-stage."
_STALE_S: Final = 3600.0
_WRITERS: Final = 4
_SLOW_S: Final = 100e-6
"""Seconds for making a file, above which threads do it; 20 to 30 µs are usual."""

_LOOK_AT: Final = 256
"""Files whose mean is looked at: a single one may have waited for a processor."""

_AHEAD: Final = 64 << 20
"""Bytes of entries that are written while the archive is read on."""

Code = Literal["refuse", "skip", "take"]
Became = Literal["restored", "kept", "healed"]


@dataclass
class Outcome:
    """What became of an archive's entries.

    Attributes:
        restored: paths that are new in the caches.
        kept: that were there and sound.
        healed: that were there and damaged.
        skipped: that cannot be used here, with the reason.
        notes: what differs and refuses nothing.
    """

    manifest: Manifest
    restored: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    healed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def usable(self) -> int:
        """Entries of the archive that the caches hold now."""
        return len(self.restored) + len(self.kept) + len(self.healed)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How an archive is taken in.

    Attributes:
        code: what to do with code of the host: refuse the archive, skip such entries, or take them as trusted.
        here: facts to compare with, or what finds them out for a manifest; None: no comparison.
        trial: loads a kernel that was compiled for a newer driver; None: such kernels are skipped.
        glance: look only whether the files of kernels are there, as a start does, whose lookups verify each anyway.
        dry_run: say what would be done.
    """

    code: Code = "refuse"
    here: Live | Callable[[Manifest], Live] | None = None
    trial: Trial | None = compat.load_once
    glance: bool = False
    dry_run: bool = False


def unpack(archive: Path, roots: Mapping[str, Path], terms: Terms | None = None) -> Outcome:
    """Restore what can be used here.

    Args:
        roots: folders by component's name; entries of other components are skipped.

    Raises:
        ArchiveError: the archive is damaged, or a folder cannot be written to.
        ArchiveUntrusted: it holds code of the host and ``terms.code`` refuses that, or what FER never writes.
        ArchiveIncompatible: it has another schema.
    """
    terms = terms or Terms()
    with Reader(archive) as reader:
        manifest = manifests.read(reader)
        outcome = Outcome(manifest)
        here = terms.here(manifest) if callable(terms.here) else terms.here
        wanted = _sort_out(manifest, roots, terms, here, outcome)
        if terms.dry_run:
            outcome.restored = [each.path for each in wanted]
            return outcome
        if wanted:
            try:
                with _Staging(roots, outcome) as staging:
                    _restore(reader, wanted, staging, terms.trial, here, outcome)
            except OSError as error:
                raise ArchiveError(
                    f"{archive} cannot be unpacked", why=error.strerror or str(error), section="file"
                ) from error
        return outcome


def verify(archive: Path) -> Manifest:
    """Read an archive to its last byte; its manifest. Raises as :func:`unpack`, also where code of the host hides."""
    with Reader(archive) as reader:
        manifest = manifests.read(reader)
        declared = {file.sha256: each.code for each in manifest.entries for file in each.files}
        names = {file.sha256: file.name for each in manifest.entries for file in each.files}
        owners: dict[str, list[Entry]] = {}
        for each in manifest.entries:
            for file in each.files:
                if file.name in each.groups:
                    owners.setdefault(file.sha256, []).append(each)
        for digest, data in reader.blobs(manifest.blobs()):
            why = trust.code_in(names[digest], data)
            if why and not declared[digest]:
                raise reader.hostile(why)
            for each in owners.get(digest, ()):
                _check_keys(reader, each, [(names[digest], data)])
        return manifest


def peek(archive: Path) -> tuple[Manifest, str, int]:
    """Manifest, its digest and the file's size; reads the beginning only."""
    with Reader(archive) as reader:
        return manifests.read(reader), reader.digest, reader.size


# -- which entries


def _sort_out(
    manifest: Manifest, roots: Mapping[str, Path], terms: Terms, here: Live | None, outcome: Outcome
) -> list[Entry]:
    """Entries to restore. Everything that can be known beforehand is decided here, before anything is written."""
    code = [f"{each.path}: {each.code}" for each in manifest.entries if each.code]
    if code and terms.code == "refuse":
        raise ArchiveUntrusted(
            "the archive holds code of the host",
            why="; ".join(code[:3]) + (f"; {len(code) - 3} more" if len(code) > 3 else ""),
            fix="With --trust it is taken, with --without-code only what cannot run in this process",
            reasons=code,
        )
    if here is not None:
        outcome.notes += compat.soft_changes(manifest, here)
    wanted = []
    for each in manifest.entries:
        _check_place(each)
        if why := _why_skip(manifest, each, roots, terms.code, here):
            outcome.skipped[each.path] = why
            continue
        if (_is_there if terms.glance else _is_sound)(roots[each.component], each):
            outcome.kept.append(each.path)
        else:
            wanted.append(each)
    return wanted


def _check_place(each: Entry) -> None:
    """An entry lies where its cache has entries, and brings none of the lists that FER and Triton write themselves."""
    component = REGISTRY.get(each.component)
    if component is None:
        return  # skipped, since it has no place
    names = [file.name for file in each.files]
    own = each.component == "triton" and not all(map(entry.is_plain_name, names))
    if own or not re.fullmatch(component.places, each.path):
        raise ArchiveUntrusted(
            f"an entry of {each.component} is refused",
            why=f"no entry of this cache is called {each.path!r}" if not own else "it brings lists of its own",
            fix="Find out who made this file",
            reasons=[each.path],
        )


def _why_skip(manifest: Manifest, each: Entry, roots: Mapping[str, Path], code: Code, here: Live | None) -> str:
    if each.component not in roots:
        return f"there is no place for {each.component}"
    if each.code and code == "skip":
        return each.code
    if here is not None and (why := _other_facts(each, roots[each.component])):
        return why
    return compat.why_not(manifest, each, here) if here is not None else ""


def _other_facts(each: Entry, root: Path) -> str:
    """Where a cache's own conditions are not met here; what is unknown meets none."""
    component = REGISTRY.get(each.component)
    now = component.facts(root) if component is not None else {}
    before = each.parts.get("facts", {})
    if not isinstance(before, dict):
        return "its facts cannot be read"
    return "; ".join(
        f"{name}: {before.get(name) or compat.UNKNOWN} -> {now.get(name) or compat.UNKNOWN}"
        for name in sorted({*before, *now})
        if not before.get(name) or before.get(name) != now.get(name)
    )


def _is_there(root: Path, each: Entry) -> bool:
    """Whether a lookup finds an entry to verify: Triton makes a folder before it compiles, and may be killed then."""
    if each.component != "triton":
        return _is_sound(root, each)  # nobody verifies these later
    folder = os.path.join(root, each.path)
    if not os.path.isdir(folder):
        return False
    grouped = {name for names in each.groups.values() for name in names}
    names = [entry.GROUP + metadata for metadata in each.groups]
    return all(
        os.path.isfile(os.path.join(folder, name))
        for name in [*names, *(file.name for file in each.files if file.name not in grouped)]
    )


def _is_sound(root: Path, each: Entry) -> bool:
    """Whether a cache holds an entry of this key that a lookup would take, from wherever it came."""
    if not os.path.isdir(os.path.join(root, each.path)):
        return False
    component = REGISTRY[each.component]
    if component.mutable:
        return any(True for _ in component.complete(root, lambda path: path == each.path))
    folder = os.path.join(root, each.path)
    grouped = {name for names in each.groups.values() for name in names}
    try:
        for metadata in each.groups:
            names = entry.group_names(folder, metadata)
            if names is None:
                return False
            sidecar = entry.load_sidecar(folder, metadata)
            if sidecar is None:
                entry.inspect(folder, names, metadata)
            else:
                entry.verify(folder, names, sidecar, metadata)
        others = [file.name for file in each.files if file.name not in grouped]
        entry.verify(folder, others, _sidecar(each, others))
    except Odd:
        return False
    return True


def _sidecar(each: Entry, names: Collection[str]) -> Sidecar:
    files = {file.name: Stored(file.size, file.sha256) for file in each.files if file.name in names}
    return Sidecar(files, key=each.path.rpartition("/")[2])


# -- writing


def _restore(
    reader: Reader, wanted: list[Entry], staging: _Staging, trial: Trial | None, here: Live | None, outcome: Outcome
) -> None:
    manifest = outcome.manifest
    users: dict[str, list[Entry]] = {}
    left = {each.path: len({file.sha256 for file in each.files}) for each in wanted}
    held: dict[str, dict[str, bytes]] = {each.path: {} for each in wanted}
    doubtful = set(compat.beyond_driver(manifest, here)) if here is not None else set()
    for each in wanted:
        for digest in {file.sha256 for file in each.files}:
            users.setdefault(digest, []).append(each)
    for digest, data in reader.blobs(manifest.blobs()):
        for each in users.get(digest, ()):
            held[each.path][digest] = data
            left[each.path] -= 1
            if left[each.path]:
                continue
            files = [(file.name, held[each.path][file.sha256]) for file in each.files]
            del held[each.path]
            for name, content in files if not each.code else ():
                if why := trust.code_in(name, content):
                    raise reader.hostile(why)
            _check_keys(reader, each, files)
            if here is not None and each.target in doubtful:
                doubtful.discard(each.target)
                _try(files, trial, here, outcome)
            staging.place(each, files)


def _check_keys(reader: Reader, each: Entry, files: Iterable[tuple[str, bytes]]) -> None:
    """A kernel under another kernel's key would be found by it, with every digest right."""
    for name, content in files:
        if name in each.groups:
            try:
                entry.check_key(each.path, content)
            except Odd as odd:
                raise reader.bad(f"{each.path}/{name}", str(odd)) from odd


def _try(files: list[tuple[str, bytes]], trial: Trial | None, here: Live, outcome: Outcome) -> None:
    """The driver is older than the compiler: one kernel is loaded, and speaks for all of its kind."""
    data = next((content for name, content in files if name.endswith(".cubin")), b"")
    if not data:
        return
    cuda = ".".join(map(str, here.cuda or ()))
    outcome.notes.append(f"kernels were compiled for a newer CUDA than the driver's {cuda}; one was loaded to see")
    why = trial(data) if trial is not None else "nothing can be loaded here"
    if why:
        raise ArchiveError(
            "the driver does not take the archive's kernels",
            why=f"{why}; it runs CUDA {cuda} at most",
            fix="Update the driver; until then kernels are compiled as usual",
            section="driver",
        )


class _Staging:
    """Entries on their way, in a folder beside each target: a rename must not leave the file system.

    Where making files is slow, threads write while the archive is read on. ext4 without a journal is one such place: it
    gives no number of a file out again for minutes, and looks at each that was deleted meanwhile. Where it is quick,
    threads would cost more than they spare.
    """

    def __init__(self, roots: Mapping[str, Path], outcome: Outcome) -> None:
        self._roots, self._outcome = roots, outcome
        self._folders: dict[str, Path] = {}
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="fer-unpack")
        self._begun: deque[tuple[str, Future[Became], int]] = deque()
        self._bytes = self._files = 0
        self._seconds, self._slow = 0.0, False

    def __enter__(self) -> _Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # What was handed over is whole and verified, also where the archive turned out to be damaged behind it.
            self._collect(0, raising=kind is None)
        finally:
            self._writers.shutdown()
            for folder in self._folders.values():
                shutil.rmtree(folder, ignore_errors=True)

    def place(self, each: Entry, files: list[tuple[str, bytes]]) -> None:
        """Write a complete entry and put it where it belongs, or hand it over. Raises OSError, also of earlier ones."""
        if not self._slow:
            begun = time.perf_counter()
            self._note(each.path, self._write(each, self._folder(each), files))
            self._seconds += time.perf_counter() - begun
            self._files += len(files)
            if self._files >= _LOOK_AT:
                self._slow = self._seconds > _SLOW_S * self._files
                self._seconds, self._files = 0.0, 0
            return
        size = sum(len(data) for _, data in files)
        self._begun.append((each.path, self._writers.submit(self._write, each, self._folder(each), files), size))
        self._bytes += size
        self._collect(_AHEAD)

    def _collect(self, ahead: int, *, raising: bool = True) -> None:
        """Wait until at most this many bytes are under way; note what became of the entries, in the archive's order."""
        failed: OSError | None = None
        while self._begun and (self._bytes > ahead or self._begun[0][1].done()):
            path, future, size = self._begun.popleft()
            self._bytes -= size
            try:
                became = future.result()
            except OSError as error:
                failed = failed or error
                continue
            self._note(path, became)
        if failed is not None and raising:
            raise failed

    def _note(self, path: str, became: Became) -> None:
        lists = {"restored": self._outcome.restored, "kept": self._outcome.kept, "healed": self._outcome.healed}
        lists[became].append(path)

    def _write(self, each: Entry, staged: str, files: list[tuple[str, bytes]]) -> Became:
        """Write an entry, and put it where it belongs; the name of the outcome's list. In any thread."""
        target = os.path.join(self._roots[each.component], each.path)
        if each.component == "triton":
            files = [*files, *_lists(target, each, self._outcome.manifest.parts_of(each))]
        _write_files(staged, files, nested="/" in each.path)
        _set_times(staged, each.parts.get("times"))
        if "/" in each.path:
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        try:
            os.rename(staged, target)
            return "restored"
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            return self._beside(each, staged, target)

    def _beside(self, each: Entry, staged: str, target: str) -> Became:
        """Somebody else's entry is there: it wins if it is sound, and is healed file by file if it is not.

        Never renamed away: a process that compiles may hold paths into it.
        """
        if _is_sound(self._roots[each.component], each):
            return "kept"
        for metadata in each.groups or {each.files[0].name: ()}:
            entry.quarantine(target, metadata, [file.name for file in each.files], "it was damaged before a restore")
        names = files_below(Path(staged))
        lists = [name for name in names if name.startswith(entry.GROUP)]  # last: a list means that all is there
        for name in [*(name for name in names if name not in lists), *lists]:
            place = os.path.join(target, name)
            if os.path.isdir(place) and not os.path.islink(place):
                shutil.rmtree(place)
            os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
            os.replace(os.path.join(staged, name), place)
        return "healed"

    def _folder(self, each: Entry) -> str:
        if each.component not in self._folders:
            root = self._roots[each.component]
            root.mkdir(parents=True, exist_ok=True, mode=0o700)
            tidy(root)
            folder = root / f"{STAGE}{os.getpid()}.{secrets.token_hex(4)}"
            folder.mkdir(mode=0o700)
            self._folders[each.component] = folder
        return os.path.join(self._folders[each.component], each.path)


def _write_files(folder: str, files: list[tuple[str, bytes]], *, nested: bool) -> None:
    (os.makedirs if nested else os.mkdir)(folder, 0o700)
    for name, data in files:
        path = f"{folder}/{name}"
        if "/" in name:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]
        finally:
            os.close(handle)


def _set_times(folder: str, times: object) -> None:
    """Builders compare the times of files with those of what they made of them."""
    for name, when in times.items() if isinstance(times, dict) else ():
        if manifests.is_inside(str(name)) and isinstance(when, int):
            with contextlib.suppress(OSError, OverflowError):
                os.utime(os.path.join(folder, name), ns=(when, when), follow_symlinks=False)


def _lists(target: str, each: Entry, parts: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Sidecars, and Triton's lists with the paths of where the entry is going."""
    made: list[tuple[str, bytes]] = []
    grouped: set[str] = set()
    for metadata, names in each.groups.items():
        grouped |= set(names)
        sidecar = _sidecar(each, names)
        sidecar.parts = parts
        made.append((entry.SIDECAR + metadata, sidecar.to_json()))
        made.append((entry.GROUP + metadata, entry.group_list(os.path.abspath(target), names)))
    for file in each.files:
        if file.name not in grouped:
            made.append((entry.SIDECAR + file.name, _sidecar(each, [file.name]).to_json()))
    return made


def tidy(root: Path, *, now: float | None = None) -> list[Path]:
    """Remove what killed unpackers left beside a cache, once it is an hour old."""
    gone = []
    now = time.time() if now is None else now
    for folder in root.glob(f"{STAGE}*"):
        with contextlib.suppress(OSError):
            if now - folder.stat().st_mtime > _STALE_S:
                shutil.rmtree(folder)
                gone.append(folder)
    return gone
