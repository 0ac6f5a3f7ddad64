"""Triton's cache, verified on every read: ``TRITON_CACHE_MANAGER=fer.kernels.manager:VerifyingManager``.

Triton's own manager returns what lies in its folder: an empty binary is a hit, a broken list ends the process, and a
moved folder is compiled again as a whole because lists hold absolute paths. This one compares every file with a
SHA-256 from when it was written, finds files by their names, and answers ``None`` to anything odd: Triton then
compiles, and the result replaces what was damaged. It writes the format of the stock manager, which may read the same
folder at any time. A manager of the user's is asked where this one has nothing; see :mod:`fer.kernels.chain`.

This file imports no Triton, so the name can be set before Triton is there and where it never will be.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from typing import Any, Final

from fer.kernels import chain, entry
from fer.kernels.entry import Odd, Sidecar, Stored

SPEC: Final = "fer.kernels.manager:VerifyingManager"
log = logging.getLogger("fer")


@dataclass
class Counts:
    """What managers of this process did.

    Attributes:
        hits, misses: groups looked up.
        fetched: groups and files that the user's manager had and this cache had not.
        adopted: entries without a sidecar that were looked at and got one.
        damaged: entries that were odd, with the reason, by key and name.
        unwritten: why results could not be stored, ``""`` where all could.
    """

    hits: int = 0
    misses: int = 0
    fetched: int = 0
    adopted: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    unwritten: str = ""


COUNTS = Counts()
ADOPTED: set[str] = set()
"""Keys of entries that got their sidecar in this process, and do not say yet what their key is made of."""


class CacheManager:
    """Carries the name by which Triton recognises a manager, without an import of Triton."""


class VerifyingManager(CacheManager):
    """One entry of the cache, as Triton uses it; see the module.

    Args:
        key: the entry's key, as a folder's name.
        override, dump: the folder is the user's, for looking at and changing kernels: nothing is verified there.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        from triton import knobs

        cache = knobs.cache
        root = cache.dump_dir if dump else cache.override_dir if override else cache.dir
        if not root:
            raise RuntimeError("Could not create or locate cache dir")  # Triton's own words: nothing of ours is wrong
        self.key = key
        # Absolute: the stock manager's readers may have another working directory than this process.
        self.cache_dir = os.path.join(os.path.abspath(root), key)
        self.lock_path = None if override and not dump else os.path.join(self.cache_dir, "lock")
        self._verified = not (override or dump)
        self._written: dict[str, Stored] = {}
        self._unheard = self._verified and _join()
        self._scattered = self._foreign = False
        # One of the user's that derives from this class has nobody behind it, or it would stand behind itself.
        self._next = chain.behind(key) if self._verified and type(self) is VerifyingManager else None
        if not override or dump:
            try:
                os.makedirs(self.cache_dir, exist_ok=True)
            except OSError as error:
                if not self._verified:
                    raise
                self._spill(error)

    # -- what Triton calls

    def has_file(self, filename: str) -> bool:
        """Whether a file is there, whatever it holds."""
        return os.path.exists(os.path.join(self.cache_dir, filename))

    def get_file(self, filename: str) -> str | None:
        """Path of a file, verified where it is one of its own, such as a host library; None for a miss."""
        path = os.path.join(self.cache_dir, filename)
        if not self._verified or not entry.is_loose(filename):
            return path if self.has_file(filename) else None
        ours = self._is_ours(filename)
        found = self._own_file(filename) if ours else None
        if found is None and self._next is not None:
            theirs = self._next.get_file(filename)
            taken = self._take({filename: theirs}, filename, loose=True, heal=ours) if theirs is not None else None
            found = taken[filename] if taken is not None else None
        return found if found is not None or ours else self._own_file(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Paths of a group's files by name, every byte of them verified; None for a miss."""
        # What has no sidecar may be the user's manager's own, which knows better what it means.
        ours = self._is_ours(filename)
        group = self._own_group(filename) if ours or self._next is None else None
        if group is None and self._next is not None:
            theirs = self._next.get_group(filename)
            group = self._take(theirs, filename, heal=ours) if theirs is not None else None
            if group is None and not ours:
                group = self._own_group(filename)
        COUNTS.hits += self._verified and group is not None
        COUNTS.misses += self._verified and group is None
        self._tell(filename, hit=group is not None)
        return group

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store a file; its path, which is readable in this process even where the cache takes nothing."""
        content = data if isinstance(data, bytes) else str(data).encode()
        self._written[filename] = Stored.of(content)
        path = self._put_theirs(data, filename, binary, content) if self._next is not None else None
        if path is None:
            path = self._put(filename, content)
        if self._verified and entry.is_loose(filename) and not self._foreign:
            self._store_sidecar(filename, Sidecar({filename: self._written[filename]}, key=self.key))
        return path

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Complete a group: it exists for other processes from here on."""
        path = os.path.join(self.cache_dir, entry.GROUP + filename)
        if self._next is not None:
            self._next.put_group(filename, group)
        if self._foreign:
            with contextlib.suppress(OSError):  # what was known of an older entry
                os.unlink(os.path.join(self.cache_dir, entry.SIDECAR + filename))
        if self._scattered or self._foreign:
            return path  # a list of files that are not all here would be a lie to the next process
        try:
            if not self._verified:
                return entry.write(self.cache_dir, entry.GROUP + filename, entry.group_list(self.cache_dir, group))
            files = {name: self._written.get(name) or self._stored(name) for name in group}
            return entry.write_group(self.cache_dir, filename, group, Sidecar(files, key=self.key))
        except (OSError, Odd) as error:
            self._spill(error)
            return path

    # -- the user's manager

    def _is_ours(self, name: str) -> bool:
        """Whether FER knows what an entry must be."""
        return os.path.lexists(os.path.join(self.cache_dir, entry.SIDECAR + name))

    def _put_theirs(self, data: Any, filename: str, binary: bool, content: bytes) -> str | None:
        """Give the user's manager a file; its path where it has put one into this very folder."""
        assert self._next is not None
        here = os.path.join(self.cache_dir, filename)
        before = _stamp(here)
        path = self._next.put(data, filename, binary)
        if path is None or _stamp(here) == before:
            return None
        # In a form of its own, the entry stays its own, for FER as for processes without FER.
        self._foreign = self._foreign or not self._holds(here, content)
        return path

    def _is_here(self, name: str, path: str) -> bool:
        return os.path.realpath(path) == os.path.realpath(os.path.join(self.cache_dir, name))

    @staticmethod
    def _holds(path: str, content: bytes) -> bool:
        try:
            return entry.read(path) == content
        except Odd:
            return False

    def _take(
        self, paths: dict[str, str], name: str, *, loose: bool = False, heal: bool = False
    ) -> dict[str, str] | None:
        """What the user's manager gave, verified by structure and key; copied here where there is room for it.

        Args:
            loose: it is one file of its own.
            heal: files of these names that are here are FER's, and were found damaged.
        """
        try:
            if (not loose and name not in paths) or not all(map(entry.is_plain_name, paths)):
                raise Odd("its list of files holds other names")
            # Real paths: it may keep files behind links.
            files = {each: entry.read(os.path.realpath(path)) for each, path in paths.items()}
            sidecar = entry.inspect_content(self.key, files.items(), "" if loose else name)
        except Odd as odd:
            assert self._next is not None
            self._note_damage(name, f"{self._next.name} gave what is damaged: {odd}", "")
            return None
        COUNTS.fetched += 1
        ADOPTED.add(self.key)
        elsewhere = [each for each, path in paths.items() if not self._is_here(each, path)]
        try:
            if not heal and any(self.has_file(each) for each in elsewhere):
                return paths  # files of these names are its own
            for each in elsewhere:
                entry.write(self.cache_dir, each, files[each])
            if loose or not elsewhere:  # its own list is here
                self._store_sidecar(name, sidecar)
            else:
                entry.write_group(self.cache_dir, name, paths, sidecar)
        except OSError:
            return paths  # a folder that takes nothing: these were verified as well
        return {each: os.path.join(self.cache_dir, each) for each in paths}

    # -- how

    def _own_file(self, filename: str) -> str | None:
        if self.has_file(filename) and self._sound(filename, [filename], loose=True):
            return os.path.join(self.cache_dir, filename)
        return None

    def _own_group(self, filename: str) -> dict[str, str] | None:
        """Paths of a group in this folder, verified."""
        try:
            names = entry.group_names(self.cache_dir, filename)
        except Odd as odd:
            self._refuse(filename, [], str(odd))
            return None
        if names is None or (self._verified and not self._sound(filename, names, loose=False)):
            return None
        return {name: os.path.join(self.cache_dir, name) for name in names}

    def _put(self, filename: str, content: bytes) -> str:
        try:
            return entry.write(self.cache_dir, filename, content)
        except FileNotFoundError:
            # Another process tidied the folder away while it was empty.
            return self._put_again(filename, content)
        except OSError as error:
            return self._put_elsewhere(filename, content, error)

    def _sound(self, name: str, names: list[str], *, loose: bool) -> bool:
        """Verify against the sidecar, or look at the structure and write one."""
        for attempt in (1, 2):
            sidecar = None
            try:
                sidecar = entry.load_sidecar(self.cache_dir, name)
                if sidecar is not None:
                    entry.verify(self.cache_dir, names, sidecar, "" if loose else name)
                    return True
                made = entry.inspect(self.cache_dir, names, "" if loose else name)
            except Odd as odd:
                # A writer may have replaced files between our reads: then the sidecar is another one by now.
                if attempt == 1 and self._sidecar_changed(name, sidecar):
                    continue
                self._refuse(name, names, str(odd))
                return False
            COUNTS.adopted += 1
            ADOPTED.add(self.key)
            self._store_sidecar(name, made)
            return True
        return False

    def _sidecar_changed(self, name: str, seen: Sidecar | None) -> bool:
        try:
            return entry.load_sidecar(self.cache_dir, name) != seen
        except Odd:
            return False

    def _tell(self, filename: str, *, hit: bool) -> None:
        """Record the lookup that brought FER into this process: Triton's listener hears of the next one only."""
        if self._unheard:
            from fer.kernels import coverage

            self._unheard = False
            coverage.note(self.key, filename.rpartition(".")[0], hit=hit)

    def _refuse(self, name: str, names: list[str], why: str) -> None:
        if self._next is not None and not self._is_ours(name):
            self._note_damage(name, why, "")  # it may be how the user's manager keeps files
            return
        place = entry.quarantine(self.cache_dir, name, names, why)
        self._note_damage(name, why, f" (kept in {place})" if place else "")

    def _note_damage(self, name: str, why: str, kept: str) -> None:
        first = not COUNTS.damaged
        COUNTS.damaged[f"{self.key}/{name}"] = why
        text = "cache entry %s of kernel %s is damaged and is compiled again: %s%s"
        more = "; further ones are logged as debug messages" if first else ""
        log.log(
            logging.WARNING if first else logging.DEBUG,
            text,
            self.key,
            name.rpartition(".")[0] or name,
            why,
            kept + more,
        )

    def _stored(self, name: str) -> Stored:
        return Stored.of(entry.read(os.path.join(self.cache_dir, name)))

    def _store_sidecar(self, name: str, sidecar: Sidecar) -> None:
        # A folder that may be read only, such as one in an image, is verified by structure each time.
        with contextlib.suppress(OSError):
            entry.write(self.cache_dir, entry.SIDECAR + name, sidecar.to_json())

    def _put_again(self, filename: str, content: bytes) -> str:
        try:
            os.makedirs(self.cache_dir, exist_ok=True)
            return entry.write(self.cache_dir, filename, content)
        except OSError as error:
            return self._put_elsewhere(filename, content, error)

    def _put_elsewhere(self, filename: str, content: bytes, error: OSError) -> str:
        if not self._verified:
            raise error
        self._scattered = True
        self._spill(error)
        return entry.write(_elsewhere(self.key), filename, content)

    def _spill(self, error: Exception) -> None:
        """The cache takes nothing: this process goes on with files of its own, and says so once."""
        if not COUNTS.unwritten:
            COUNTS.unwritten = str(error)
            log.warning(
                "compiled kernels cannot be stored in %s and are compiled again by every process: %s",
                os.path.dirname(self.cache_dir),
                error,
            )


def _stamp(path: str) -> tuple[int, int] | None:
    """What changes where a file is written anew."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns


_joined = False


def _join() -> bool:
    """In a process that an engine spawned during a start, record compilations from now on.

    Triton loads this module there because of the inherited variable, and nothing else of FER is imported.

    Returns:
        True at that moment: the lookup under way is not heard by anybody.
    """
    global _joined
    from fer.kernels import coverage, hooks

    if _joined or coverage.VARIABLE not in os.environ:
        return False
    _joined = True
    heard = coverage.is_attached()
    hooks.install()
    return not heard


_private: dict[int, str] = {}  # by process: a fork must not remove its parent's


def _elsewhere(key: str) -> str:
    """A folder of this process for one entry; Triton reads a kernel's files back right after it stored them."""
    pid = os.getpid()
    if pid not in _private:
        _private[pid] = tempfile.mkdtemp(prefix="fer-kernels-")
        atexit.register(_tidy, pid)
    folder = os.path.join(_private[pid], key)
    os.makedirs(folder, exist_ok=True)
    return folder


def _tidy(pid: int) -> None:
    if pid == os.getpid():
        shutil.rmtree(_private[pid], ignore_errors=True)
