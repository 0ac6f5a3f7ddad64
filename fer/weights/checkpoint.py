"""Which checkpoint an edition was made from: identity by content, decided as cheaply as the question allows.

Three looks, each only where the one before does not decide:

1. *stat*: files whose device, inode, size, mtime and ctime are unchanged are the same files.
2. *samples*: a few hundred bytes of every tensor. Other samples are a quick, certain miss; a fine-tune with the same
   headers ends here.
3. *full*: every byte. Only this decides a hit for files that were copied or touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

from fer.errors import CheckpointError
from fer.weights.shards import read_header, resolve

__all__ = [
    "CheckpointIdentity",
    "FileStamp",
    "Verdict",
    "changed",
    "compare",
    "full_digest",
    "resolve",
    "sample_digest",
    "stamp",
]

SCHEMA = 1
_CHUNK = 4 << 20  # bytes a read; large enough that hashing, outside the GIL, is what takes the time
_SAMPLE = 256  # bytes a sample, four of them a tensor
_TICK_NS = 20_000_000  # file times advance in kernel ticks of up to 10 ms
_STAT = ("device", "inode", "size", "mtime_ns", "ctime_ns")


@dataclass(frozen=True, kw_only=True)
class FileStamp:
    """One file as the file system describes it; ``name`` is relative to the folder all files have in common."""

    path: str
    name: str
    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, kw_only=True)
class CheckpointIdentity:
    """Files and, where already computed, the digests of their content (``""``: not yet)."""

    files: tuple[FileStamp, ...]
    samples: str = ""
    full: str = ""

    def to_json(self) -> bytes:
        """The identity as JSON text."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, sort_keys=True).encode("ascii")

    @classmethod
    def from_json(cls, data: bytes) -> CheckpointIdentity:
        """What :meth:`to_json` wrote.

        Raises:
            CheckpointError: it is something else, or of another schema.
        """
        try:
            content = json.loads(data)
            if content.pop("schema") != SCHEMA:
                raise ValueError("another schema")
            content["files"] = tuple(FileStamp(**file) for file in content["files"])
            identity = cls(**content)
            texts = [identity.samples, identity.full, *(t for file in identity.files for t in (file.path, file.name))]
            numbers = [getattr(file, key) for file in identity.files for key in _STAT]
            if not all(isinstance(t, str) for t in texts) or not all(type(n) is int for n in numbers):
                raise TypeError("a field has the wrong type")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError("a checkpoint identity cannot be read", why=str(error)) from error
        return identity


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether two checkpoints are the same, which look decided it, and why, in words for the report.

    ``now`` is the current identity together with the digests that had to be computed, so that they are not lost.
    """

    same: bool
    by: Literal["stat", "samples", "full", "unknown"]
    why: str
    now: CheckpointIdentity


def stamp(files: Iterable[str | os.PathLike[str]]) -> CheckpointIdentity:
    """Identity of ``files`` without digests. Links are followed.

    A file changed within the last tick of the file system's clock could change once more and show the same times;
    such files are looked at again a tick later (at most 20 ms). What this cannot see is a write through a writable
    mapping that was already dirty.

    Raises:
        CheckpointError: a file is missing or is no regular file. Field: ``path``.
    """
    paths = sorted({Path(file).absolute() for file in files})
    root = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
    stamps = tuple(_stamp(path, root) for path in paths)
    newest = max((file.ctime_ns for file in stamps), default=0)
    if 0 <= time.time_ns() - newest < _TICK_NS:
        time.sleep(_TICK_NS / 1e9)
        stamps = tuple(_stamp(path, root) for path in paths)
    return CheckpointIdentity(files=stamps)


def changed(before: CheckpointIdentity, after: CheckpointIdentity) -> list[str]:
    """What differs between two stamps of the same files, one line a file; empty where nothing does.

    Take one stamp before a load and one after it: where they differ, the module mixes two checkpoints.
    """
    old, new = _by_name(before), _by_name(after)
    lines = [f"{name} is gone" for name in sorted(old.keys() - new.keys())]
    lines += [f"{name} is new" for name in sorted(new.keys() - old.keys())]
    for name in sorted(old.keys() & new.keys()):
        keys = [key.removesuffix("_ns") for key in _STAT if getattr(old[name], key) != getattr(new[name], key)]
        lines += [f"{name} has another {', '.join(keys)}"] if keys else []
    return lines


def compare(
    now: CheckpointIdentity, kept: CheckpointIdentity, *, cancelled: Callable[[], bool] | None = None
) -> Verdict:
    """Whether the files of ``now`` hold what the files of ``kept`` held.

    Digests of the current files are computed when needed: samples take milliseconds, the full digest reads every byte
    (about 1 to 2 GB/s a file, files in parallel) and is only taken where the samples agree and ``kept`` has one.

    Raises:
        CheckpointError: a current file cannot be read, or changes while it is read.
    """
    differences = changed(kept, now)
    if not differences:
        why = "the files are unchanged" if now.files else "there are no checkpoint files"
        return Verdict(same=True, by="stat", why=why, now=now)
    moved = "; ".join(differences[:3]) + (f"; {len(differences) - 3} more" if len(differences) > 3 else "")
    sizes = [{name: file.size for name, file in _by_name(identity).items()} for identity in (now, kept)]
    if sizes[0] != sizes[1]:
        return Verdict(same=False, by="stat", why=moved, now=now)
    paths = [file.path for file in now.files]
    if kept.samples:
        now = replace(now, samples=now.samples or sample_digest(paths))
        if now.samples != kept.samples:
            return Verdict(same=False, by="samples", why=f"{moved}; its content differs", now=now)
    if not kept.full:
        why = f"{moved}; the kept checkpoint's full digest is not there yet, so its content cannot be compared"
        return Verdict(same=False, by="unknown", why=why, now=now)
    now = replace(now, full=now.full or full_digest(paths, cancelled=cancelled))
    if not now.full:
        return Verdict(same=False, by="unknown", why=f"{moved}; the comparison of its content was cancelled", now=now)
    same = now.full == kept.full
    return Verdict(same=same, by="full", why=f"{moved}; its content {'is the same' if same else 'differs'}", now=now)


def sample_digest(files: Iterable[str | os.PathLike[str]]) -> str:
    """SHA-256 over headers and four samples of every tensor: its begin, its end and two places its name decides.

    Files that are no safetensors are sampled as if they were one tensor, with longer samples.

    Raises:
        CheckpointError: a file cannot be read, is damaged, or changes while it is read.
    """
    return _combined("samples", stamp(files).files, _sample_file, None)


def full_digest(files: Iterable[str | os.PathLike[str]], *, cancelled: Callable[[], bool] | None = None) -> str:
    """SHA-256 over the names and every byte of ``files``; ``""`` when ``cancelled()`` turned true meanwhile.

    Files are hashed in parallel threads; ``cancelled`` is asked every 4 MiB.

    Raises:
        CheckpointError: a file cannot be read, or changes while it is read.
    """
    return _combined("full", stamp(files).files, _hash_file, cancelled)


class _Cancelled(Exception):
    """A full digest is no longer wanted."""


_FileDigest = Callable[[BinaryIO, FileStamp, Callable[[], bool]], bytes]


def _combined(kind: str, files: Sequence[FileStamp], digest: _FileDigest, cancelled: Callable[[], bool] | None) -> str:
    """Digest of all files: of each one's name, size and content, in the order of names."""
    failed = threading.Event()

    def asked() -> bool:
        return failed.is_set() or (cancelled is not None and cancelled())

    def one(file: FileStamp) -> bytes:
        path = Path(file.path)
        try:
            with path.open("rb", buffering=0) as opened:
                content = digest(opened, file, asked)
                after = os.fstat(opened.fileno())
        except OSError as error:
            raise _unreadable(path, error) from error
        if (after.st_ino, after.st_size, after.st_mtime_ns) != (file.inode, file.size, file.mtime_ns):
            raise CheckpointError(f"{path} changed while it was read", fix="Start again", path=str(path))
        return content

    total = hashlib.sha256(f"fer checkpoint {kind} {SCHEMA}\n".encode())
    # Not every core: this runs beside a serving engine.
    with ThreadPoolExecutor(
        max_workers=max(1, min(8, (os.cpu_count() or 1) - 2)), thread_name_prefix="fer-sha"
    ) as pool:
        try:
            for file, content in zip(files, pool.map(one, files), strict=True):
                total.update(json.dumps([file.name, file.size]).encode("ascii") + content)
        except _Cancelled:
            return ""
        finally:
            failed.set()  # after an error the other files' threads end within a chunk
    return total.hexdigest()


def _hash_file(opened: BinaryIO, file: FileStamp, cancelled: Callable[[], bool]) -> bytes:
    digest, buffer, left = hashlib.sha256(), memoryview(bytearray(min(_CHUNK, max(1, file.size)))), file.size
    while left > 0:  # no further, or a file that grows faster than it is read would never end
        if cancelled():
            raise _Cancelled
        count = opened.readinto(buffer[:left])  # type: ignore[attr-defined]  # a raw file, opened without buffering
        if not count:
            break
        digest.update(buffer[:count])
        left -= count
    return digest.digest()


def _sample_file(opened: BinaryIO, file: FileStamp, cancelled: Callable[[], bool]) -> bytes:
    digest = hashlib.sha256()
    if file.name.endswith(".safetensors"):
        header = read_header(Path(file.path))
        digest.update(header.raw)
        spans = [(tensor.name, tensor.begin, tensor.end, _SAMPLE) for tensor in header.tensors]
    else:
        spans = [(f"{file.name} {part}", 0, file.size, 16 * _SAMPLE) for part in range(4)]
    for name, begin, end, length in spans:
        for offset in _places(name, begin, end, length):
            digest.update(os.pread(opened.fileno(), min(length, end - offset), offset))
    return digest.digest()


def _places(name: str, begin: int, end: int, length: int) -> list[int]:
    """Where to sample: fixed by the name, so that two processes look at the same bytes."""
    if end - begin <= 4 * length:
        return list(range(begin, end, length))
    seed, last = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest(), end - begin - length
    middle = [int.from_bytes(seed[i : i + 8], "little") % last for i in (0, 8)]
    return [begin, *(begin + offset for offset in sorted(middle)), begin + last]


def _stamp(path: Path, root: Path) -> FileStamp:
    try:
        found = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    if not path.is_file():
        raise CheckpointError(f"{path} is no regular file", path=str(path))
    return FileStamp(
        path=str(path),
        name=str(path.relative_to(root)),
        device=found.st_dev,
        inode=found.st_ino,
        size=found.st_size,
        mtime_ns=found.st_mtime_ns,
        ctime_ns=found.st_ctime_ns,
    )


def _by_name(identity: CheckpointIdentity) -> dict[str, FileStamp]:
    return {file.name: file for file in identity.files}


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    fix = "Check the path and its permissions"
    return CheckpointError(f"cannot read {path}", why=error.strerror or str(error), fix=fix, path=str(path))
