"""Archives by real protocols, from servers on this machine: S3 by s3fs, HTTP by aiohttp, GCS by gcsfs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fer.errors import ArchiveError, FerError, WaitTimeout
from fer.kernels import pack, remote, unpack
from fer.kernels.remote import Source
from tests.support import kernel_entries as made
from tests.support import remote_servers as servers
from tests.support.processes import ROOT, WAIT_S

SECRET = servers.SECRET


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    made.make(tmp_path / "cache", "add")
    pack.pack({"triton": tmp_path / "cache"}, tmp_path / "a.ferkernels")
    return tmp_path / "a.ferkernels"


@pytest.fixture(scope="module")
def s3_server() -> Iterator[dict[str, str]]:
    pytest.importorskip("s3fs", reason="the extra test-remote is not installed")
    pytest.importorskip("moto", reason="the extra test-remote is not installed")
    with servers.s3() as variables:
        yield variables


@pytest.fixture
def s3(s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The file system as fsspec finds it, with an empty bucket."""
    import s3fs

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    system = s3fs.S3FileSystem()
    if system.exists("bucket"):
        system.rm("bucket", recursive=True)
    system.mkdir("bucket")
    yield system
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="the extra test-remote is not installed")
    servers.Handler.asked.clear()
    with servers.web(tmp_path) as address:
        yield address


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetched(home: Path | None = None) -> list[str]:
    from fer.kernels import store

    return sorted(path.name for path in (store.folder(home) / "fetched").iterdir())


# -- S3


def test_s3_there_and_back(archive: Path, s3: Any) -> None:
    remote.send(archive, "s3://bucket/kernels/a.ferkernels")
    assert s3.info("bucket/kernels/a.ferkernels")["size"] == archive.stat().st_size
    found = remote.fetch(Source.of("s3://bucket/kernels/a.ferkernels"))
    assert found.read_bytes() == archive.read_bytes()
    assert len(unpack.verify(found).entries) == 1


def test_s3_by_digest(archive: Path, s3: Any) -> None:
    remote.send(archive, "s3://bucket/a")
    pinned = Source.of(f"s3://bucket/a@sha256:{digest(archive)}")
    first = remote.fetch(pinned)
    s3.rm("bucket/a")
    assert remote.fetch(pinned) == first  # kept by its digest
    with pytest.raises(ArchiveError, match="cannot be read"):
        remote.fetch(Source.of("s3://bucket/a"))
    s3.pipe("bucket/a", b"something else")
    with pytest.raises(ArchiveError, match="not what it must be"):
        remote.fetch(Source.of(f"s3://bucket/a@sha256:{'0' * 64}"))
    assert fetched() == [first.name]


def test_s3_in_parts(archive: Path, tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def of(size: int, **_: Any) -> int:
        sizes.append(size)
        return 5 << 20  # the least that S3 takes; s3fs would take 50 MiB

    monkeypatch.setattr(sys.modules["s3fs.core"], "calculate_chunksize", of)
    large = tmp_path / "large"
    large.write_bytes(archive.read_bytes() + os.urandom(11 << 20))
    remote.send(large, "s3://bucket/large")
    assert sizes == [large.stat().st_size]
    assert digest(remote.fetch(Source.of("s3://bucket/large"))) == digest(large)


def test_s3_an_upload_that_is_cut_off_leaves_nothing(
    tmp_path: Path, s3: Any, s3_server: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "a"
    archive.write_bytes(os.urandom(1 << 20))
    with servers.cut_off(s3_server["AWS_ENDPOINT_URL"].removeprefix("http://"), after=256 << 10) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{relay.address}")
        type(s3).clear_instance_cache()
        with pytest.raises((ArchiveError, WaitTimeout)):
            remote.send(archive, "s3://bucket/a", timeout_s=2)
        assert relay.cuts
    s3.invalidate_cache()
    assert not s3.exists("bucket/a")


def test_s3_that_never_answers_is_left_behind(archive: Path, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers.silent() as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        type(s3).clear_instance_cache()
        with pytest.raises(WaitTimeout):
            remote.fetch(Source.of("s3://bucket/a"), timeout_s=0.5)
    assert fetched() == []


def test_s3_with_a_key_that_is_refused_tells_no_secret(
    archive: Path, s3: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "fer")

    def refused(*_: Any, **named: Any) -> None:
        raise PermissionError(f"{SECRET} may not read s3://bucket/a?X-Amz-Signature={SECRET}&X-Amz-Expires=60")

    monkeypatch.setattr(type(s3), "open", refused)
    with pytest.raises(ArchiveError) as caught:
        remote.fetch(Source.of("s3://bucket/a"))
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert SECRET not in told and "X-Amz" not in told and "may not read s3://bucket/a?***" in told


def test_a_start_restores_from_s3_and_compiles_where_it_does_not_answer(
    archive: Path, tmp_path: Path, s3: Any, s3_server: dict[str, str]
) -> None:
    remote.send(archive, "s3://bucket/a")

    def start(name: str, source: str, **changed: str) -> dict[str, Any]:
        request = {"options": {"kernels_source": source, "home": str(tmp_path / f"home-{name}")}}
        variables = {"TRITON_CACHE_DIR": str(tmp_path / name), "FER_HOME": str(tmp_path / f"home-{name}")}
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.kernels_child", json.dumps(request)],
            cwd=ROOT,
            env={**os.environ, **s3_server, **variables, **changed},
            capture_output=True,
            text=True,
            timeout=WAIT_S * 4,
        )
        assert done.returncode == 0, done.stderr
        assert SECRET not in done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    restored = start("there", f"s3://bucket/a@sha256:{digest(archive)}")
    assert (restored["path"], restored["details"]["restored"]) == ("restored", 1)
    gone = start("gone", "s3://bucket/other")
    assert gone["path"] == "loaded" and "s3://bucket/other cannot be read" in gone["why"]


# -- HTTP


def test_http_by_digest_and_by_parts_of_a_file(archive: Path, web: str) -> None:
    found = remote.fetch(Source.of(f"http://{web}/plain/a.ferkernels@sha256:{digest(archive)}"))
    assert found.read_bytes() == archive.read_bytes()
    assert servers.Handler.asked


@pytest.mark.parametrize("pinned", [True, False])
def test_http_that_ends_early_is_no_archive(archive: Path, web: str, pinned: bool) -> None:
    source = f"http://{web}/cut/a.ferkernels" + (f"@sha256:{digest(archive)}" if pinned else "")
    with pytest.raises(ArchiveError):
        remote.fetch(Source.of(source))
    assert fetched() == []


def test_http_with_a_password_shows_none(archive: Path, web: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "fer")
    host = f"user:{SECRET}@{web}"
    assert remote.fetch(Source.of(f"http://{host}/user/a.ferkernels")).read_bytes() == archive.read_bytes()
    for place, kind in (
        (f"http://{host}/user/missing?token={SECRET}", "cannot be read"),
        (f"http://{host}/plain/a.ferkernels@sha256:{'0' * 64}", "not what it must be"),
        (f"http://{host}/plain/a.ferkernels@sha256:12", "names no digest"),
        (f"nosuch://{host}/a", "cannot be opened"),
    ):
        with pytest.raises(FerError, match=kind) as caught:
            remote.fetch(Source.of(place))
        assert SECRET not in "".join(traceback.format_exception(caught.value)) + caplog.text


def test_http_that_never_answers_is_left_behind() -> None:
    pytest.importorskip("aiohttp", reason="the extra test-remote is not installed")
    with servers.silent() as address, pytest.raises(WaitTimeout, match=r"did not answer in 0\.2 s"):
        remote.fetch(Source.of(f"http://user:{SECRET}@{address}/a"), timeout_s=0.2)
    assert fetched() == []


# -- GCS


def test_gcs_there_and_back(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gcsfs = pytest.importorskip("gcsfs", reason="gcsfs is not installed; its 30 packages are not part of an extra")
    server = pytest.importorskip("gcp_storage_emulator.server", reason="gcp-storage-emulator is not installed")
    made_server = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    made_server.start()
    try:
        host, port = made_server._api._httpd.server_address[:2]
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
        monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
        gcsfs.GCSFileSystem.clear_instance_cache()
        remote.send(archive, "gs://bucket/a")
        found = remote.fetch(Source.of(f"gs://bucket/a@sha256:{digest(archive)}"))
        assert found.read_bytes() == archive.read_bytes()
    finally:
        made_server.stop()
