"""Exclusive roles: one holder, the next in order of asking, nobody left out."""

from __future__ import annotations

import os
import signal
import threading

from tests.support.keeper import Keeper, read_line, wait_until
from tests.support.processes import WAIT_S, Children, halt


def waiting(keeper: Keeper) -> list[str]:
    return [holder.label for holder in keeper.status().waiting]


HOLDER = """
import sys
from pathlib import Path
from fer.weights.client import KeeperClient
client = KeeperClient.connect(Path(sys.argv[1]), label="active")
print(client.acquire_role("active", wait_s=20), flush=True)
sys.stdin.read()
"""


def test_a_role_has_one_holder(keeper: Keeper) -> None:
    with keeper.client("one") as one, keeper.client("two") as two:
        assert one.acquire_role("active", wait_s=0)
        assert one.acquire_role("active", wait_s=0)
        assert not two.acquire_role("active", wait_s=0)
        assert not two.acquire_role("active", wait_s=0.05)
        assert two.acquire_role("another", wait_s=0)
        two.release_role("active")
        roles = two.status().roles
        assert [(role.role, role.holder.label) for role in roles] == [("active", "one"), ("another", "two")]
        one.release_role("active")
        assert two.acquire_role("active", wait_s=0)


def test_waiters_get_it_in_order_of_asking(keeper: Keeper) -> None:
    order: list[int] = []
    with keeper.client() as holder:
        assert holder.acquire_role("active", wait_s=0)
        clients = [keeper.client(str(number)) for number in range(3)]

        def wait(number: int) -> None:
            if clients[number].acquire_role("active", wait_s=WAIT_S):
                order.append(number)
                clients[number].close()

        threads = []
        for number in range(3):
            threads.append(threading.Thread(target=wait, args=(number,), daemon=True))
            threads[-1].start()
            expected = [str(earlier) for earlier in range(number + 1)]
            wait_until(lambda expected=expected: waiting(keeper) == expected, f"{expected} wait")
        holder.release_role("active")
        for thread in threads:
            thread.join(WAIT_S)
    assert order == [0, 1, 2]


def test_the_role_of_a_killed_holder_is_free(keeper: Keeper, children: Children) -> None:
    child = children.python(HOLDER, str(keeper.directory), stdin=-1)
    assert read_line(child.stdout) == "True"
    with keeper.client() as client:
        assert not client.acquire_role("active", wait_s=0)
        children.kill(child)
        assert client.acquire_role("active", wait_s=WAIT_S)


def test_a_role_survives_the_keeper(keeper: Keeper, children: Children) -> None:
    child = children.python(HOLDER, str(keeper.directory), stdin=-1)
    assert read_line(child.stdout) == "True"
    with keeper.client() as client:
        keeper.kill()
        assert not client.acquire_role("active", wait_s=0)
        children.kill(child)
        assert client.acquire_role("active", wait_s=WAIT_S)


def test_the_role_of_a_holder_that_died_with_the_keeper_is_free(keeper: Keeper, children: Children) -> None:
    child = children.python(HOLDER, str(keeper.directory), stdin=-1)
    assert read_line(child.stdout) == "True"
    with keeper.client() as client:
        pid = keeper.pid
        halt(keeper.minder.pid)  # so that nobody starts the next keeper too early
        keeper.kill()
        children.kill(child)
        os.kill(keeper.minder.pid, signal.SIGCONT)
        assert client.acquire_role("active", wait_s=WAIT_S)
        assert keeper.pid != pid
