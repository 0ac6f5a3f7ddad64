"""The keeper's data without its sockets: journal, offsets, budget, claims and groups."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fer.errors import FerBug, LeasesStand, Refused
from fer.memory.base import HOST
from fer.weights.keeper import journal as journals
from fer.weights.keeper import offsets
from fer.weights.keeper.boot import JOURNAL, LISTENER, LOCK
from fer.weights.keeper.budget import Budget
from fer.weights.keeper.desk import DESCRIPTOR_LIMIT
from fer.weights.keeper.editions import EVENTS, Store
from fer.weights.keeper.groups import Groups
from fer.weights.keeper.journal import Journal
from fer.weights.keeper.records import Peer, State, new_id, slab_name
from fer.weights.keeper.server import CONNECTIONS
from fer.weights.keeper.start import UNIT_PROPERTIES
from fer.weights.wire import SLABS_A_FRAME, Key, SlabInfo

# --- journal ---


@pytest.fixture
def journal() -> Iterator[Journal]:
    made = Journal.create()
    yield made
    made.close()


def test_a_new_journal_is_empty(journal: Journal) -> None:
    assert journal.read() is None


def test_the_last_entry_is_read_by_whoever_gets_the_descriptor(journal: Journal) -> None:
    for content in (b"first", b"second" * 100, b"third", b""):
        journal.write(content)
        successor = Journal(journal.fd.dup())
        assert successor.read() == content
        successor.close()


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_a_kill_inside_a_write_leaves_the_entry_before(journal: Journal, writes: int) -> None:
    for number in range(writes):
        journal.write(b"entry %d" % number)
    victim = mmap.mmap(journal.fd.fileno(), 2 * journals.SLOT)
    place = ((writes + 1) % 2) * journals.SLOT  # where the next write goes
    victim[place + 100 : place + 200] = b"half written" * 8 + b"half"
    assert Journal(journal.fd.dup()).read() == b"entry %d" % (writes - 1)


def test_a_damaged_entry_is_passed_over(journal: Journal) -> None:
    journal.write(b"old")
    journal.write(b"new")
    victim = mmap.mmap(journal.fd.fileno(), 2 * journals.SLOT)
    victim[30] ^= 1  # the second write is in slot 0
    successor = Journal(journal.fd.dup())
    assert successor.read() == b"old"
    successor.write(b"newer")
    assert Journal(journal.fd.dup()).read() == b"newer"


def test_an_entry_beyond_the_slot_is_our_own_bug(journal: Journal) -> None:
    with pytest.raises(FerBug):
        journal.write(bytes(journals.SLOT))


# --- offsets ---

_sizes = st.integers(1, 64 << 30)


@given(st.lists(st.tuples(st.booleans(), _sizes), max_size=40))
def test_places_never_overlap_and_are_aligned(steps: list[tuple[bool, int]]) -> None:
    taken: list[tuple[int, int]] = []
    for drop, size in steps:
        if drop and taken:
            taken.pop(size % len(taken))
            continue
        offset = offsets.first_fit(taken, size)
        if offset is not None:
            assert offset % offsets.ALIGNMENT == 0
            assert offset + size <= offsets.RANGE
            assert all(offset + size <= start or start + length <= offset for start, length in taken)
            taken.append((offset, size))


def test_a_gap_is_used_again() -> None:
    size = offsets.ALIGNMENT
    assert offsets.first_fit([(0, size), (2 * size, size)], size) == size
    assert offsets.first_fit([(0, size), (2 * size, size)], size + 1) == 3 * size


def test_a_full_range_is_refused_with_what_lies_in_it() -> None:
    state = State(started=0.0)
    groups = Groups(Store(state))
    peer = Peer("c1", 1, 0, "a")
    state.peers["c1"] = peer
    groups.begin(peer, Key("g", "r", "GPU-1", "l"), checkpoint=b"", total=offsets.RANGE)
    with pytest.raises(Refused, match="weights range") as caught:
        groups.begin(peer, Key("h", "r", "GPU-1", "l"), checkpoint=b"", total=1)
    assert caught.value.fields["code"] == "no_range"
    assert groups.begin(peer, Key("h", "r", "GPU-2", "l"), checkpoint=b"", total=1).offset == 0


# --- descriptors ---


def test_names_of_all_that_may_be_held_fit_one_variable_and_the_fd_store() -> None:
    """Each argument and variable that execve takes ends at 128 KiB; a restart passes every name in one."""
    slabs = [slab_name(new_id("e"), number) for number in range(DESCRIPTOR_LIMIT)]
    held = ["notify", "minder", LISTENER, JOURNAL, LOCK, *slabs, *(new_id("c") for _ in range(CONNECTIONS))]
    # What a request brought before the keeper was killed in it comes on top.
    held += [slab_name(new_id("e"), 9999) for _ in range(SLABS_A_FRAME)]
    assert len(new_id("p")) <= len(slabs[0])
    assert len("LISTEN_FDNAMES=" + ":".join(held)) < 128 * 1024
    assert "FileDescriptorStoreMax=8192" in UNIT_PROPERTIES
    assert len(held) < 8192


# --- editions and budget ---


class World:
    """A store with peers, without a server."""

    def __init__(self) -> None:
        self.state = State(started=0.0)
        self.store = Store(self.state)
        self.groups = Groups(self.store)

    def peer(self, name: str) -> Peer:
        return self.state.peers.setdefault(name, Peer(name, len(self.state.peers) + 1, 0, name))

    def publish(self, peer: str, key: Key, size: int = 10) -> str:
        transaction = self.groups.begin(self.peer(peer), key, checkpoint=b"", total=size)
        transaction.slabs.append(SlabInfo("host", size))
        transaction.committed = True
        self.groups.complete(self.peer(peer), transaction)
        return transaction.id

    def leave(self, peer: str) -> None:
        self.groups.leave(self.peer(peer))
        self.store.release_all(self.peer(peer))
        del self.state.peers[peer]


@pytest.fixture
def world() -> World:
    return World()


def single(group: str, gpu: str = HOST, launch: str = "l") -> Key:
    return Key(group, "tp0/1", gpu, launch)


def test_one_unleased_edition_a_gpu_stays_and_it_is_the_last_used(world: World) -> None:
    ids = [world.publish("a", single(group, gpu)) for gpu in ("GPU-1", "GPU-2") for group in ("x", "y", "z")]
    Budget().enforce(world.store, time.monotonic())
    assert set(world.state.editions) == set(ids), "all are leased"
    world.store.release(world.peer("a"), world.store.get(ids[0]))
    Budget().enforce(world.store, time.monotonic())
    assert ids[0] in world.state.editions
    world.leave("a")
    Budget().enforce(world.store, time.monotonic())
    assert set(world.state.editions) == {ids[2], ids[5]}


def test_the_budget_waits_for_the_end_of_the_grace(world: World) -> None:
    budget, start = Budget(grace_s=100), time.monotonic()
    first, second, third = (world.publish(group, single(group)) for group in "abc")
    assert budget.next_end(world.store, start) is None, "all are leased"
    for peer, seconds in (("a", 0), ("b", 10), ("c", 20)):
        world.leave(peer)
        world.store.get({"a": first, "b": second, "c": third}[peer]).freed = start + seconds
    for now, kept in ((99, {first, second, third}), (100, {first, second, third}), (110, {second, third})):
        budget.enforce(world.store, start + now)
        assert set(world.state.editions) == kept, now
    assert budget.next_end(world.store, start + 110) == start + 120
    budget.enforce(world.store, start + 120)
    assert set(world.state.editions) == {third}
    assert budget.next_end(world.store, start + 120) is None


def test_a_lease_within_the_grace_starts_it_anew(world: World) -> None:
    edition = world.publish("a", single("x"))
    world.leave("a")
    before = world.store.get(edition).freed
    peer = world.peer("b")
    world.store.lease(peer, world.store.get(edition))
    Budget(editions=0, grace_s=0).enforce(world.store, before + 1000)
    world.store.release(peer, world.store.get(edition))
    assert world.store.get(edition).freed > before
    Budget(editions=0, grace_s=5).enforce(world.store, world.store.get(edition).freed + 4)
    assert edition in world.state.editions


def test_room_is_made_within_the_grace(world: World) -> None:
    edition = world.publish("a", single("x"))
    world.leave("a")
    assert [info.edition for info in world.store.make_room(HOST, None)] == [edition]


def test_a_budget_of_bytes_counts_each_gpu(world: World) -> None:
    kept = [world.publish("a", single(group, gpu)) for gpu in ("GPU-1", "GPU-2") for group in ("x", "y")]
    world.leave("a")
    Budget(editions=9, bytes=20).enforce(world.store, time.monotonic())
    assert set(world.state.editions) == set(kept)
    Budget(editions=9, bytes=19).enforce(world.store, time.monotonic())
    assert set(world.state.editions) == {kept[1], kept[3]}


def test_ranks_of_one_group_on_one_gpu_count_as_one(world: World) -> None:
    ids = [world.publish(f"r{rank}", Key("g", f"tp{rank}/2", HOST, "l", 2)) for rank in range(2)]
    world.leave("r0")
    world.leave("r1")
    Budget().enforce(world.store, time.monotonic())
    assert set(world.state.editions) == set(ids)


def test_a_group_with_one_lease_left_is_neither_counted_nor_evicted(world: World) -> None:
    ids = [world.publish(f"r{rank}", Key("g", f"tp{rank}/2", HOST, "l", 2)) for rank in range(2)]
    other = world.publish("o", single("other"))
    world.leave("r0")
    world.leave("o")
    Budget().enforce(world.store, time.monotonic())
    assert set(world.state.editions) == {*ids, other}
    with pytest.raises(LeasesStand, match="r1"):
        world.store.evict(ids[0], None)
    assert [info.edition for info in world.store.make_room(HOST, None)] == [other]


def test_eviction_of_one_rank_takes_its_group_and_frees_every_descriptor(world: World) -> None:
    ids = [world.publish(f"r{rank}", Key("g", f"tp{rank}/2", HOST, "l", 2)) for rank in range(2)]
    world.leave("r0")
    world.leave("r1")
    assert {info.edition for info in world.store.evict(ids[1], None)} == set(ids)
    assert set(world.store.condemned) == {f"{edition}.0" for edition in ids}


def test_room_is_made_oldest_first_and_no_more_than_needed(world: World) -> None:
    ids = [world.publish("a", single(group)) for group in "xyz"]
    world.leave("a")
    assert [info.edition for info in world.store.make_room(HOST, 11)] == ids[:2]


def test_events_are_a_bounded_ring(world: World) -> None:
    for number in range(EVENTS + 10):
        world.store.note("kind", str(number))
    assert len(world.state.events) == EVENTS
    assert world.state.events[-1].text == str(EVENTS + 9)


# --- claims and groups ---


def rank(number: int, launch: str, gpu: str = "") -> Key:
    return Key("g", f"tp{number}/2", gpu or f"GPU-{number}", launch, 2)


def code_of(error: pytest.ExceptionInfo[Refused]) -> str:
    return str(error.value.fields["code"])


def test_a_claim_is_exclusive_until_it_is_given_back(world: World) -> None:
    a, b = world.peer("a"), world.peer("b")
    assert world.groups.claim(a, single("g"), 0) == "claimed"
    assert world.groups.claim(a, single("g"), 0) == "claimed"
    assert world.groups.claim(b, single("g", launch="other"), 0) is None
    world.groups.unclaim(a)
    assert world.groups.claim(b, single("g", launch="other"), 0) == "claimed"


def test_what_was_published_since_is_looked_at_again(world: World) -> None:
    seen = world.state.publications
    world.publish("a", single("g"))
    assert world.groups.claim(world.peer("b"), single("g", launch="m"), seen) == "look_again"
    assert world.groups.claim(world.peer("b"), single("g", launch="m"), world.state.publications) == "claimed"


def test_launches_that_crossed_leave_the_older_one(world: World) -> None:
    claim = world.groups.claim
    assert claim(world.peer("a0"), rank(0, "A"), 0) == "claimed"
    assert claim(world.peer("b1"), rank(1, "B"), 0) == "claimed"
    assert claim(world.peer("a1"), rank(1, "A"), 0) == "claimed", "the younger launch has to give way"
    with pytest.raises(Refused) as caught:
        world.groups.begin(world.peer("b1"), rank(1, "B"), checkpoint=b"", total=1)
    assert code_of(caught) == "launches_met"
    with pytest.raises(Refused) as caught:
        claim(world.peer("b0"), rank(0, "B"), 0)
    assert code_of(caught) == "launches_met"


def test_the_younger_launch_is_told_when_it_is_the_one_to_ask(world: World) -> None:
    claim = world.groups.claim
    assert claim(world.peer("a0"), rank(0, "A"), 0) == "claimed"
    assert claim(world.peer("b1"), rank(1, "B"), 0) == "claimed"
    with pytest.raises(Refused) as caught:
        claim(world.peer("b0"), rank(0, "B"), 0)
    assert code_of(caught) == "launches_met"
    assert claim(world.peer("a1"), rank(1, "A"), 0) == "claimed"


def test_a_doom_is_forgotten_with_the_last_of_its_launch(world: World) -> None:
    test_the_younger_launch_is_told_when_it_is_the_one_to_ask(world)
    world.leave("b0")
    world.leave("b1")
    assert [launch.name for launch in world.state.launches] == ["A"]


def test_a_group_is_visible_at_once(world: World) -> None:
    first = world.groups.begin(world.peer("a0"), rank(0, "A"), checkpoint=b"", total=1)
    second = world.groups.begin(world.peer("a1"), rank(1, "A"), checkpoint=b"", total=1)
    first.committed = True
    assert world.groups.complete(world.peer("a0"), first) is None
    assert not world.state.editions
    second.committed = True
    assert world.groups.complete(world.peer("a1"), second) is not None
    assert set(world.state.editions) == {first.id, second.id}
    assert len({edition.batch for edition in world.state.editions.values()}) == 1
    assert not world.state.claims


def test_a_rank_that_leaves_takes_the_pending_group_with_it(world: World) -> None:
    first = world.groups.begin(world.peer("a0"), rank(0, "A"), checkpoint=b"", total=1)
    world.groups.begin(world.peer("a1"), rank(1, "A"), checkpoint=b"", total=1)
    world.leave("a1")
    assert not world.state.transactions
    assert not world.state.claims
    with pytest.raises(Refused, match="went away") as caught:
        world.groups.get(world.peer("a0"), first.id)
    assert code_of(caught) == "group_failed"


def test_the_same_rank_twice_in_a_launch_is_refused(world: World) -> None:
    world.groups.begin(world.peer("a0"), rank(0, "A"), checkpoint=b"", total=1)
    with pytest.raises(Refused):
        world.groups.begin(world.peer("a1"), rank(0, "A", gpu="GPU-9"), checkpoint=b"", total=1)


def test_ranks_that_disagree_about_the_size_are_refused(world: World) -> None:
    world.groups.claim(world.peer("a0"), rank(0, "A"), 0)
    with pytest.raises(Refused) as caught:
        world.groups.claim(world.peer("a1"), Key("g", "tp1/2", "GPU-1", "A", 3), 0)
    assert code_of(caught) == "group_mismatch"


_moves = st.tuples(
    st.sampled_from(["claim", "begin", "commit", "leave", "unclaim"]),
    st.sampled_from("ABC"),
    st.integers(0, 1),
)


@given(st.lists(_moves, max_size=40))
def test_no_order_of_events_publishes_a_mix(moves: list[tuple[str, str, int]]) -> None:
    world = World()
    for move, launch, number in moves:
        name, of = f"{launch}{number}", rank(number, launch)
        mine = [t for t in world.state.transactions.values() if t.peer == name]
        try:
            if move == "claim":
                world.groups.claim(world.peer(name), of, world.state.publications)
            elif move == "begin":
                world.groups.begin(world.peer(name), of, checkpoint=launch.encode(), total=1)
            elif move == "commit" and mine:
                mine[0].committed = True
                world.groups.complete(world.peer(name), mine[0])
            elif move == "unclaim":
                world.groups.unclaim(world.peer(name))
            elif move == "leave" and name in world.state.peers:
                world.leave(name)
        except Refused:
            pass
        batches: dict[str, set[str]] = {}
        for edition in world.state.editions.values():
            batches.setdefault(edition.batch, set()).add(edition.key.launch + edition.key.rank)
        assert all(len(b) == 2 and len({name[0] for name in b}) == 1 for b in batches.values())
        owners = [(c.key.rank, c.key.gpu) for c in world.state.claims]
        assert len(owners) == len(set(owners))
        assert {t.peer for t in world.state.transactions.values()} <= {c.peer for c in world.state.claims}
        assert {c.peer for c in world.state.claims} <= set(world.state.peers)
