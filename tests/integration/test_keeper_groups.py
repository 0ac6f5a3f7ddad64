"""Groups of ranks: visible at once, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from fer.errors import FerError, LeasesStand, Refused
from fer.weights.client import KeeperClient, Key
from tests.support.keeper import Keeper, begin, engine_at, key, publish, read_line, wait_until
from tests.support.processes import WAIT_S, Children


def rank(number: int, launch: str = "A") -> Key:
    return key(rank=f"tp{number}/2", launch=launch, local_size=2)


class Call:
    """A call in a thread, with its result or its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: FerError | None = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except FerError as error:
            self.error = error

    def join(self) -> Any:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the call did not come back"
        if self.error is not None:
            raise self.error
        return self.result


def waits(keeper: Keeper, committed: list[str]) -> None:
    """Until these ranks have committed and wait."""

    def so() -> bool:
        pending = keeper.status().pending
        return bool(pending) and pending[0].committed == committed

    wait_until(so, f"ranks {committed} wait")


def commit(client: KeeperClient, transaction: str, wait_s: float = WAIT_S) -> Call:
    return Call(lambda: client.commit(transaction, b"manifest", wait_s=wait_s).edition)


def test_two_ranks_become_visible_with_the_second(keeper: Keeper) -> None:
    with keeper.client() as r0, keeper.client() as r1:
        first, second = begin(r0, rank(0)), begin(r1, rank(1))
        waiting = commit(r0, first)
        waits(keeper, ["tp0/2"])
        with keeper.client() as other:
            assert other.find(rank(0)).candidates == []
            editions = {r1.commit(second, b"manifest", wait_s=1).edition, waiting.join()}
            status = other.status()
        assert {info.edition for info in status.editions} == editions
        assert len({info.batch for info in status.editions}) == 1
        assert all(info.holders for info in status.editions)
    assert {info.edition for info in keeper.status().editions} == editions, "two ranks are one of the budget"


def test_eviction_takes_the_whole_group_and_stops_at_one_lease(keeper: Keeper) -> None:
    with keeper.client() as r0, keeper.client() as r1:
        call = commit(r0, begin(r0, rank(0)))
        edition = r1.commit(begin(r1, rank(1)), b"manifest", wait_s=WAIT_S).edition
        call.join()
        r1.release(edition)
        with keeper.client() as other:
            with pytest.raises(LeasesStand):
                other.evict(edition)
            assert other.evict() == []
    with keeper.client() as other:
        assert len(other.evict(edition)) == 2


@pytest.mark.parametrize("step", ["claim", "begin", "add", "committing"])
def test_a_rank_that_dies_lets_no_rank_publish(keeper: Keeper, children: Children, step: str) -> None:
    with keeper.client() as r0:
        transaction = begin(r0, rank(0))
        if step == "committing":
            child = children.python(ENGINE_TO_COMMIT, str(keeper.directory), stdin=-1)
            assert read_line(child.stdout) == "committing"
            waits(keeper, ["tp1/2"])
        else:
            child = engine_at(children, keeper, step, rank(1))
        waiting = commit(r0, transaction) if step != "committing" else None
        if waiting:
            waits(keeper, ["tp0/2"])
        children.kill(child)
        with pytest.raises(Refused, match="went away") as caught:
            waiting.join() if waiting else r0.commit(transaction, b"manifest", wait_s=WAIT_S)
        assert caught.value.fields["code"] == "group_failed"
        status = r0.status()
        assert (status.editions, status.pending, status.claims) == ([], [], [])
        with pytest.raises(Refused):
            begin(r0, rank(0))
    with keeper.client() as r0, keeper.client() as r1:
        call = commit(r0, begin(r0, rank(0, "B")))
        r1.commit(begin(r1, rank(1, "B")), b"manifest", wait_s=WAIT_S)
        call.join()


ENGINE_TO_COMMIT = """
import sys
from pathlib import Path
from tests.support.keeper import KeeperClient, begin, key
client = KeeperClient.connect(Path(sys.argv[1]))
transaction = begin(client, key(rank="tp1/2", launch="A", local_size=2))
print("committing", flush=True)
client.commit(transaction, b"manifest", wait_s=60)
"""


def test_a_rank_that_gives_up_ends_its_group(keeper: Keeper) -> None:
    with keeper.client() as r0, keeper.client() as r1:
        call = commit(r0, begin(r0, rank(0)))
        waits(keeper, ["tp0/2"])
        r1.abort(begin(r1, rank(1)))
        with pytest.raises(Refused, match="gave up"):
            call.join()


def test_a_rank_that_never_comes_ends_its_group_in_bounded_time(keeper: Keeper) -> None:
    with keeper.client() as r0:
        with pytest.raises(Refused, match="only ranks tp0/2 of 2") as caught:
            r0.commit(begin(r0, rank(0)), b"manifest", wait_s=0.05)
        assert caught.value.fields["code"] == "group_failed"
        assert r0.status().pending == []


def test_launches_that_meet_publish_no_mix_and_nobody_waits_for_ever(keeper: Keeper) -> None:
    """A has rank 0, B has rank 1, then each wants the other: the younger launch loads for itself."""
    clients = {name: keeper.client(name) for name in ("a0", "a1", "b0", "b1")}
    assert clients["a0"].claim(rank(0, "A"), wait_s=0).outcome == "claimed"
    assert clients["b1"].claim(rank(1, "B"), wait_s=0).outcome == "claimed"
    begun = begin(clients["b1"], rank(1, "B"))
    with pytest.raises(Refused) as caught:
        clients["b0"].claim(rank(0, "B"), wait_s=WAIT_S)
    assert caught.value.fields["code"] == "launches_met"
    with pytest.raises(Refused) as caught:
        clients["b1"].commit(begun, b"manifest", wait_s=WAIT_S)
    assert caught.value.fields["code"] == "launches_met"
    assert clients["a1"].claim(rank(1, "A"), wait_s=0).outcome == "claimed"
    call = commit(clients["a0"], begin(clients["a0"], rank(0, "A")))
    clients["a1"].commit(begin(clients["a1"], rank(1, "A")), b"manifest", wait_s=WAIT_S)
    call.join()
    assert {info.launch for info in keeper.status().editions} == {"A"}
    for client in clients.values():
        client.close()


def test_a_second_launch_that_holds_nothing_waits_and_attaches(keeper: Keeper) -> None:
    with keeper.client() as a0, keeper.client() as a1, keeper.client() as b0, keeper.client() as b1:
        assert a0.claim(rank(0, "A"), wait_s=0).outcome == "claimed"
        for client, number in ((b0, 0), (b1, 1)):
            client.find(rank(number, "B"))
        waiting = [Call(lambda: b0.claim(rank(0, "B"), wait_s=WAIT_S))]
        wait_until(lambda: len(keeper.status().waiting) == 1, "b0 waits")
        assert a1.claim(rank(1, "A"), wait_s=0).outcome == "claimed"
        waiting.append(Call(lambda: b1.claim(rank(1, "B"), wait_s=WAIT_S)))
        wait_until(lambda: len(keeper.status().waiting) == 2, "b1 waits")
        call = commit(a0, begin(a0, rank(0, "A")))
        a1.commit(begin(a1, rank(1, "A")), b"manifest", wait_s=WAIT_S)
        call.join()
        assert [wait.join().outcome for wait in waiting] == ["look_again", "look_again"]


def test_groups_of_one_stay_independent(keeper: Keeper) -> None:
    with keeper.client() as first, keeper.client() as second:
        editions = {publish(first, key(gpu="GPU-1")), publish(second, key(gpu="GPU-2", launch="other"))}
        assert {info.edition for info in first.status().editions} == editions
