"""Leases, budgets and eviction; and readers that die at each step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from fer.errors import KeeperUnavailable, LeasesStand, Refused
from fer.memory import fdpass
from fer.weights.client import SlabInfo
from fer.weights.keeper.desk import DESCRIPTOR_LIMIT
from fer.weights.keeper.records import PAYLOADS
from tests.support.keeper import PAGE, Keeper, begin, engine_at, key, publish, slab, wait_until
from tests.support.processes import WAIT_S, Children


@pytest.fixture
def keeper(children: Children, runtime_dir: Path) -> Keeper:
    return Keeper(children, runtime_dir, FER_KEEPER_GRACE_S="0")


def test_status_shows_who_uses_what(keeper: Keeper) -> None:
    with keeper.client("publisher") as publisher, keeper.client("reader") as reader:
        edition = publish(publisher, key(), slabs=2)
        reader.lease(edition).close()
        [info] = reader.status().editions
        assert [holder.label for holder in info.holders] == ["publisher", "reader"]
        assert (info.bytes, info.slabs, info.transport, info.gpu) == (2 * PAGE, 2, "host", "host")
        assert info.fields == b"fields of g"
        publisher.release(edition)
        publisher.release(edition)
        reader.lease(edition).close()
        assert [holder.label for holder in reader.status().editions[0].holders] == ["reader"]


def test_the_budget_keeps_one_unleased_edition_a_gpu(keeper: Keeper) -> None:
    with keeper.client() as client:
        old = publish(client, key("old"))
        new = publish(client, key("new"))
        other_gpu = publish(client, key("old", gpu="GPU-1"))
        assert {info.edition for info in client.status().editions} == {old, new, other_gpu}, "leased ones all stay"
    assert {info.edition for info in keeper.status().editions} == {new, other_gpu}
    assert any(old in text for text in keeper.events("evicted"))


def test_engines_that_die_together_come_back_to_all_their_editions(children: Children, runtime_dir: Path) -> None:
    keeper = Keeper(children, runtime_dir)
    keys = [key("one"), key("two")]
    engines = [engine_at(children, keeper, "commit", of) for of in keys]
    for engine in engines:
        children.kill(engine)
    wait_until(lambda: not any(info.holders for info in keeper.status().editions), "both have gone")
    keeper.kill()
    with keeper.client() as client:
        for of in keys:
            client.lease(client.find(of).candidates[0].edition).close()


def test_the_budget_applies_at_the_end_of_the_grace_over_the_keepers_death(
    children: Children, runtime_dir: Path
) -> None:
    keeper = Keeper(children, runtime_dir, FER_KEEPER_GRACE_S="1.5")
    with keeper.client() as client:
        publish(client, key("old"))
        new = publish(client, key("new"))
    keeper.kill()
    wait_until(lambda: [info.edition for info in keeper.status().editions] == [new], "the older one goes")
    assert any("over the budget" in text for text in keeper.events("evicted"))


def test_the_last_used_stays(keeper: Keeper) -> None:
    with keeper.client() as first:
        a = publish(first, key("a"))
        with keeper.client() as second:
            publish(second, key("b"))
        assert len(first.status().editions) == 2
    assert [info.edition for info in keeper.status().editions] == [a]


@pytest.mark.parametrize(
    ("variables", "left"),
    [
        ({"FER_KEEPER_BUDGET_EDITIONS": "2"}, 2),
        ({"FER_KEEPER_BUDGET_EDITIONS": "0"}, 0),
        ({"FER_KEEPER_BUDGET_EDITIONS": "9", "FER_KEEPER_BUDGET_BYTES": "4KiB"}, 1),
    ],
)
def test_the_budget_is_a_setting(children: Children, runtime_dir: Path, variables: dict[str, str], left: int) -> None:
    keeper = Keeper(children, runtime_dir, FER_KEEPER_GRACE_S="0", **variables)
    with keeper.client() as client:
        for group in "abc":
            publish(client, key(group))
    assert len(keeper.status().editions) == left


def test_a_bad_setting_is_named_and_nothing_starts(children: Children, runtime_dir: Path) -> None:
    with pytest.raises(AssertionError, match="FER_KEEPER_BUDGET_EDITIONS"):
        Keeper(children, runtime_dir, FER_KEEPER_BUDGET_EDITIONS="many")


def test_a_leased_edition_is_never_evicted(keeper: Keeper) -> None:
    with keeper.client("engine") as engine, keeper.client() as client:
        edition = publish(engine, key())
        assert client.evict() == []
        assert client.make_room("host", None).evicted == []
        with pytest.raises(LeasesStand, match="engine") as caught:
            client.evict(edition)
        assert caught.value.fields["holders"][0]["label"] == "engine"
        engine.release(edition)
        assert [info.edition for info in client.evict(edition)] == [edition]
        with pytest.raises(Refused):
            client.evict(edition)


@pytest.mark.parametrize("step", ["claim", "begin"])
def test_a_keeper_does_not_stop_while_weights_are_being_loaded(keeper: Keeper, step: str) -> None:
    with keeper.client("loader") as loader, keeper.client() as client:
        if step == "claim":
            assert loader.claim(key(), wait_s=0).outcome == "claimed"
        else:
            begin(loader, key())
        with pytest.raises(LeasesStand, match=r"being loaded by \d+ \(loader\)") as caught:
            client.stop()
        assert [holder["label"] for holder in caught.value.fields["holders"]] == ["loader"]
        loader.unclaim()
        client.stop()
    assert keeper.minder.wait(WAIT_S) == 0


def test_room_names_what_went_and_what_stands_in_the_way(children: Children, runtime_dir: Path) -> None:
    keeper = Keeper(children, runtime_dir, FER_KEEPER_BUDGET_EDITIONS="9")
    with keeper.client("holder") as holder, keeper.client() as client:
        with keeper.client() as gone:
            unused = [publish(gone, key(group)) for group in "ab"]
            publish(gone, key("a", gpu="GPU-1"))
        held = publish(holder, key("c"))
        room = client.make_room("host", PAGE)
        assert [info.edition for info in room.evicted] == unused[:1]
        room = client.make_room("host", 10 * PAGE)
        assert [info.edition for info in room.evicted] == unused[1:]
        assert [(info.edition, info.holders[0].label) for info in room.leased] == [(held, "holder")]
        assert len(client.evict(gpu="GPU-1")) == 1


def test_a_changed_fingerprint_never_fills_the_memory(keeper: Keeper) -> None:
    """A crash loop in which each start has another fingerprint: there are never more than two editions."""
    for start in range(8):
        with keeper.client() as client:
            client.make_room("host", PAGE)
            publish(client, key(f"fingerprint {start}"))
            assert len(client.status().editions) == 1
    assert len(keeper.status().editions) == 1


@pytest.mark.parametrize("step", ["connect", "find", "lease", "release"])
def test_a_reader_killed_at_any_step_leaves_nothing(keeper: Keeper, children: Children, step: str) -> None:
    with keeper.client() as observer:
        edition = publish(observer, key())
        observer.release(edition)
        before, stored = keeper.descriptors(), keeper.stored()
        child = engine_at(children, keeper, step, key())
        leased = [holder.label for holder in observer.status().editions[0].holders]
        assert leased == (["victim"] if step == "lease" else [])
        children.kill(child)
        status = observer.status()
        assert [info.edition for info in status.editions] == [edition]
        assert status.editions[0].holders == []
        assert keeper.descriptors() == before
        assert keeper.stored() == stored


@pytest.mark.slow
def test_a_hundred_killed_readers_leave_the_keeper_as_it_was(keeper: Keeper, children: Children) -> None:
    with keeper.client() as observer:
        publish(observer, key())
        before, stored, memory = keeper.descriptors(), keeper.stored(), 0
        for cycle in range(100):
            child = engine_at(children, keeper, "lease", key())
            children.kill(child)
            if cycle == 20:  # by then the allocator has what it wants
                memory = resident(keeper.pid)
        observer.status()
        assert keeper.descriptors() == before
        assert keeper.stored() == stored
        assert resident(keeper.pid) <= memory + 512 * 1024


def test_the_keeper_is_small(keeper: Keeper) -> None:
    with keeper.client() as client:
        publish(client, key(), slabs=500)
    assert resident(keeper.pid) < 30e6
    assert resident(keeper.minder.pid) < 30e6


def test_a_full_keeper_starts_again(keeper: Keeper) -> None:
    """The names of all it may hold fit into the one variable that they are passed in."""
    with keeper.client() as client, slab() as fd:
        transaction = client.begin(key(), fields=b"", checkpoint=b"", total=DESCRIPTOR_LIMIT * PAGE).transaction
        room = DESCRIPTOR_LIMIT - len(PAYLOADS)
        client.add_slabs(transaction, [(SlabInfo("host", PAGE), fd)] * room)
        with pytest.raises(Refused, match="descriptors"):
            client.add_slabs(transaction, [(SlabInfo("host", PAGE), fd)])
        edition = client.commit(transaction, b"manifest", wait_s=WAIT_S).edition
        before = keeper.kill()
        wait_until(lambda: keeper.pid != before, "another process is the keeper")
        [info] = client.status().editions
        assert (info.edition, info.slabs) == (edition, room)


def resident(pid: int) -> int:
    """Bytes of memory a process has resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


def test_a_connection_closed_in_the_middle_of_its_own_call_ends_the_call(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the garbage collector frees a module, and with it the connection, while the same thread makes a call."""
    client = keeper.client()
    original = fdpass.send

    def send_and_close(*arguments: Any, **keywords: Any) -> None:
        original(*arguments, **keywords)
        client.close()

    monkeypatch.setattr(fdpass, "send", send_and_close)
    ended: list[BaseException] = []

    def call() -> None:
        try:
            client.status()
        except KeeperUnavailable as error:
            ended.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "the call waits for its own lock"
    assert len(ended) == 1
