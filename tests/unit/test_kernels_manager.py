"""The verifying manager against real damage: whatever is odd is a miss, the compilation heals it, nothing crashes.

The file runs with any Triton from 3.6 on; put another one first on PYTHONPATH.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fer.kernels import entry, manager

pytest.importorskip("triton")

from tests.support import kernels

NAME = "add.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache with one kernel, written by FER's manager."""
    root = tmp_path_factory.mktemp("made") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(root))
        patch.setenv("TRITON_CACHE_MANAGER", manager.SPEC)
        kernels.compile_add()
    yield root


@pytest.fixture
def cache(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in use; the copy's lists still name the original's files."""
    root = tmp_path / "cache"
    shutil.copytree(made, root)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(root))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", manager.SPEC)
    monkeypatch.setattr(manager, "COUNTS", manager.Counts())
    return root


def the_entry(root: Path) -> Path:
    (found,) = entry.entries_in(str(root))
    return Path(found.path)


def lookup() -> tuple[int, int, bytes]:
    """Hits, compilations and the binary of one lookup."""
    with kernels.counted() as counted:
        binary = kernels.compile_add().asm["cubin"]
    return counted.hits, len(counted.compiled), binary


def quarantined(root: Path) -> list[Path]:
    return sorted((root / entry.QUARANTINE).glob("*")) if (root / entry.QUARANTINE).exists() else []


def test_a_sound_entry_is_a_hit(cache: Path) -> None:
    hits, compiled, binary = lookup()
    assert (hits, compiled) == (1, 0)
    assert binary == (the_entry(cache) / "add.cubin").read_bytes()
    assert not quarantined(cache)


def test_a_moved_cache_is_a_hit(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = cache.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    assert lookup()[:2] == (1, 0)


def test_a_copied_cache_gives_its_own_bytes(cache: Path, made: Path) -> None:
    """The list names files of the original, which is still there and is damaged: nobody must look there."""
    victim = the_entry(made) / "add.cubin"
    before = victim.read_bytes()
    victim.write_bytes(b"")
    try:
        hits, compiled, binary = lookup()
    finally:
        victim.write_bytes(before)
    assert (hits, compiled, binary) == (1, 0, before)


def empty(folder: Path) -> None:
    (folder / "add.cubin").write_bytes(b"")


def truncate(folder: Path) -> None:
    (folder / "add.cubin").write_bytes((folder / "add.cubin").read_bytes()[:-100])


def flip(folder: Path) -> None:
    data = bytearray((folder / "add.cubin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "add.cubin").write_bytes(data)


def empty_metadata(folder: Path) -> None:
    (folder / NAME).write_bytes(b"")


def empty_list(folder: Path) -> None:
    (folder / (entry.GROUP + NAME)).write_bytes(b"")


def foreign_list(folder: Path) -> None:
    listed = {"child_paths": {NAME: str(folder / NAME), "../other": "/etc/passwd"}}
    (folder / (entry.GROUP + NAME)).write_text(json.dumps(listed))


def list_of_nothing(folder: Path) -> None:
    (folder / (entry.GROUP + NAME)).write_text('{"child_paths": null}')


def delete_binary(folder: Path) -> None:
    (folder / "add.cubin").unlink()


def delete_ir(folder: Path) -> None:
    (folder / "add.ttir").unlink()


def delete_metadata(folder: Path) -> None:
    (folder / NAME).unlink()


def link_binary(folder: Path) -> None:
    (folder / "add.cubin").rename(folder / "other")
    (folder / "add.cubin").symlink_to(folder / "other")


def folder_for_binary(folder: Path) -> None:
    (folder / "add.ptx").unlink()
    (folder / "add.ptx").mkdir()


def sidecar_without_the_binary(folder: Path) -> None:
    sidecar = json.loads((folder / (entry.SIDECAR + NAME)).read_bytes())
    del sidecar["files"]["add.cubin"]
    (folder / (entry.SIDECAR + NAME)).write_text(json.dumps(sidecar))


def break_sidecar(folder: Path) -> None:
    (folder / (entry.SIDECAR + NAME)).write_text("{")


def other_schema(folder: Path) -> None:
    (folder / (entry.SIDECAR + NAME)).write_text('{"schema": 99, "files": {}, "parts": {}}')


DAMAGES: list[Callable[[Path], None]] = [
    *(empty, truncate, flip, empty_metadata, empty_list, foreign_list, list_of_nothing),
    *(delete_binary, delete_ir, delete_metadata, link_binary, break_sidecar, other_schema),
    sidecar_without_the_binary,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damage_is_a_miss_and_is_healed(
    cache: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    sound = (the_entry(cache) / "add.cubin").read_bytes()
    damage(the_entry(cache))
    with caplog.at_level(logging.WARNING, "fer"):
        hits, compiled, binary = lookup()
    assert (hits, compiled, binary) == (0, 1, sound)
    assert len(quarantined(cache)) == 1
    assert (quarantined(cache)[0] / "why.txt").read_text().strip()
    assert [r.levelname for r in caplog.records if r.name == "fer"] == ["WARNING"]
    assert len(manager.COUNTS.damaged) == 1
    assert lookup() == (1, 0, sound)  # healed


@pytest.mark.parametrize("damage", [empty, truncate, empty_metadata, delete_binary], ids=lambda d: d.__name__)
def test_damage_of_an_entry_without_a_sidecar(cache: Path, damage: Callable[[Path], None]) -> None:
    (the_entry(cache) / (entry.SIDECAR + NAME)).unlink()
    damage(the_entry(cache))
    assert lookup()[:2] == (0, 1)


def test_an_entry_without_a_sidecar_is_adopted(cache: Path) -> None:
    sidecar = the_entry(cache) / (entry.SIDECAR + NAME)
    before = entry.Sidecar.from_json(sidecar.read_bytes()).files
    sidecar.unlink()
    assert lookup()[:2] == (1, 0)
    assert entry.Sidecar.from_json(sidecar.read_bytes()).files == before
    assert manager.COUNTS.adopted == 1
    flip(the_entry(cache))
    assert lookup()[:2] == (0, 1)


def test_an_entry_under_another_key_is_refused(cache: Path) -> None:
    """As where somebody copied folders about: the sidecar would fit, so it is the structure that tells."""
    folder = the_entry(cache)
    (folder / (entry.SIDECAR + NAME)).unlink()
    metadata = json.loads((folder / NAME).read_bytes())
    metadata["hash"] = "00" * 32
    (folder / NAME).write_text(json.dumps(metadata))
    assert lookup()[:2] == (0, 1)
    assert "another kernel's key" in next(iter(manager.COUNTS.damaged.values()))


@pytest.mark.parametrize("sidecar", [True, False])
def test_a_folder_copied_to_another_key_is_no_kernel_of_that_key(cache: Path, sidecar: bool) -> None:
    """Every digest fits, and it is the wrong binary."""
    folder, other = the_entry(cache), cache / ("A" * 52)
    if not sidecar:
        (folder / (entry.SIDECAR + NAME)).unlink()
    shutil.copytree(folder, other)
    assert manager.VerifyingManager(other.name).get_group(NAME) is None
    assert manager.VerifyingManager(folder.name).get_group(NAME) is not None


def test_a_group_whose_sidecar_does_not_know_the_key_is_held_against_its_metadata(cache: Path) -> None:
    """As one of an earlier version, which wrote down no key."""
    folder, other = the_entry(cache), cache / ("A" * 52)
    known = entry.load_sidecar(str(folder), NAME)
    assert known is not None
    shutil.copytree(folder, other)
    (other / (entry.SIDECAR + NAME)).write_bytes(entry.Sidecar(known.files).to_json())
    assert manager.VerifyingManager(other.name).get_group(NAME) is None


def test_a_file_of_its_own_under_another_key_is_refused(cache: Path) -> None:
    one = manager.VerifyingManager("A" * 52)
    one.put("{}", "add.autotune.json", binary=False)
    shutil.copytree(one.cache_dir, cache / ("B" * 52))
    assert manager.VerifyingManager("B" * 52).get_file("add.autotune.json") is None
    assert one.get_file("add.autotune.json") is not None


DEEP = b"[" * 200_000


@pytest.mark.parametrize("name", [NAME, entry.GROUP + NAME, entry.SIDECAR + NAME])
@pytest.mark.parametrize("sidecar", [True, False])
def test_texts_without_an_end_do_not_crash_the_lookup(cache: Path, name: str, sidecar: bool) -> None:
    folder = the_entry(cache)
    if not sidecar:
        (folder / (entry.SIDECAR + NAME)).unlink()
    (folder / name).write_bytes(DEEP)
    assert lookup()[:2] == (0, 1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (entry.GROUP + NAME, '{"child_paths": {"add.json": "", "\\ud800": ""}}'),
        (entry.SIDECAR + NAME, '{"schema": 1, "files": {"add.json": [Infinity, ""]}, "parts": {}}'),
    ],
)
def test_names_and_figures_that_are_none_do_not_crash_the_lookup(cache: Path, name: str, text: str) -> None:
    folder = the_entry(cache)
    if name.startswith(entry.GROUP):
        (folder / (entry.SIDECAR + NAME)).unlink()
    (folder / name).write_text(text)
    assert lookup()[:2] == (0, 1)


def test_a_disk_that_cannot_read_is_a_miss(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(handle: int, count: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", read)
        assert manager.VerifyingManager(the_entry(cache).name).get_group(NAME) is None
    assert "Input/output error" in next(iter(manager.COUNTS.damaged.values()))


def test_a_directory_in_place_of_a_file_does_not_crash_the_lookup(cache: Path) -> None:
    folder_for_binary(the_entry(cache))
    assert lookup()[:2] == (0, 1)


def test_only_the_first_damage_is_a_warning(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "fer"):
        for damage in (empty, flip):
            damage(the_entry(cache))
            lookup()
    assert [r.levelname for r in caplog.records if r.name == "fer"] == ["WARNING", "DEBUG"]


def test_the_quarantine_is_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "KEPT_DAMAGED", 1)
    for damage in (empty, flip):
        damage(the_entry(cache))
        assert lookup()[:2] == (0, 1)
    assert len(quarantined(cache)) == 1


def test_the_stock_manager_reads_what_was_written(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "fresh"))
    sound = lookup()[2]
    monkeypatch.delenv("TRITON_CACHE_MANAGER")
    assert lookup() == (1, 0, sound)


def test_what_the_stock_manager_wrote_is_a_hit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "stock"))
    monkeypatch.delenv("TRITON_CACHE_MANAGER", raising=False)
    sound = lookup()[2]
    (tmp_path / "stock").rename(tmp_path / "moved")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", manager.SPEC)
    assert lookup() == (1, 0, sound)


def test_only_binaries_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "small"))
    monkeypatch.setenv("TRITON_CACHE_MANAGER", manager.SPEC)
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    assert lookup()[:2] == (0, 1)
    assert lookup()[:2] == (1, 0)


def test_a_full_or_closed_folder_does_not_stop_the_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full: this process compiles, goes on, and leaves no half of an entry."""
    sound = lookup()[2]
    shutil.rmtree(cache)
    real, failed = entry.write, []

    def write(folder: str, name: str, data: bytes) -> str:
        if folder.startswith(str(cache)) and name.endswith((".cubin", ".ptx")):
            failed.append(name)
            raise OSError(28, "No space left on device")
        return real(folder, name, data)

    monkeypatch.setattr(entry, "write", write)
    with caplog.at_level(logging.WARNING, "fer"):
        assert lookup() == (0, 1, sound)
    assert failed
    assert "No space left" in caplog.text
    monkeypatch.setattr(entry, "write", real)
    assert not entry.groups_in(str(the_entry(cache)))
    assert lookup()[:2] == (0, 1)


def test_nothing_temporary_is_left_where_directories_are_busy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K1: NFS answers EBUSY to the removal of a directory; the stock manager fails there."""

    def removedirs(path: str) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "removedirs", removedirs)
    empty(the_entry(cache))
    assert lookup()[:2] == (0, 1)
    assert not [name for name in os.listdir(the_entry(cache)) if name.startswith((".tmp", "tmp"))]


def test_a_writer_keeps_its_files_when_a_reader_refuses_the_entry(cache: Path) -> None:
    """A reader that meets a half-written entry takes the lists away, never a file whose path a writer holds."""
    writer = manager.VerifyingManager(the_entry(cache).name)
    path = writer.put(b"half", "add.ptx")
    reader = manager.VerifyingManager(the_entry(cache).name)
    assert reader.get_group(NAME) is None
    assert Path(path).read_bytes() == b"half"


def test_a_reader_between_two_writers_retries(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar was read, then another process replaced files and sidecar: the second look is right."""
    folder = str(the_entry(cache))
    names = entry.group_names(folder, NAME) or []
    fresh = entry.load_sidecar(folder, NAME)
    assert fresh is not None
    stale = entry.Sidecar({**fresh.files, "add.ptx": entry.Stored.of(b"old")})
    answers = iter([stale, fresh, fresh])
    monkeypatch.setattr(entry, "load_sidecar", lambda folder, name: next(answers))
    assert set(manager.VerifyingManager(Path(folder).name).get_group(NAME) or {}) == set(names)


def test_files_of_their_own_are_verified(cache: Path) -> None:
    """Host libraries and results of autotuning belong to no group."""
    key = "A" * 52
    one = manager.VerifyingManager(key)
    one.put('{"configs": []}', "add.autotune.json", binary=False)
    again = manager.VerifyingManager(key)
    path = again.get_file("add.autotune.json")
    assert path is not None
    Path(path).write_text('{"configs": [1]}')
    assert again.get_file("add.autotune.json") is None
    assert "add.autotune.json" in str(manager.COUNTS.damaged)
    one.put(b"\x7fELF" + b"x" * 10, "helper.so")
    (cache / key / f"{entry.SIDECAR}helper.so").unlink()
    assert again.get_file("helper.so") is None  # cut off, seen by its structure
    assert again.get_file("missing.so") is None


def test_override_and_dump_folders_are_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_DUMP_DIR", str(tmp_path / "dump"))
    monkeypatch.setenv("TRITON_OVERRIDE_DIR", str(tmp_path / "override"))
    dump = manager.VerifyingManager("K", dump=True)
    dump.put("text", "add.ttir")
    assert os.listdir(tmp_path / "dump" / "K") == ["add.ttir"]
    (tmp_path / "override" / "K").mkdir(parents=True)
    (tmp_path / "override" / "K" / "add.ttir").write_text("")
    assert manager.VerifyingManager("K", override=True).get_file("add.ttir")


def test_threads_may_compile_the_same_kernel_at_once(cache: Path) -> None:
    """Each writes the entry while others verify it; everybody gets the kernel."""
    sound = lookup()[2]
    empty(the_entry(cache))
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(kernels.compile_add().asm["cubin"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [sound] * 4
    assert lookup() == (1, 0, sound)
