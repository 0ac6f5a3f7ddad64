"""A runtime directory that is taken away from under its keeper."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from fer import paths
from fer.weights.keeper import sockets
from tests.support.keeper import Keeper, begin, key, publish
from tests.support.processes import WAIT_S, Children


@pytest.mark.parametrize("what", ["directory", sockets.LOCK, paths.SOCKET])
def test_a_keeper_that_nobody_can_reach_ends(children: Children, runtime_dir: Path, what: str) -> None:
    keeper = Keeper(children, runtime_dir)
    with keeper.client() as client:
        publish(client, key())
    if what == "directory":
        shutil.rmtree(runtime_dir)
    else:
        (runtime_dir / what).unlink()
    assert keeper.minder.wait(WAIT_S) == 0
    assert "was removed" in keeper.log.read_text()


@pytest.mark.parametrize("restart", [False, True])
def test_it_stays_for_those_who_use_it_and_leaves_its_successor_alone(
    children: Children, runtime_dir: Path, restart: bool
) -> None:
    old = Keeper(children, runtime_dir)
    pid = old.pid
    with old.client() as user, old.client() as loader:
        edition = publish(user, key())
        begin(loader, key("another"))
        shutil.rmtree(runtime_dir)
        new = Keeper(children, runtime_dir)
        if restart:
            os.kill(pid, 9)
        user.lease(edition).close()
        with new.client() as client:
            published = publish(client, key())
        user.release(edition)
        assert loader.status().pending, "what is being published is waited for as well"
    assert old.minder.wait(WAIT_S) == 0
    with new.client() as client:
        assert [found.edition for found in client.find(key()).candidates] == [published]
    assert new.terminate() == 0
    assert not (runtime_dir / paths.SOCKET).exists()
