"""Places, and the refusal of directories that are not private."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fer import paths
from fer.errors import PeerRefused


def test_runtime_dir_given_by_variable_is_the_only_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FER_RUNTIME_DIR", "/somewhere")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert paths.runtime_dirs() == [Path("/somewhere")]


def test_runtime_dirs_are_the_users_and_then_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FER_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert paths.runtime_dirs() == [Path("/run/user/7/fer"), Path(f"/tmp/fer-{os.getuid()}")]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert paths.runtime_dirs() == [Path(f"/tmp/fer-{os.getuid()}")]


def test_home_follows_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FER_HOME", "/archives")
    assert paths.home() == Path("/archives")
    monkeypatch.delenv("FER_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert paths.home() == Path("/cache/fer")


def test_ensure_private_makes_it_once(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "fer"
    paths.ensure_private(place)
    paths.ensure_private(place)
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(PeerRefused, match="symbolic link"):
        paths.ensure_private(tmp_path / "link")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o740, 0o777])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    place = tmp_path / "fer"
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(PeerRefused, match="mode"):
        paths.ensure_private(place)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fer").write_text("")
    with pytest.raises(PeerRefused, match="no directory"):
        paths.ensure_private(tmp_path / "fer")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_foreign_directory_is_refused_unless_its_owner_is_known(tmp_path: Path) -> None:
    place = tmp_path / "fer"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(PeerRefused, match="belongs to user 65534"):
        paths.check_private(place)
    paths.check_private(place, owners=(65534,))
