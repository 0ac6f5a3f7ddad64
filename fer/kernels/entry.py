"""One entry of Triton's cache on disk: a folder named by its key, verified without Triton.

::

    <key>/add.cubin, add.json, add.ptx, ...   the group's files
    <key>/__grp__add.json                     Triton's list of the group: names and absolute paths
    <key>/__fer__add.json                     FER's sidecar: size and SHA-256 of each file, and of what the key is made

Triton's list is read for its names alone, and files are looked for in the entry itself, so that a moved or copied cache
keeps its meaning. Whatever is odd about an entry makes it a miss. The damaged files are linked into the quarantine and
the lists are removed; the files themselves stay, because a process that compiles at this moment holds their paths, and
the compilation that follows replaces each of them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fer.kernels import elf

GROUP, SIDECAR = "__grp__", "__fer__"
QUARANTINE: Final = ".fer-quarantine"
SCHEMA: Final = 1
KEPT_DAMAGED: Final = 64
"""Entries the quarantine holds at most; beyond that damage is only reported."""

_PLAIN: Final = re.compile(
    rf"(?!\.{{1,2}}\Z|lock\Z|{GROUP}|{SIDECAR}|tmp\.pid_|\.tmp\.)[^/\0\ud800-\udfff]{{1,255}}", re.DOTALL
)
_KEY: Final = re.compile(r"[A-Z2-7]{51}[AQ]")
"""52 digits of five bits hold 256 and four that are zero."""

_DIGITS: Final = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", "0123456789abcdefghijklmnopqrstuv")
_BINARIES: Final = {"cubin": elf.CUDA, "hsaco": elf.AMDGPU}
MEMBERS: Final = frozenset({"source", "ttir", "ttgir", "llir", "ptx", "amdgcn", "glir", "json", *_BINARIES})
"""Extensions of a group's files; what has another one is a file on its own, such as a host library."""


class Odd(Exception):
    """Something about an entry is not as it was written: it is a miss, never an error of a start."""


@dataclass(frozen=True)
class Stored:
    """What a file's bytes must be."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Stored:
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass
class Sidecar:
    """What FER knows of one group: its files, and the parts its key was made of, where they were recorded.

    Attributes:
        key: the folder it was written for, ``""`` where nobody said: in a copy under another name it means nothing.
    """

    files: dict[str, Stored]
    parts: dict[str, Any] = field(default_factory=dict)
    key: str = ""

    def to_json(self) -> bytes:
        files = {name: [stored.size, stored.sha256] for name, stored in sorted(self.files.items())}
        data = {"schema": SCHEMA, "files": files, "parts": self.parts, "key": self.key}
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Sidecar:
        """Raises Odd where it is none."""
        try:
            content = json.loads(data)
            if content["schema"] != SCHEMA:
                raise Odd(f"its sidecar has schema {content['schema']}")
            files = {name: Stored(int(size), str(sha)) for name, (size, sha) in content["files"].items()}
            return cls(files, dict(content["parts"]), str(content.get("key", "")))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise Odd("its sidecar cannot be read") from error


def is_plain_name(name: str) -> bool:
    """Whether a text is the name of one file, and of no file that FER or Triton keeps for itself."""
    return _PLAIN.fullmatch(name) is not None


def read(path: str) -> bytes:
    """The bytes of a regular file.

    Raises:
        Odd: it is missing, a link, or no regular file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Odd(f"{os.path.basename(path)} is missing") from None
    except OSError as error:
        raise Odd(f"{os.path.basename(path)} cannot be read: {error.strerror}") from error
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise Odd(f"{os.path.basename(path)} is no regular file")
        data = os.read(handle, facts.st_size + 1)
        while more := os.read(handle, 1 << 20) if len(data) < facts.st_size else b"":
            data += more
        return data
    except OSError as error:  # a disk's bad block, a server that forgot the file
        raise Odd(f"{os.path.basename(path)} cannot be read: {error.strerror}") from error
    finally:
        os.close(handle)


def write(folder: str, name: str, data: bytes) -> str:
    """Put a file in place all at once; its path. A reader sees the old bytes or these.

    Nothing is synced: after a crash of the machine a file may be empty, and its digest says so.
    """
    path = os.path.join(folder, name)
    temporary = os.path.join(folder, f".tmp.{os.getpid()}.{secrets.token_hex(6)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)  # the umask decides
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def group_names(folder: str, metadata: str) -> list[str] | None:
    """Names of a group's files, without their paths; None where there is no group of this name.

    Raises:
        Odd: the list is damaged.
    """
    path = os.path.join(folder, GROUP + metadata)
    if not os.path.lexists(path):
        return None
    try:
        listed = json.loads(read(path))["child_paths"]
        names = [*listed]  # a mapping to paths, or names alone where Triton's remote manager wrote it
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Odd("its list of files cannot be read") from error
    if metadata not in names or not all(isinstance(name, str) and is_plain_name(name) for name in names):
        raise Odd("its list of files holds other names")
    return names


def load_sidecar(folder: str, name: str) -> Sidecar | None:
    """The sidecar of a group (by its metadata's name) or of a file of its own; None where there is none. Raises Odd."""
    path = os.path.join(folder, SIDECAR + name)
    if not os.path.lexists(path):
        return None
    sidecar = Sidecar.from_json(read(path))
    if sidecar.key and sidecar.key != os.path.basename(folder):
        raise Odd("it was written for another key")
    return sidecar


def verify(folder: str, names: Iterable[str], sidecar: Sidecar, metadata: str = "") -> None:
    """Compare every byte of an entry's files with its sidecar, and a group's metadata with the entry's key.

    The sidecar alone would fit in a copy under another kernel's key as well as it does here.

    Args:
        metadata: name of the group's metadata, ``""`` for a file of its own.

    Raises:
        Odd: at the first difference.
    """
    for name in names:
        stored = sidecar.files.get(name)
        if stored is None:
            raise Odd(f"{name} is not in its sidecar")
        data = read(os.path.join(folder, name))
        if len(data) != stored.size:
            raise Odd(f"{name} has {len(data)} bytes instead of {stored.size}")
        if hashlib.sha256(data).hexdigest() != stored.sha256:
            raise Odd(f"{name} has other bytes than were written")
        if name == metadata:
            check_key(os.path.basename(folder), data)


def inspect(folder: str, names: Iterable[str], metadata: str = "") -> Sidecar:
    """A sidecar for files that have none, after a look at their structure.

    Args:
        metadata: name of the group's metadata, ``""`` for a file of its own.

    Raises:
        Odd: a file is missing, empty, cut off, or holds something else than its name says.
    """
    files = ((name, read(os.path.join(folder, name))) for name in names)
    return inspect_content(os.path.basename(folder), files, metadata)


def inspect_content(key: str, files: Iterable[tuple[str, bytes]], metadata: str = "") -> Sidecar:
    """As :func:`inspect`, of bytes that may come from anywhere. Raises Odd."""
    stored = {}
    for name, data in files:
        if why := _damage(name, data):
            raise Odd(f"{name}: {why}")
        if name == metadata:
            check_key(key, data)
        stored[name] = Stored.of(data)
    return Sidecar(stored, key=key)


def _damage(name: str, data: bytes) -> str:
    extension = name.rpartition(".")[2]
    if not data:
        return "it is empty"
    if extension in _BINARIES or extension == "so" or ".so." in name:
        wanted = _BINARIES.get(extension)
        if why := elf.damage(data):
            return why
        return "it is code of another kind of machine" if wanted and elf.machine(data) != wanted else ""
    if extension == "json":
        try:
            return "" if isinstance(json.loads(data), dict) else "it holds no mapping"
        except (ValueError, RecursionError):
            return "it is no JSON"
    if extension in MEMBERS and b"\0" in data:
        return "it is no text"
    return ""


def check_key(key: str, metadata: bytes) -> None:
    """Metadata name the hash that the folder is called by: an entry under another key is another kernel's (Odd)."""
    try:
        content = json.loads(metadata)
        hashed = content["hash"]
        if not isinstance(content["target"], dict) or not isinstance(content["name"], str):
            raise Odd("its metadata are incomplete")
        hashed = bytes.fromhex(hashed)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise Odd("its metadata are incomplete") from error
    if is_key(key) and _bits(key) != hashed:
        raise Odd("it lies under another kernel's key")


def folder_of(digest: str) -> str:
    """Name of the folder for a key, as Triton makes it. Raises ValueError where it is no hexadecimal text."""
    return base64.b32encode(bytes.fromhex(digest)).decode("ascii").rstrip("=")


def is_key(name: str) -> bool:
    """Whether a name is a folder's that Triton made of a SHA-256."""
    return _KEY.fullmatch(name) is not None


def _bits(key: str) -> bytes:
    """The SHA-256 that a folder is named by; as base64.b32decode, ten times as fast."""
    return (int(key.translate(_DIGITS), 32) >> 4).to_bytes(32, "big")


def groups_in(folder: str) -> list[str]:
    """Metadata names of all groups an entry holds."""
    try:
        return sorted(name.removeprefix(GROUP) for name in os.listdir(folder) if name.startswith(GROUP))
    except OSError:
        return []


def loose_in(folder: str) -> list[str]:
    """Files of an entry that belong to no group: host libraries, results of autotuning."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return sorted(name for name in names if is_plain_name(name) and is_loose(name))


def is_loose(name: str) -> bool:
    """Whether a file is used on its own, rather than as part of a group."""
    return name.endswith(".autotune.json") or name.rpartition(".")[2] not in MEMBERS


def entries_in(root: str) -> Iterator[os.DirEntry[str]]:
    """Folders of a cache that are entries."""
    try:
        with os.scandir(root) as found:
            yield from (each for each in found if is_key(each.name) and each.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return


def quarantine(folder: str, name: str, names: Iterable[str], why: str) -> Path | None:
    """Take a damaged group (or file of its own) out of use; where its files can be looked at, None if nowhere.

    Never raises: this happens while a kernel is looked up.
    """
    root = os.path.dirname(folder)
    place: Path | None = None
    with contextlib.suppress(OSError):
        shelf = Path(root, QUARANTINE)
        shelf.mkdir(mode=0o700, exist_ok=True)
        if len(os.listdir(shelf)) < KEPT_DAMAGED:
            place = shelf / f"{os.path.basename(folder)}.{secrets.token_hex(4)}"
            place.mkdir(mode=0o700)
            for each in (*names, GROUP + name, SIDECAR + name):
                with contextlib.suppress(OSError):
                    os.link(os.path.join(folder, each), place / each, follow_symlinks=False)
            (place / "why.txt").write_text(f"{why}\n", encoding="utf-8")
    for each in (GROUP + name, SIDECAR + name):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, each))
    return place


def write_group(folder: str, metadata: str, names: Iterable[str], sidecar: Sidecar) -> str:
    """Complete an entry whose files are in place: sidecar first, so that a listed group always has one."""
    write(folder, SIDECAR + metadata, sidecar.to_json())
    return write(folder, GROUP + metadata, group_list(folder, names))


def group_list(folder: str, names: Iterable[str]) -> bytes:
    """Triton's list of a group in a folder, with the absolute paths that the stock manager reads."""
    return json.dumps({"child_paths": {name: os.path.join(folder, name) for name in names}}).encode()


def merge_parts(folder: str, metadata: str, parts: Mapping[str, Any]) -> None:
    """Write down in a group's sidecar what its key was made of. Does nothing where it cannot be written."""
    with contextlib.suppress(Odd, OSError):
        sidecar = load_sidecar(folder, metadata)
        if sidecar is not None and not sidecar.parts.items() >= parts.items():
            sidecar.parts = {**sidecar.parts, **parts}
            write(folder, SIDECAR + metadata, sidecar.to_json())
