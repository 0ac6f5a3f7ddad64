"""Where compiled kernels may live: trouble is named before the engine starts, and the next folder is taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fer.errors import FerError
from fer.kernels import components, places
from tests.support import kernel_entries as made


def test_the_users_choice_comes_first(tmp_path: Path) -> None:
    place = places.choose({"TRITON_CACHE_DIR": str(tmp_path / "mine"), "HOME": str(tmp_path)})
    assert (place.path, place.chosen_by, place.refused) == (tmp_path / "mine", "TRITON_CACHE_DIR", {})
    assert places.choose({"TRITON_HOME": str(tmp_path)}).path == tmp_path / ".triton" / "cache"
    assert places.choose({"HOME": str(tmp_path)}).path == tmp_path / ".triton" / "cache"
    assert not list((tmp_path / "mine").iterdir())


def test_noexec_is_named_and_the_next_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K4, as the kernel tells it: a mapping that may be executed is refused."""
    import mmap

    real = mmap.mmap
    refused = tmp_path / "noexec"

    def deny(handle: int, length: int, flags: int, protection: int) -> mmap.mmap:
        assert protection & mmap.PROT_EXEC
        if os.readlink(f"/proc/self/fd/{handle}").startswith(str(refused)):
            raise PermissionError(1, "Operation not permitted")
        return real(handle, length, flags, protection)

    monkeypatch.setattr(places.mmap, "mmap", deny)
    place = places.choose({"TRITON_CACHE_DIR": str(refused)}, home=tmp_path / "fer")
    assert place.path == tmp_path / "fer" / "kernels" / "triton"
    (why,) = place.refused.values()
    assert "noexec" in why and "TRITON_CACHE_DIR" in why
    assert list(place.refused) == [str(refused)]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file in the way stands for a read-only mount: this also fails for root."""
    (tmp_path / "file").write_text("")
    place = places.choose({"TRITON_CACHE_DIR": str(tmp_path / "file" / "cache")}, home=tmp_path / "fer")
    assert place.chosen_by == "FER_HOME"
    assert "cannot be written to" in next(iter(place.refused.values()))


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre"])
def test_network_file_systems_are_known_by_their_mount(tmp_path: Path, kind: str) -> None:
    device = os.stat(tmp_path).st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / {tmp_path} rw - {kind} server:/export rw\n"
    (tmp_path / "mounts").write_text("22 1 0:99 / /proc rw - proc proc rw\nbroken\n" + line)
    assert places.network(tmp_path, tmp_path / "mounts") == kind
    (tmp_path / "mounts").write_text(line.replace(kind, "ext4"))
    assert places.network(tmp_path, tmp_path / "mounts") == ""
    assert places.network(tmp_path, tmp_path / "none") == ""


def test_a_network_file_system_is_left_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "network", lambda path: "nfs4" if "shared" in str(path) else "")
    (tmp_path / "shared").mkdir()
    place = places.choose({"TRITON_CACHE_DIR": str(tmp_path / "shared" / "cache")}, home=tmp_path / "fer")
    assert place.chosen_by == "FER_HOME"
    assert "nfs4" in next(iter(place.refused.values()))
    assert not (tmp_path / "shared" / "cache").exists()


def test_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without a name and HOME, as in a container with a random id."""
    monkeypatch.setattr(components, "_home_of_user", lambda: "")
    place = places.choose({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, home=tmp_path / "fer")
    assert place.chosen_by == "FER_HOME"
    assert place.refused == {"HOME": "HOME is not set, and this user has no home folder"}


def test_the_last_resort_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(path: Path) -> str:
        return "" if str(path).startswith(str(tmp_path / "tmp")) else "it is full"

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    place = places.choose({"HOME": str(tmp_path)}, home=tmp_path / "fer", look=look)
    assert place.chosen_by == "/tmp"
    assert oct(place.path.parent.stat().st_mode)[-3:] == "700"
    place.path.parent.chmod(0o777)
    with pytest.raises(FerError, match="no folder for compiled kernels") as caught:
        places.choose({"HOME": str(tmp_path)}, home=tmp_path / "fer", look=look)
    assert "mode 0o777" in str(caught.value)


def test_no_compiler_and_no_helper_is_told(tmp_path: Path) -> None:
    """K6: a helper for this installation makes the compiler unnecessary; one for another does not."""
    import sysconfig

    nothing = {"PATH": str(tmp_path / "empty")}
    assert "no C compiler" in places.lacks_compiler(nothing, tmp_path)
    made.library(tmp_path, f"cuda_utils{sysconfig.get_config_var('EXT_SUFFIX')}")
    assert places.lacks_compiler(nothing, tmp_path) == ""
    told = places.lacks_compiler(nothing, tmp_path, helpers_fit="packages: /a -> /b")
    assert "no C compiler" in told and "/a -> /b" in told
    assert places.lacks_compiler({"PATH": os.environ["PATH"], "CC": "sh"}, tmp_path, helpers_fit="x") == ""


def test_a_helper_of_another_python_is_none(tmp_path: Path) -> None:
    made.library(tmp_path, "cuda_utils.cpython-27-x86_64-linux-gnu.so")
    assert "no C compiler" in places.lacks_compiler({"PATH": ""}, tmp_path)


@pytest.mark.parametrize(("mode", "who"), [(0o777, "everybody"), (0o1777, "everybody"), (0o775, ""), (0o700, "")])
def test_a_folder_that_others_can_write_to_is_named_and_taken(tmp_path: Path, mode: int, who: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    place = places.choose({"TRITON_CACHE_DIR": str(cache)}, home=tmp_path / "fer")
    assert (place.path, place.open_to, place.refused) == (cache, who, {})


def test_another_users_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    if owner == 0:
        os.chown(tmp_path, 12345, -1)
        assert places.open_to(tmp_path) == "user 12345"
    else:
        monkeypatch.setattr(places.os, "getuid", lambda: owner + 1)
        assert places.open_to(tmp_path) == f"user {owner}"
