"""Who answers for a service, without sockets: grants, fences and refusals over real processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from fer.errors import Refused
from fer.memory.fd import Fd
from fer.memory.seal import fixed_memfd
from fer.weights import locks, wire
from fer.weights.keeper import claims as module
from fer.weights.keeper import estates
from fer.weights.keeper.claims import Claims
from fer.weights.keeper.editions import Store
from fer.weights.keeper.pidfds import started
from fer.weights.keeper.records import Peer, State, Wait
from fer.weights.keeper.shelf import Shelf
from tests.support.processes import Children, kill_and_wait

LIMIT_S = 20.0
S = f"s-{os.getpid()}"
"""The service; locks are the whole machine's, and other tests run beside."""


class Loop:
    """The keeper's loop: what is watched, and whether something became free."""

    def __init__(self) -> None:
        self.watched: dict[int, Callable[[int], None]] = {}
        self.changes = 0

    def watch(self, fd: int, call: Callable[[int], None]) -> None:
        self.watched[fd] = call

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def changed(self) -> None:
        self.changes += 1

    def turn(self, holds: Callable[[], bool]) -> None:
        """Call back until something holds."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline
            poll = select.poll()
            for fd in self.watched:
                poll.register(fd, select.POLLIN | select.POLLRDHUP)
            for fd, seen in poll.poll(100):
                if call := self.watched.get(fd):
                    call(seen)


class Desk:
    """A store with its claims, and peers that are real processes."""

    def __init__(self, children: Children, state: State | None = None) -> None:
        self.children, self.loop = children, Loop()
        self.store, self.shelf = Store(state or State(started=0.0)), Shelf()
        self.claims = Claims(self.store, self.shelf)
        self.begin()

    def begin(self) -> None:
        self.claims.start(self.loop.watch, self.loop.unwatch, self.loop.changed)

    def peer(self, name: str, processes: int = 1) -> tuple[Peer, list[wire.Process]]:
        started_here = [self.children.python("import signal; signal.pause()") for _ in range(processes)]
        cohort = [wire.Process(child.pid, started(child.pid)) for child in started_here]
        peer = Peer(name, cohort[0].pid, os.getuid(), name)
        self.store.state.peers[name] = peer
        return peer, cohort

    def take(self, peer: Peer, cohort: list[wire.Process], service: str = S, lock: Fd | None = None) -> bool:
        request = wire.ClaimService(1, service=service, processes=cohort, wait_s=9.0, again=lock is not None)
        held = self.claims.take(peer, request, [] if lock is None else [lock])
        if held is None and peer.wait is None:
            peer.wait = Wait(seq=1, until=0.0, order=self.store.state.tick(), service=service)
        if held is not None:
            peer.wait = None
        return held is not None

    def holders(self) -> dict[str, list[int]]:
        return {s.name: [p.pid for p in s.processes] for s in self.store.state.services.values() if s.processes}

    def end(self) -> None:
        for fd in [*self.claims._pidfds.values(), *self.claims._foreign.values()]:
            fd.close()
        self.shelf.close()


@pytest.fixture
def desk(children: Children, no_fd_leak: None) -> Iterator[Desk]:
    made = Desk(children)
    yield made
    children.end()
    made.end()


def test_one_holds_it_and_may_ask_twice(desk: Desk) -> None:
    (one, ones), (two, twos) = desk.peer("one"), desk.peer("two")
    assert desk.take(one, ones) and desk.take(one, ones)
    assert not desk.take(two, twos)
    assert desk.take(two, twos, service=f"another-{S}")
    assert desk.holders() == {S: [one.pid], f"another-{S}": [two.pid]}


def test_the_death_of_any_process_ends_all_and_only_then_the_next_is_granted(desk: Desk) -> None:
    (one, ones), (two, twos) = desk.peer("one", 3), desk.peer("two")
    assert desk.take(one, ones) and not desk.take(two, twos)
    kill_and_wait(ones[2].pid)
    desk.loop.turn(lambda: desk.loop.changes > 0)
    assert all(_dead(process.pid) for process in ones)
    assert desk.holders() == {}
    assert desk.take(two, twos)
    assert desk.store.state.services[S].fence_s > 0


def _dead(pid: int) -> bool:
    with Fd(os.pidfd_open(pid)) as fd:
        poll = select.poll()
        poll.register(fd.fileno(), select.POLLIN)
        return bool(poll.poll(0))


def test_a_cohort_that_does_not_end_is_never_followed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, ones), (two, twos) = desk.peer("one", 2), desk.peer("two")
    assert desk.take(one, ones) and not desk.take(two, twos)
    with monkeypatch.context() as deaf:
        deaf.setattr(signal, "pidfd_send_signal", lambda fd, number: None)
        os.kill(ones[0].pid, signal.SIGKILL)
        desk.loop.turn(lambda: desk.store.state.services[S].dying > 0)
        assert not desk.take(two, twos)
        assert "not all gone" in desk.claims.obstacle(S)[0]
        (at,) = desk.claims.times()
        desk.claims.expire(at)
        assert desk.claims.times() == [], "it is said once"
        assert [event.text.partition(" did not")[0] for event in desk.store.state.events if event.kind == "stuck"] == [
            f"{S}: {ones[1].pid}"
        ]
        assert not desk.take(two, twos)
    assert not desk.take(two, twos), "looking again, it is sent another SIGKILL"
    desk.loop.turn(lambda: desk.loop.changes > 0)
    assert desk.take(two, twos)


def test_a_closed_connection_frees_nothing_while_its_process_lives(desk: Desk) -> None:
    (one, ones), (two, twos) = desk.peer("one"), desk.peer("two")
    assert desk.take(one, ones)
    desk.claims.leave(one)
    assert not desk.take(two, twos)
    again = Peer("again", one.pid, one.uid, "again")
    assert desk.take(again, ones), "the same process, by another connection"
    desk.claims.release(one, S)
    assert desk.holders() == {S: [one.pid]}, "the connection before has no say any more"
    desk.claims.release(again, S)
    assert desk.holders() == {} and desk.take(two, twos)


def test_who_waits_longest_is_next_also_before_those_that_ask_just_then(desk: Desk) -> None:
    (one, ones), (two, twos), (three, threes) = desk.peer("one"), desk.peer("two"), desk.peer("three")
    assert desk.take(one, ones) and not desk.take(two, twos)
    desk.claims.release(one, S)
    assert not desk.take(three, threes), "two waits"
    assert desk.take(two, twos)
    two.wait = three.wait = None
    desk.claims.release(two, S)
    assert desk.take(one, ones)


def test_only_what_may_be_spoken_for_is_registered(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, ones), (_, twos) = desk.peer("one"), desk.peer("two")
    other_start = [wire.Process(one.pid, ones[0].born + 1)]
    for cohort, code in [(twos, "not_yours"), (other_start, "process_gone")]:
        with pytest.raises(Refused) as refused:
            desk.take(one, cohort)
        assert refused.value.fields["code"] == code
    monkeypatch.setattr(module, "_user", lambda pid: os.getuid() + 1)
    with pytest.raises(Refused, match="another user's"):
        desk.take(one, ones)
    user = os.getuid()
    monkeypatch.setattr(module, "_user", lambda pid: user)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(Refused) as refused:
        desk.take(one, [*ones, *twos])
    assert refused.value.fields["code"] == "cannot_fence"
    assert desk.holders() == {}


def test_a_keeper_that_lost_everything_grants_to_the_holder_alone(desk: Desk, children: Children) -> None:
    (one, ones) = desk.peer("one")
    assert desk.take(one, ones)
    with desk.shelf[desk.store.state.services[S].lock].dup() as lock:
        desk.shelf.close()  # the keeper's copy goes with it; the holder has this one
        blank = Desk(children)
        two, twos = blank.peer("two")
        assert not blank.take(two, twos), "the lock is taken"
        assert blank.claims.obstacle(S)[0].startswith("another keeper")
        stranger = socket.socket()
        with stranger, Fd(os.dup(stranger.fileno())) as wrong, pytest.raises(Refused, match="not the service's lock"):
            blank.take(two, twos, lock=wrong)
        blank.store.state.peers["one"] = one
        assert blank.take(one, ones, lock=lock.dup()), "who shows the lock holds the service"
        assert not blank.take(two, twos)
        two_again = lock.dup()
        with two_again, pytest.raises(Refused, match="another's"):
            blank.take(two, twos, lock=two_again)
    kill_and_wait(one.pid)
    blank.loop.turn(lambda: blank.loop.changes > 0)
    assert blank.take(two, twos)
    children.end()
    blank.end()


def test_the_end_of_a_lock_of_another_keeper_is_seen(desk: Desk) -> None:
    lock = locks.make(S)
    assert lock is not None and locks.make(S) is None
    (one, ones) = desk.peer("one")
    assert not desk.take(one, ones)
    lock.close()
    desk.loop.turn(lambda: desk.loop.changes > 0)
    assert desk.take(one, ones)


def test_a_successor_sees_who_died_meanwhile(desk: Desk, children: Children) -> None:
    (one, ones), (two, twos) = desk.peer("one", 2), desk.peer("two")
    assert desk.take(one, ones) and desk.take(two, twos, service=f"t-{S}")
    kill_and_wait(ones[1].pid)
    children.end()
    later = Desk(Children(), desk.store.state)
    later.loop.turn(lambda: not later.holders())
    later.claims.prune()
    assert later.store.state.services == {} and len(later.store.condemned) == 2
    later.end()


def test_nothing_is_kept_of_services_that_nobody_wants(desk: Desk) -> None:
    (one, ones), (two, twos) = desk.peer("one"), desk.peer("two")
    assert desk.take(one, ones) and not desk.take(two, twos)
    desk.claims.release(one, S)
    desk.claims.prune()
    assert S in desk.store.state.services, "somebody waits"
    two.wait = None
    desk.claims.prune()
    assert desk.store.state.services == {} and len(desk.store.condemned) == 1
    assert desk.loop.watched == {}


def test_the_start_of_a_process_is_what_the_kernel_says() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    with Fd(os.pidfd_open(child.pid)) as fd:
        poll = select.poll()
        poll.register(fd.fileno(), select.POLLIN)
        assert poll.poll(LIMIT_S * 1000)
        assert started(child.pid) > 0, "nobody has reaped it"
    child.wait(LIMIT_S)
    assert started(child.pid) == 0


def test_an_estate_waits_for_a_while_and_no_longer(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    (one, ones) = desk.peer("one")
    assert desk.take(one, ones)
    given = wire.Estate(gpu="host", slabs=[wire.SlabInfo("host", 4096)], about=b"")
    desk.claims.bequeath(one, wire.Bequeath(1, service=S, estate=given), [fixed_memfd("estate", 4096)])
    assert desk.claims.times() == [], "its holder has it"
    kill_and_wait(one.pid)
    desk.loop.turn(lambda: desk.loop.changes > 0)
    (until,) = desk.claims.times()
    assert 0 < until - time.monotonic() <= estates.KEEP_S
    desk.claims.prune()
    assert desk.store.state.services[S].estate == given
    monkeypatch.setattr(estates, "KEEP_S", 0.0)
    changes = desk.loop.changes
    desk.claims.expire(time.monotonic())
    assert desk.loop.changes == changes + 1
    desk.claims.prune()
    assert desk.store.state.services == {} and len(desk.store.condemned) == 2, "the estate's memory, and the lock"
