"""The writer of archives: it adds, and loses nothing that is kept, whatever this start's caches hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fer.kernels import pack, unpack, writer
from tests.support import kernel_entries as made


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Two kernels of another machine's cache."""
    for name in ("add", "scale"):
        made.make(tmp_path / "theirs", name)
    pack.pack({"triton": tmp_path / "theirs"}, tmp_path / "a.ferkernels")
    return tmp_path / "a.ferkernels"


def write(archive: Path, root: Path, *names: str, **more: Any) -> dict[str, Any]:
    keys = [made.key_of(f"{name}90") for name in names]
    return writer.write(writer.Request(str(root), str(archive), keys, 90, **more))


def functions(archive: Path) -> list[str]:
    return sorted(str(each.parts["function"]) for each in unpack.verify(archive).entries if each.groups)


@pytest.mark.parametrize("doubt", [False, True])
def test_what_this_cache_lacks_stays_in_the_archive(archive: Path, tmp_path: Path, doubt: bool) -> None:
    """As of another machine with the same home, or after a restore for which the disk was too full."""
    made.make(tmp_path / "mine", "softmax", options={"num_warps": 8})
    assert write(archive, tmp_path / "mine", "softmax", doubt=doubt) == {"written": 1, "entries": 3}
    assert functions(archive) == ["model:add", "model:scale", "model:softmax"]
    unpack.unpack(archive, {"triton": tmp_path / "back"})
    for name in ("theirs", "mine"):
        assert made.content(tmp_path / name).items() <= made.content(tmp_path / "back").items()
    again = archive.read_bytes()
    assert write(archive, tmp_path / "mine", "softmax", doubt=doubt)["written"] == 0
    assert archive.read_bytes() == again


def test_what_another_triton_compiled_goes(archive: Path, tmp_path: Path) -> None:
    made.make(tmp_path / "mine", "softmax", version="3.10.0")
    write(archive, tmp_path / "mine", "softmax")
    assert functions(archive) == ["model:softmax"]


def test_code_for_another_host_goes(tmp_path: Path) -> None:
    made.library(tmp_path / "theirs")
    made.make(tmp_path / "theirs", "add")
    archive = tmp_path / "a.ferkernels"
    pack.pack({"triton": tmp_path / "theirs"}, archive)
    made.make(tmp_path / "mine", "scale")
    write(archive, tmp_path / "mine", "scale")
    assert len(unpack.verify(archive).entries) == 3  # nothing of this host's own is in the way
    made.with_manifest(archive, lambda data: data["host"].update(machine="other"))
    made.library(tmp_path / "mine", "cuda_utils2.cpython-311-x86_64-linux-gnu.so")
    write(archive, tmp_path / "mine", "scale")
    manifest = unpack.verify(archive)
    assert manifest.host["machine"] != "other"
    assert [[file.name for file in each.files] for each in manifest.entries if each.code] == [
        ["cuda_utils2.cpython-311-x86_64-linux-gnu.so"]
    ]


@pytest.mark.parametrize("doubt", [False, True])
def test_a_damaged_archive_is_replaced(archive: Path, tmp_path: Path, doubt: bool) -> None:
    data = archive.read_bytes()
    archive.write_bytes(data[:-40])
    made.make(tmp_path / "mine", "softmax")
    write(archive, tmp_path / "mine", "softmax", doubt=doubt)
    assert functions(archive) == ["model:softmax"]


def test_blobs_that_entries_share_come_in_the_new_order(tmp_path: Path) -> None:
    """The entry that named a blob first is another one now."""
    theirs, mine, archive = tmp_path / "theirs", tmp_path / "mine", tmp_path / "a.ferkernels"
    names = ("add", "scale", "softmax", "gelu")
    for name in names:
        made.make(theirs, name)
    pack.pack({"triton": theirs}, archive)
    first = min(names, key=lambda name: made.key_of(f"{name}90"))
    folder = made.make(mine, first, sidecar=False)
    (folder / f"{first}.source").write_bytes(b"not the shared text")
    write(archive, mine, first)
    assert len(unpack.verify(archive).entries) == 4


def test_what_a_killed_writer_left_goes(archive: Path, tmp_path: Path) -> None:
    left = archive.with_name(f".{archive.name}.1.aa")
    left.write_bytes(b"half")
    made.make(tmp_path / "mine", "softmax")
    write(archive, tmp_path / "mine", "softmax")
    assert not left.exists()
