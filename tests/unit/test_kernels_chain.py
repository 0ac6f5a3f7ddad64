"""A user's cache manager behind FER's: asked where FER's cache has nothing, given what is compiled, never trusted
blindly, and left out where it fails. The managers are Triton's own classes and what users derive from them.

The file runs with any Triton from 3.6 on; put another one first on PYTHONPATH.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fer.kernels import chain, entry, hooks, manager

pytest.importorskip("triton")

from tests.support import kernels
from tests.support import kernels_managers as managers

NAME = "add.json"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chain, "_classes", {})
    monkeypatch.setattr(chain, "_left_out", {})
    monkeypatch.setattr(manager, "COUNTS", manager.Counts())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(managers.FOLDER, str(tmp_path / "theirs"))
    monkeypatch.setenv("TRITON_REMOTE_CACHE_BACKEND", f"{managers.__name__}:Backend")
    (tmp_path / "theirs").mkdir()
    yield
    managers.Backend.KEPT.clear()
    managers.Backend.ASKED.clear()


def choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's environment is when a start begins."""
    environ = {"TRITON_CACHE_MANAGER": name if ":" in name else f"{managers.__name__}:{name}"}
    assert hooks._claim_manager(environ) == ""
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)


def lookup() -> tuple[int, int, bytes]:
    """Hits, compilations and the binary of one lookup."""
    with kernels.counted() as counted:
        binary = kernels.compile_add().asm["cubin"]
    return counted.hits, len(counted.compiled), binary


def the_entry(root: Path) -> Path:
    (found,) = entry.entries_in(str(root))
    return Path(found.path)


@pytest.mark.parametrize("name", ["Shared", "Linked", "Remote"])
def test_what_is_compiled_goes_to_both_and_comes_back_from_theirs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(name, monkeypatch)
    hits, compiled, binary = lookup()
    assert (hits, compiled) == (0, 1)
    assert managers.Backend.KEPT if name == "Remote" else entry.groups_in(str(the_entry(tmp_path / "theirs")))
    shutil.rmtree(tmp_path / "cache")  # another machine, with the same shared cache
    assert lookup() == (1, 0, binary)
    assert manager.COUNTS.fetched == 1
    there = the_entry(tmp_path / "cache")
    assert {entry.SIDECAR + NAME, entry.GROUP + NAME} <= {path.name for path in there.iterdir()}
    asked = len(managers.Backend.ASKED)
    assert lookup() == (1, 0, binary)  # from FER's own cache now
    assert (manager.COUNTS.fetched, len(managers.Backend.ASKED)) == (1, asked)
    assert not manager.COUNTS.damaged and not chain.trouble()


@pytest.mark.parametrize("name", ["Shared", "Remote"])
def test_what_theirs_gives_damaged_is_compiled_again_and_healed_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(name, monkeypatch)
    binary = lookup()[2]
    shutil.rmtree(tmp_path / "cache")
    if name == "Remote":
        (kept,) = (key for key in managers.Backend.KEPT if key[1] == "add.cubin")
        managers.Backend.KEPT[kept] = binary[:100]
    else:
        (the_entry(tmp_path / "theirs") / "add.cubin").write_bytes(binary[:100])
    with caplog.at_level(logging.WARNING, "fer"):
        assert lookup() == (0, 1, binary)
    assert "gave what is damaged: add.cubin" in caplog.text and name in caplog.text.replace("RemoteCache", "Remote")
    shutil.rmtree(tmp_path / "cache")
    assert lookup() == (1, 0, binary)


def test_damage_here_is_healed_from_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("Shared", monkeypatch)
    binary = lookup()[2]
    path = the_entry(tmp_path / "cache") / "add.cubin"
    path.write_bytes(binary[:-1] + bytes([binary[-1] ^ 1]))
    assert lookup() == (1, 0, binary)
    assert path.read_bytes() == binary
    assert len(manager.COUNTS.damaged) == manager.COUNTS.fetched == 1
    assert lookup() == (1, 0, binary)
    assert manager.COUNTS.fetched == 1


def test_tritons_own_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("triton.runtime.cache:FileCacheManager", monkeypatch)
    hits, compiled, binary = lookup()
    assert (hits, compiled) == (0, 1)
    assert (the_entry(tmp_path / "cache") / (entry.SIDECAR + NAME)).exists()
    assert lookup() == (1, 0, binary)
    shutil.move(tmp_path / "cache", tmp_path / "moved")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    assert lookup() == (1, 0, binary)
    (the_entry(tmp_path / "moved") / "add.cubin").write_bytes(b"")
    assert lookup() == (0, 1, binary)
    assert not manager.COUNTS.fetched and not chain.trouble()


def test_a_key_of_another_kernel_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("Shared", monkeypatch)
    lookup()
    kernels.compile_add(512)
    first, second = (Path(found.path) for found in entry.entries_in(str(tmp_path / "theirs")))
    shutil.rmtree(tmp_path / "cache")
    for path in first.glob("add.*"):
        shutil.copy(second / path.name, path)
    with kernels.counted() as counted:
        kernels.compile_add()
        kernels.compile_add(512)
    assert (counted.hits, len(counted.compiled)) == (1, 1)
    assert "another kernel's key" in "".join(manager.COUNTS.damaged.values())


def test_a_form_of_their_own_in_the_same_folder_stays_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("Squeezed", monkeypatch)
    binary = lookup()[2]
    kept = {path.name: path.read_bytes() for path in the_entry(tmp_path / "cache").iterdir()}
    assert kept["add.cubin"] != binary  # theirs
    assert entry.SIDECAR + NAME not in kept
    assert lookup() == (1, 0, binary)
    assert manager.COUNTS.fetched == 1
    assert {path.name: path.read_bytes() for path in the_entry(tmp_path / "cache").iterdir()} == kept
    monkeypatch.setenv("TRITON_CACHE_MANAGER", f"{managers.__name__}:Squeezed")
    monkeypatch.delenv(chain.VARIABLE)
    assert lookup() == (1, 0, binary)  # theirs alone, as before FER


@pytest.mark.parametrize("name", ["Refuses", "FailsGetGroup", "FailsPut", "FailsPutGroup", "NoManager", "Missing"])
def test_a_broken_manager_is_left_out_and_named(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    choose(name, monkeypatch)
    with caplog.at_level(logging.WARNING, "fer"):
        hits, compiled, binary = lookup()
        kernels.compile_add(512)
    assert (hits, compiled) == (0, 1)
    assert len([line for line in caplog.messages if name in line]) == 1  # once, by name
    assert name in chain.trouble() and "left out" in chain.trouble()
    assert lookup() == (1, 0, binary)


@pytest.mark.parametrize("name", ["no.such.module:Manager", "without_a_class", manager.SPEC])
def test_a_manager_that_cannot_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(chain.VARIABLE, name)
    monkeypatch.setenv("TRITON_CACHE_MANAGER", manager.SPEC)
    assert lookup()[:2] == (0, 1)
    assert lookup()[:2] == (1, 0)
    assert name in chain.trouble()


def test_garbage_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("Garbage", monkeypatch)
    binary = lookup()[2]
    assert lookup() == (1, 0, binary)
    assert not chain.trouble()


def test_names_that_lead_elsewhere_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        managers.Shared, "get_group", lambda self, filename: {"../x": "/etc/passwd", filename: "/etc/passwd"}
    )
    choose("Shared", monkeypatch)
    assert lookup()[:2] == (0, 1)
    assert "other names" in "".join(manager.COUNTS.damaged.values())


def test_files_of_their_own_pass_through_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("Shared", monkeypatch)
    key = entry.folder_of("ab" * 32)
    stored: Any = manager.VerifyingManager(key).put(b'{"best": 1}', "add.autotune.json")
    assert Path(stored).parent.parent == tmp_path / "cache"
    shutil.rmtree(tmp_path / "cache")
    found = manager.VerifyingManager(key).get_file("add.autotune.json")
    assert found is not None and Path(found).read_bytes() == b'{"best": 1}'
    assert Path(found).parent.parent == tmp_path / "cache"
    assert manager.VerifyingManager(key).get_file("other.autotune.json") is None


def test_a_full_disk_leaves_theirs_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("Shared", monkeypatch)
    binary = lookup()[2]
    shutil.rmtree(tmp_path / "cache")

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(entry, "write", full)
    assert lookup() == (1, 0, binary)


def test_what_was_recorded_of_a_manager_that_went_is_forgotten() -> None:
    environ = {chain.VARIABLE: "their:Manager"}
    assert hooks._claim_manager(environ) == ""
    assert environ == {"TRITON_CACHE_MANAGER": manager.SPEC}
    environ = {"TRITON_CACHE_MANAGER": "their:Manager"}
    assert hooks._claim_manager(environ) == ""
    assert environ == {"TRITON_CACHE_MANAGER": manager.SPEC, chain.VARIABLE: "their:Manager"}
    assert hooks._claim_manager(environ) == ""  # again, in a child
    assert environ[chain.VARIABLE] == "their:Manager"
