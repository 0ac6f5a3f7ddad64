"""Archives at other places: any URL that fsspec reads (``s3://``, ``gs://``, ``hf://``, ``https://``, ``memory://``).

An archive is one file, so that no server of FER's own is needed. A source may name the file's digest,
``s3://bucket/a.ferkernels@sha256:3f2a...``: then it is fetched once, kept by its digest, and is what somebody vouched
for. fsspec comes with torch; what it needs for one kind of URL (s3fs, gcsfs, huggingface_hub) is the user's to install,
and credentials are where that looks for them. None of them is ever part of a message: see :func:`shown`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from fer.errors import ArchiveError, OptionError, WaitTimeout
from fer.kernels import store
from fer.kernels.container import MAX_TOTAL
from fer.paths import ensure_private

TIMEOUT_S: Final = 60.0
_CHUNK: Final = 1 << 20
_USER: Final = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY: Final = re.compile(r"\?[^\s'\"<>)\]]+")
_SECRET: Final = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)
_PINNED: Final = re.compile(r"(?P<place>.+)@sha256:(?P<digest>[0-9a-fA-F]{64})")


@dataclass(frozen=True)
class Source:
    """Where an archive is, and the SHA-256 its file must have, ``""`` where nobody said."""

    place: str
    digest: str = ""

    @classmethod
    def of(cls, text: str) -> Source:
        """A path or URL, with or without ``@sha256:DIGEST``. Raises OptionError for a digest that is none."""
        match = _PINNED.fullmatch(text)
        if match:
            return cls(match["place"], match["digest"].lower())
        if "@sha256:" in text:
            raise OptionError(
                f"{shown(text)} names no digest", fix="Give 64 hexadecimal digits after @sha256:", name="source"
            )
        return cls(text)

    @property
    def is_url(self) -> bool:
        return "://" in self.place


def shown(text: str) -> str:
    """A URL, or a text with URLs, without what may be a secret: users, passwords, signatures in queries, and the values
    of variables that look like secrets."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name):
            text = text.replace(value, "***")
    return _QUERY.sub("?***", _USER.sub("***@", text))


def fetch(source: Source, *, home: Path | None = None, timeout_s: float = TIMEOUT_S) -> Path:
    """The archive as a local file; one that is pinned is fetched once.

    Raises:
        WaitTimeout: it did not arrive in time.
        ArchiveError: it cannot be read, or has another digest.
        OptionError: fsspec does not know such URLs here.
    """
    if not source.is_url:
        path = Path(source.place).expanduser()
        if source.digest:
            _check(path, source)
        return path
    folder = store.folder(home) / "fetched"
    ensure_private(store.folder(home))
    ensure_private(folder)
    kept = folder / f"{source.digest or hashlib.sha256(source.place.encode()).hexdigest()}{store.SUFFIX}"
    if source.digest and kept.is_file():
        with contextlib.suppress(ArchiveError):
            _check(kept, source)
            return kept
    temporary = folder / f".{kept.name}.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        _bounded(lambda stop: _download(source.place, temporary, stop), source.place, timeout_s)
        if source.digest:
            _check(temporary, source)
        os.replace(temporary, kept)
    finally:
        temporary.unlink(missing_ok=True)
    return kept


def send(path: Path, url: str, *, timeout_s: float = 10 * TIMEOUT_S) -> None:
    """Put an archive at a URL.

    Raises:
        WaitTimeout, ArchiveError, OptionError: as :func:`fetch`.
    """

    def upload(stop: threading.Event) -> None:
        system, place = _system(url)
        # As one call: a file that was opened for writing and is closed half-way would be there, cut off.
        system.put_file(os.fspath(path), place)
        size = system.info(place).get("size")
        if size is not None and size != path.stat().st_size:
            raise OSError(f"{size} of {path.stat().st_size} bytes arrived")

    _bounded(upload, url, timeout_s)


def _download(url: str, path: Path, stop: threading.Event) -> None:
    system, place = _system(url)
    total = 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as target, system.open(place, "rb") as source:
        while (data := source.read(_CHUNK)) and not stop.is_set():
            total += len(data)
            if total > MAX_TOTAL:
                raise OSError(f"it is larger than {MAX_TOTAL} bytes")
            target.write(data)
        size = getattr(source, "size", None)
        if isinstance(size, int) and total != size and not stop.is_set():
            raise OSError(f"it ended after {total} of {size} bytes")


def _system(url: str) -> tuple[Any, str]:
    import fsspec

    system, place = fsspec.core.url_to_fs(url)
    return system, str(place)


def _bounded(work: Callable[[threading.Event], None], url: str, timeout_s: float) -> None:
    """Run in a thread that is left behind if it takes too long: no file system of fsspec's promises an end."""
    stop = threading.Event()
    failed: list[Exception] = []

    def run() -> None:
        try:
            work(stop)
        except Exception as error:  # each kind of file system has errors of its own
            failed.append(error)

    thread = threading.Thread(target=run, name="fer-kernels-fetch", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        stop.set()
        raise WaitTimeout(
            f"{shown(url)} did not answer in {timeout_s:g} s", fix="Kernels are compiled, or taken from here"
        )
    if not failed:
        return
    (error,) = failed
    url, told = shown(url), str(error) or type(error).__name__
    # A cause is printed with its traceback, in its own words.
    cause = error if shown(told) == told else None
    if isinstance(error, ImportError) or (isinstance(error, ValueError) and not _is_known(url)):
        fix = "Install what fsspec needs for it: s3fs for s3://, gcsfs for gs://, huggingface_hub for hf://"
        raise OptionError(f"{url} cannot be opened", why=shown(told), fix=fix, name="source") from cause
    raise ArchiveError(f"{url} cannot be read or written", why=shown(told), section="file") from cause


def _is_known(url: str) -> bool:
    import fsspec

    return urlsplit(url).scheme in fsspec.available_protocols()


def _check(path: Path, source: Source) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK):
                digest.update(data)
    except OSError as error:
        raise ArchiveError(f"{path} cannot be read", why=error.strerror or str(error), section="file") from error
    if digest.hexdigest() != source.digest:
        raise ArchiveError(
            f"{shown(source.place)} is not what it must be",
            why=f"its SHA-256 is {digest.hexdigest()}, wanted was {source.digest}",
            fix="Ask whoever published the digest",
            section="file",
        )
