"""Which directory a keeper goes to, and whether it is still its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fer import paths
from fer.errors import KeeperError, KeeperUnavailable, OptionError, PeerRefused
from fer.options import Options
from fer.weights.client import KeeperClient
from fer.weights.connect import connect
from fer.weights.keeper import sockets
from fer.weights.keeper.start import start_keeper
from tests.support.keeper import Keeper
from tests.support.processes import ROOT, WAIT_S, Children, halt


@pytest.fixture
def candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Four candidates, only the last of which can be used: no parent, a parent that is a file, a link, a directory."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    made = [tmp_path / "missing" / "fer", tmp_path / "file" / "fer", tmp_path / "link", tmp_path / "good"]
    monkeypatch.setattr(paths, "runtime_dirs", lambda: made)
    return made


def test_the_first_usable_place_is_taken_and_the_others_are_named(candidates: list[Path]) -> None:
    directory, passed_over = sockets.choose_dir()
    assert directory == candidates[-1]
    assert directory.stat().st_mode & 0o777 == 0o700
    for place in candidates[:-1]:
        assert str(place) in passed_over
    assert not candidates[0].parent.exists()


def test_without_a_usable_place_all_are_named(candidates: list[Path]) -> None:
    candidates.pop()
    with pytest.raises(KeeperUnavailable) as caught:
        sockets.choose_dir()
    for place in candidates:
        assert str(place) in str(caught.value)
    assert caught.value.fields["looked_in"] == [str(place) for place in candidates]


@pytest.mark.parametrize("chosen", ["/proc/fer", "/proc/fer/deep", "/dev/null/fer"])
def test_a_chosen_place_that_cannot_be_made_is_unavailable(chosen: str) -> None:
    with pytest.raises(KeeperUnavailable, match=chosen):
        sockets.choose_dir(Path(chosen))


def test_a_chosen_place_that_is_not_private_is_refused(candidates: list[Path]) -> None:
    with pytest.raises(PeerRefused, match="symbolic link"):
        sockets.choose_dir(candidates[2])


def test_an_engine_starts_its_keeper_in_the_next_place(candidates: list[Path]) -> None:
    client, note = connect(Options(), label="test")
    assert client is not None, note
    with client:
        assert client.runtime_dir == candidates[-1]
        assert f"started in {candidates[-1]}" in note
        assert f"passed over: {candidates[0]}" in note
        with KeeperClient.connect() as other:
            other.stop()


def test_a_client_passes_over_a_place_that_is_not_private(candidates: list[Path]) -> None:
    with pytest.raises(KeeperUnavailable, match="symbolic link"):
        KeeperClient.connect()
    candidates[:] = [candidates[2]]
    with pytest.raises(PeerRefused, match="symbolic link"):
        KeeperClient.connect()


def test_a_lock_that_cannot_be_opened_is_told_apart_from_a_link(tmp_path: Path) -> None:
    (tmp_path / sockets.LOCK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PeerRefused, match="symbolic link"):
        sockets.lock(tmp_path)
    with pytest.raises(KeeperError, match="No such file"):
        sockets.lock(tmp_path / "missing")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_nobody_is_told_to_remove_what_is_anothers(tmp_path: Path) -> None:
    place = tmp_path / "fer"
    place.mkdir(mode=0o700)
    os.chown(place, 65534, 65534)
    with pytest.raises(PeerRefused) as caught:
        paths.check_private(place)
    assert "Remove" not in caught.value.fix
    assert "FER_RUNTIME_DIR" in caught.value.fix


# --- starts that come to nothing ---


def test_a_bad_setting_of_the_keeper_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fer.toml"
    file.write_text('[keeper]\nbudget_editions = "a"\n')
    with pytest.raises(OptionError, match=r"fer\.toml: keeper key budget_editions"):
        Options.load(environ={"FER_CONFIG": str(file)})
    monkeypatch.setenv("FER_KEEPER_BUDGET_EDITIONS", "a")
    with pytest.raises(KeeperUnavailable, match="FER_KEEPER_BUDGET_EDITIONS"):
        start_keeper(timeout=1e6)


def test_the_end_of_a_keeper_that_could_not_listen_is_told_at_once(runtime_dir: Path) -> None:
    (runtime_dir / paths.SOCKET).mkdir()
    (runtime_dir / "keeper.log").write_text("an older line\n")
    with pytest.raises(KeeperUnavailable, match="no socket of this user") as caught:
        start_keeper(timeout=1e6)
    assert "ended before it listened" in caught.value.what
    assert "older" not in caught.value.why


def test_a_keeper_with_too_few_files_does_not_start() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    code += "from fer.weights.keeper.start import start_keeper; start_keeper(timeout=1e6)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert "a keeper cannot keep anything with 64 open files" in done.stderr


# --- keepers and clients in odd states ---


def test_a_keeper_that_hangs_is_named(children: Children, runtime_dir: Path) -> None:
    keeper = Keeper(children, runtime_dir)
    pid = keeper.pid
    halt(pid)
    try:
        with pytest.raises(KeeperUnavailable, match=rf"pid {pid}\) accepts but does not answer") as caught:
            KeeperClient.connect(timeout=0.2)
        assert caught.value.fields["hangs"] == pid
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_holder_that_has_ended_is_told(children: Children, runtime_dir: Path) -> None:
    keeper = Keeper(children, runtime_dir)
    code = "import os, sys, time\nfrom fer.weights.client import KeeperClient\n"
    code += "client = KeeperClient.connect(label='forks')\nif os.fork() == 0: time.sleep(60)\nos._exit(0)"
    assert children.python(code, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait(WAIT_S) == 0
    labels = [holder.label for holder in keeper.status().connections]
    assert labels == ["forks; has ended, a child of it holds the connection", "status"]
