"""Archives of kernels: the same input gives the same bytes, and nothing but what FER writes is accepted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fer.errors import ArchiveError
from fer.kernels import container, entry, pack, store, unpack
from fer.kernels.unpack import Terms
from tests.support import kernel_entries as made
from tests.support.kernel_entries import pace  # noqa: F401 - a fixture
from tests.support.processes import ROOT, WAIT_S


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return made.three(tmp_path / "cache")


@pytest.fixture
def archive(cache: Path, tmp_path: Path) -> Path:
    return made.packed(cache, tmp_path / "a.ferkernels")


# -- the way there and back


@pytest.mark.usefixtures("pace")
def test_there_and_back(cache: Path, archive: Path, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "elsewhere"
    outcome = unpack.unpack(archive, made.places(target))
    assert len(outcome.restored) == 3
    assert made.content(target) == made.content(cache)
    for folder in target.iterdir():
        (metadata,) = entry.groups_in(str(folder))
        listed = json.loads((folder / (entry.GROUP + metadata)).read_bytes())["child_paths"]
        assert all(path.startswith(str(target)) for path in listed.values())
    assert oct(archive.stat().st_mode)[-3:] == "600"
    assert not list(target.glob(f"{unpack.STAGE}*"))
    again = tmp_path / "again.ferkernels"
    assert pack.pack({"triton": target}, again).digest == pack.pack({"triton": cache}, archive).digest
    assert again.read_bytes() == archive.read_bytes()


def test_any_tar_reads_it(archive: Path) -> None:
    names = [info.name for info, _ in made.members(archive)]
    assert names[:2] == ["manifest.json", "manifest.sha256"]
    assert all(name.startswith("blobs/") for name in names[2:])
    assert len(set(names)) == len(names)  # equal files are there once
    assert {(info.mtime, info.uid, info.gid, info.mode) for info, _ in made.members(archive)} == {(0, 0, 0, 0o644)}


def test_the_same_bytes_in_every_process(cache: Path, tmp_path: Path) -> None:
    """K21: packed by two processes that order their sets and mappings differently."""
    code = "import sys; from pathlib import Path; from fer.kernels import pack\n"
    code += "print(pack.pack({'triton': Path(sys.argv[1])}, Path(sys.argv[2])).digest)"
    digests = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, str(cache), str(tmp_path / seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "HOME": f"/nowhere/{seed}"},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_only_complete_groups_are_packed(cache: Path, tmp_path: Path) -> None:
    damaged, half, empty = (made.make(cache, name) for name in ("damaged", "half", "empty"))
    (damaged / "damaged.cubin").write_bytes(b"")
    (half / (entry.GROUP + "half.json")).unlink()
    (empty / "empty.ttir").unlink()
    (cache / "tmp.pid_1_x").mkdir()
    packed = pack.pack({"triton": cache}, tmp_path / "a")
    assert len(packed.manifest.entries) == 3


def test_entries_without_a_sidecar_are_packed_after_a_look(tmp_path: Path) -> None:
    made.make(tmp_path / "stock", "add", sidecar=False)
    packed = pack.pack({"triton": tmp_path / "stock"}, tmp_path / "a")
    (found,) = packed.manifest.entries
    assert packed.manifest.parts_of(found)["arch"] == 90
    assert packed.manifest.parts_of(found)["env"] == made.ENV


def test_binaries_only(cache: Path, tmp_path: Path) -> None:
    """What people read is left out of the lists too, so that the rest is still a group."""
    pack.pack({"triton": cache}, tmp_path / "small", pack.Choice(binary_only=True))
    unpack.unpack(tmp_path / "small", made.places(tmp_path / "target"))
    folder = next((tmp_path / "target").iterdir())
    (metadata,) = entry.groups_in(str(folder))
    names = entry.group_names(str(folder), metadata)
    assert {name.rpartition(".")[2] for name in names or ()} == {"json", "cubin"}
    sidecar = entry.load_sidecar(str(folder), metadata)
    assert sidecar is not None
    entry.verify(str(folder), names or (), sidecar)


def test_architectures_are_chosen(cache: Path, tmp_path: Path) -> None:
    made.make(cache, "add", arch=100)
    packed = pack.pack({"triton": cache}, tmp_path / "a", pack.Choice(archs=(100,)))
    assert [packed.manifest.parts_of(each)["arch"] for each in packed.manifest.entries] == [100]
    assert len(packed.left_out) == 3


def test_a_dry_run_writes_nothing(cache: Path, archive: Path, tmp_path: Path) -> None:
    assert len(pack.pack({"triton": cache}, tmp_path / "none", dry_run=True).manifest.entries) == 3
    assert len(unpack.unpack(archive, made.places(tmp_path / "no"), Terms(dry_run=True)).restored) == 3
    assert not (tmp_path / "none").exists() and not (tmp_path / "no").exists()


def test_a_file_that_changes_while_it_is_packed_is_left_out(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = container.write
    victim = next(cache.rglob("scale.ptx"))

    def write(*arguments: Any) -> str:
        if not victim.read_bytes().endswith(b"changed"):
            victim.write_bytes(b"changed")
        return real(*arguments)

    monkeypatch.setattr(container, "write", write)
    packed = pack.pack({"triton": cache}, tmp_path / "a")
    assert packed.left_out == {victim.parent.name: "it changed while it was packed"}
    assert len(unpack.verify(tmp_path / "a").entries) == 2
    assert [path.name for path in tmp_path.iterdir()].count("a") == 1


# -- what is there already


@pytest.mark.usefixtures("pace")
def test_a_sound_entry_wins_and_a_damaged_one_is_healed(cache: Path, archive: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    unpack.unpack(archive, made.places(target))
    victim, other = next(target.rglob("add.cubin")), next(target.rglob("scale.ptx"))
    victim.write_bytes(b"")
    stamp = other.stat().st_ino
    outcome = unpack.unpack(archive, made.places(target))
    assert (len(outcome.kept), outcome.healed) == (2, [victim.parent.name])
    assert made.content(target).keys() - made.content(cache).keys() == {
        name for name in made.content(target) if name.startswith(entry.QUARANTINE)
    }
    assert victim.read_bytes() == next(cache.rglob("add.cubin")).read_bytes()
    assert other.stat().st_ino == stamp


@pytest.mark.usefixtures("pace")
def test_an_empty_folder_in_the_way_is_no_entry(archive: Path, cache: Path, tmp_path: Path) -> None:
    """The stock manager makes one before it compiles, and a compilation may have failed."""
    for folder in cache.iterdir():
        (tmp_path / "target" / folder.name).mkdir(parents=True)
    outcome = unpack.unpack(archive, made.places(tmp_path / "target"))
    assert len(outcome.restored) == 3


def test_eight_processes_unpack_into_one_folder(archive: Path, cache: Path, tmp_path: Path) -> None:
    """K1: all succeed, each entry is complete, nothing temporary is left."""
    code = """
import os, sys
from pathlib import Path
from fer.kernels import unpack
def busy(path): raise OSError(16, "Device or resource busy")
os.removedirs = busy
sys.stdin.readline()
print(unpack.unpack(Path(sys.argv[1]), {"triton": Path(sys.argv[2])}).usable)
"""
    target = tmp_path / "target"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(archive), str(target)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    try:
        answers = [child.communicate("go\n", timeout=WAIT_S * 2)[0].strip() for child in running]
    finally:
        for child in running:
            child.kill()
    assert answers == ["3"] * 8
    assert made.content(target) == made.content(cache)
    assert not list(target.glob(".*"))


@pytest.mark.parametrize("glance", [False, True])
def test_a_folder_in_which_a_compilation_was_killed_gets_its_kernel(tmp_path: Path, glance: bool) -> None:
    """Triton makes the folder at the lookup; the quarantine takes a damaged entry's lists away."""
    made.make(tmp_path / "cache", "add")
    made.make(tmp_path / "cache", "scale")
    made.library(tmp_path / "cache")
    pack.pack({"triton": tmp_path / "cache"}, tmp_path / "a")
    target = tmp_path / "target"
    shutil.copytree(tmp_path / "cache", target)
    (target / made.key_of("add90") / "__grp__add.json").unlink()
    helper = made.library(tmp_path / "cache2").parent.name
    shutil.rmtree(target / helper)
    (target / helper).mkdir()
    terms = unpack.Terms(code="take", glance=glance)
    outcome = unpack.unpack(tmp_path / "a", {"triton": target}, terms)
    assert outcome.kept == [made.key_of("scale90")]
    assert sorted([*outcome.restored, *outcome.healed]) == sorted([made.key_of("add90"), helper])
    assert not store.damage(target)
    assert len(unpack.unpack(tmp_path / "a", {"triton": target}, terms).kept) == 3


@pytest.mark.usefixtures("pace")
def test_a_full_disk_ends_it_with_whole_entries(
    archive: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, target = unpack._write_files, tmp_path / "new"
    first = unpack.peek(archive)[0].entries[0].path

    def full(folder: str, files: Any, *, nested: bool) -> None:
        if not folder.endswith(first):
            raise OSError(28, "No space left on device")
        written(folder, files, nested=nested)

    monkeypatch.setattr(unpack, "_write_files", full)
    with pytest.raises(ArchiveError, match="No space left"):
        unpack.unpack(archive, {"triton": target})
    sound = made.content(cache)
    there = made.content(target)
    assert {name.split("/")[0] for name in there} == {first}
    assert there == {name: data for name, data in sound.items() if name.startswith(first)}
    assert not list(target.glob(".*"))


def test_much_is_never_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        made.make(tmp_path / "cache", f"k{number}")
    archive = made.packed(tmp_path / "cache", tmp_path / "a.ferkernels")
    monkeypatch.setattr(unpack, "_LOOK_AT", 1)
    monkeypatch.setattr(unpack, "_SLOW_S", -1.0)
    monkeypatch.setattr(unpack, "_AHEAD", 2000)
    held: list[int] = []
    place = unpack._Staging.place

    def watched(self: Any, each: Any, files: Any) -> None:
        place(self, each, files)
        held.append(self._bytes)

    monkeypatch.setattr(unpack._Staging, "place", watched)
    outcome = unpack.unpack(archive, {"triton": tmp_path / "new"})
    assert outcome.restored == [each.path for each in outcome.manifest.entries]
    assert len(held) == 40 and max(held) <= 2000


def test_an_unpacker_tidies_after_killed_ones(tmp_path: Path) -> None:
    made.make(tmp_path / "cache", "add")
    pack.pack({"triton": tmp_path / "cache"}, tmp_path / "a")
    old, young = (tmp_path / "target" / f"{unpack.STAGE}{number}.x" for number in (1, 2))
    for folder in (old, young):
        (folder / "half").mkdir(parents=True)
    os.utime(old, (1_000_000_000, 1_000_000_000))
    unpack.unpack(tmp_path / "a", {"triton": tmp_path / "target"})
    assert (old.exists(), young.exists()) == (False, True)
