"""Archives at other places: pinned by digest, fetched once, and never waited for without end."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fer.errors import ArchiveError, OptionError, WaitTimeout
from fer.kernels import pack, remote, unpack
from fer.kernels.remote import Source
from tests.support import kernel_entries as made

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    made.make(tmp_path / "cache", "add")
    pack.pack({"triton": tmp_path / "cache"}, tmp_path / "a.ferkernels")
    return tmp_path / "a.ferkernels"


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_there_and_back_by_a_url(archive: Path, memory: Any) -> None:
    remote.send(archive, "memory://bucket/a.ferkernels")
    fetched = remote.fetch(Source.of("memory://bucket/a.ferkernels"))
    assert fetched.read_bytes() == archive.read_bytes()
    assert len(unpack.verify(fetched).entries) == 1
    assert oct(fetched.stat().st_mode)[-3:] == "600"
    assert oct(fetched.parent.stat().st_mode)[-3:] == "700"


def test_a_pinned_archive_is_fetched_once(archive: Path, memory: Any) -> None:
    remote.send(archive, "memory://bucket/a")
    pinned = Source.of(f"memory://bucket/a@sha256:{digest(archive).upper()}")
    first = remote.fetch(pinned)
    memory.store.clear()
    assert remote.fetch(pinned) == first
    first.write_bytes(b"damaged")
    with pytest.raises(ArchiveError, match="cannot be read"):
        remote.fetch(pinned)


def test_another_content_is_refused_and_not_kept(archive: Path, memory: Any) -> None:
    remote.send(archive, "memory://bucket/a")
    with pytest.raises(ArchiveError, match="not what it must be"):
        remote.fetch(Source.of(f"memory://bucket/a@sha256:{'0' * 64}"))
    assert not list((Path(archive).parent / "fer-home" / "kernels" / "fetched").iterdir())
    with pytest.raises(ArchiveError, match="not what it must be"):
        remote.fetch(Source.of(f"{archive}@sha256:{'0' * 64}"))
    assert remote.fetch(Source.of(f"{archive}@sha256:{digest(archive)}")) == archive


def test_a_file_system_that_hangs_is_left_behind(archive: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    release, ended = threading.Event(), threading.Event()

    def hang(*_: Any) -> None:
        release.wait(20)
        ended.set()
        raise OSError("too late")

    monkeypatch.setattr(remote, "_download", hang)
    with pytest.raises(WaitTimeout, match="did not answer in 0"):
        remote.fetch(Source.of("memory://bucket/a"), timeout_s=0.05)
    release.set()
    assert ended.wait(20)


def test_mistakes_are_named(archive: Path) -> None:
    with pytest.raises(OptionError, match="nosuch"):
        remote.fetch(Source.of("nosuch://bucket/a"))
    with pytest.raises(OptionError, match="names no digest"):
        Source.of("memory://a@sha256:123")
    with pytest.raises(ArchiveError):
        remote.fetch(Source.of("memory://bucket/missing"))


def test_local_files_need_no_fsspec(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_system", None)
    assert remote.fetch(Source.of(str(archive))) == archive
    assert not Source.of(str(archive)).is_url
