"""What a holder leaves reaches the next holder and nobody else, whatever is killed; keepers and holders are real."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from fer.errors import ProtocolError, Refused
from fer.memory import seal
from fer.memory.fd import Fd
from fer.weights import wire
from fer.weights.keeper.pidfds import started
from fer.weights.services import Tenure, hold
from tests.support.keeper import PAGE, Keeper, read_line, wait_until
from tests.support.processes import WAIT_S, Children, kill_and_wait

HOLDER = """
import mmap, os, sys
from pathlib import Path
from fer.memory import seal
from fer.weights import services, wire
from fer.weights.client import KeeperClient
place, guardian = Path(sys.argv[1]), int(sys.argv[2])
tenure = services.hold(str(place), connect=lambda: KeeperClient.connect(place), wait_s=20.0)
found = tenure.take_estate()
print("found", ",".join(os.pread(fd.fileno(), 99, 0).rstrip(b"\\0").decode() for fd in found.fds) if found else "-",
      found.estate.about.decode() if found else "", flush=True)
for line in sys.stdin:
    word, *texts = line.split()
    if word == "leave":
        fds = [seal.fixed_memfd("estate", 4096) for _ in texts]
        for fd, text in zip(fds, texts):
            os.pwrite(fd.fileno(), text.encode(), 0)
        who = wire.Process(guardian, services.started(guardian)) if guardian else None
        slabs = [wire.SlabInfo("host", 4096) for _ in fds]
        print(tenure.bequeath(wire.Estate(gpu="host", slabs=slabs, about=b"about", guardian=who), fds), flush=True)
        for fd in fds:
            fd.close()
    elif word == "write":
        os.pwrite(found.fds[0].fileno(), texts[0].encode(), 0)
        print("written", flush=True)
    else:
        tenure.release(pass_on=word == "pass")
        print("released", flush=True)
"""


class Holder:
    """A process that holds the service of a place, and leaves something if asked."""

    def __init__(self, children: Children, keeper: Keeper, *, guardian: int = 0) -> None:
        self.child: subprocess.Popen[str] = children.python(
            HOLDER, str(keeper.directory), str(guardian), stdin=subprocess.PIPE
        )

    def found(self) -> list[str]:
        """What it was given when it was granted the service: contents, and the word about them."""
        said = read_line(self.child.stdout).split()
        assert said[0] == "found"
        return said[1:]

    def ask(self, words: str) -> str:
        assert self.child.stdin is not None
        self.child.stdin.write(words + "\n")
        self.child.stdin.flush()
        return read_line(self.child.stdout).strip()


def estates(keeper: Keeper) -> list[int]:
    """Bytes of each that is kept."""
    return [service.estate for service in keeper.status().services if service.estate]


def test_who_comes_after_a_death_finds_the_same_memory(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper)
    assert first.found() == ["-"]
    assert first.ask("leave one two") == "True"
    assert estates(keeper) == [2 * PAGE]
    second = Holder(children, keeper)
    children.kill(first.child)
    assert second.found() == ["one,two", "about"]
    assert second.ask("write three") == "written"
    children.kill(second.child)
    assert Holder(children, keeper).found() == ["three,two", "about"], "it goes on without being left anew"


def test_a_holder_that_is_done_takes_it_away_unless_it_passes_it_on(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper)
    first.found()
    first.ask("leave one")
    assert first.ask("pass") == "released"
    second = Holder(children, keeper)
    assert second.found() == ["one", "about"]
    assert second.ask("release") == "released"
    assert estates(keeper) == []
    assert Holder(children, keeper).found() == ["-"]


def test_what_is_left_anew_takes_the_place_of_what_was(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper)
    first.found()
    kept = keeper.status().descriptors
    for number in range(20):
        assert first.ask(f"leave {number}") == "True"
    assert keeper.status().descriptors == kept + 1
    children.kill(first.child)
    assert Holder(children, keeper).found() == ["19", "about"]


def test_a_keeper_that_is_killed_loses_nothing_of_it(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper)
    first.found()
    first.ask("leave one")
    keeper.kill()
    children.kill(first.child)
    assert Holder(children, keeper).found() == ["one", "about"]
    keeper.kill()
    assert estates(keeper) == [PAGE]


def test_a_keeper_that_lost_everything_is_given_it_again(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper)
    first.found()
    first.ask("leave one")
    kill_and_wait(keeper.minder.pid)
    keeper.kill()
    blank = Keeper(children, keeper.directory)
    wait_until(lambda: estates(blank) == [PAGE], "the holder tells it")
    second = Holder(children, blank)
    children.kill(first.child)
    assert second.found() == ["one", "about"]


def test_it_goes_with_its_guardian(keeper: Keeper, children: Children) -> None:
    guardian = children.python("import signal; signal.pause()")
    first = Holder(children, keeper, guardian=guardian.pid)
    first.found()
    first.ask("leave one")
    children.kill(first.child)
    wait_until(lambda: not keeper.status().services[0].processes, "the death is seen")
    assert estates(keeper) == [PAGE], "its guardian may start another holder"
    kept = keeper.status().descriptors
    children.kill(guardian)
    wait_until(lambda: keeper.status().services == [], "nobody will take it")
    assert keeper.status().descriptors < kept
    assert "guardian" in keeper.events("dropped")[-1]


def test_one_whose_guardian_ended_while_it_was_held_goes_with_the_holder(keeper: Keeper, children: Children) -> None:
    guardian = children.python("import signal; signal.pause()")
    first = Holder(children, keeper, guardian=guardian.pid)
    first.found()
    first.ask("leave one")
    children.kill(guardian)
    assert estates(keeper) == [PAGE]
    children.kill(first.child)
    wait_until(lambda: keeper.status().services == [], "nobody will take it")


def test_who_waits_is_not_given_what_another_guardian_left(keeper: Keeper, children: Children) -> None:
    guardian = children.python("import signal; signal.pause()")
    first = Holder(children, keeper, guardian=guardian.pid)
    first.found()
    first.ask("leave one")
    before = len(keeper.descriptors())
    second = Holder(children, keeper)
    wait_until(lambda: len(keeper.descriptors()) > before, "it has come, and waits")
    children.kill(guardian)
    children.kill(first.child)
    assert second.found() == ["-"]


def test_room_is_made_of_what_nobody_holds(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper)
    first.found()
    first.ask("leave one")
    with keeper.client() as client:
        client.make_room("host", 1)
        assert estates(keeper) == [PAGE], "its holder uses it"
        children.kill(first.child)
        wait_until(lambda: not keeper.status().services[0].processes, "the death is seen")
        client.make_room("GPU-1", 1)
        assert estates(keeper) == [PAGE]
        client.make_room("host", 1)
        assert estates(keeper) == []
    assert Holder(children, keeper).found() == ["-"]


@pytest.fixture
def tenure(keeper: Keeper) -> Iterator[Tenure]:
    with hold(str(keeper.directory), connect=keeper.client, wait_s=WAIT_S) as held:
        yield held


def estate(size: int = PAGE, kind: str = "host", gpu: str = "host") -> wire.Estate:
    return wire.Estate(gpu=gpu, slabs=[wire.SlabInfo(kind, size)], about=b"")  # type: ignore[arg-type]


def test_only_the_holder_leaves_anything(keeper: Keeper, tenure: Tenure) -> None:
    with keeper.client() as other, seal.fixed_memfd("estate", PAGE) as fd:
        with pytest.raises(Refused, match="not this connection's"):
            other.bequeath(str(keeper.directory), estate(), [fd])
        with pytest.raises(Refused):
            other.bequeath("nobody's", None, [])
        assert tenure.bequeath(estate(), [fd]) and estates(keeper) == [PAGE]
        assert tenure.bequeath(None, []) and estates(keeper) == []


def test_what_is_of_no_use_is_given_back(keeper: Keeper) -> None:
    with hold(str(keeper.directory), connect=keeper.client, wait_s=WAIT_S) as tenure:
        with seal.fixed_memfd("estate", PAGE) as fd:
            assert tenure.bequeath(estate(), [fd])
        tenure.release(pass_on=True)
    with hold(str(keeper.directory), connect=keeper.client, wait_s=WAIT_S) as tenure:
        assert estates(keeper) == [PAGE]
        tenure.decline_estate()
        assert estates(keeper) == [] and tenure.take_estate() is None


def test_what_was_inherited_is_left_to_a_new_keeper_too(keeper: Keeper, children: Children) -> None:
    with seal.fixed_memfd("estate", PAGE) as fd:
        with hold(str(keeper.directory), connect=keeper.client, wait_s=WAIT_S) as tenure:
            assert tenure.bequeath(estate(), [fd])
            tenure.release(pass_on=True)
        with hold(str(keeper.directory), connect=keeper.client, wait_s=WAIT_S) as tenure:
            found = tenure.take_estate()
            assert found is not None
            found.close()
            kill_and_wait(keeper.minder.pid)
            keeper.kill()
            blank = Keeper(children, keeper.directory)
            wait_until(lambda: estates(blank) == [PAGE], "the holder tells it")


def growing() -> Fd:
    fd = seal.memfd("estate")
    os.ftruncate(fd.fileno(), PAGE)
    return fd


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: seal.sealed_bytes("slab", b"x" * PAGE), estate()),
        (growing, estate()),
        (lambda: seal.fixed_memfd("estate", 2 * PAGE), estate()),
        (lambda: Fd(os.open("/dev/null", os.O_RDWR)), estate()),
        (lambda: seal.fixed_memfd("estate", PAGE), estate(kind="cuda")),
        (lambda: seal.fixed_memfd("estate", PAGE), estate(kind="cuda", gpu="GPU-1")),
        (lambda: seal.fixed_memfd("estate", PAGE), estate(kind="cuda-ipc", gpu="GPU-1")),
    ],
    ids=["read-only", "growing", "larger", "a device", "a GPU's of the host", "no driver's", "another kind"],
)
def test_what_no_next_holder_could_map_is_refused(
    keeper: Keeper, tenure: Tenure, make: object, said: wire.Estate
) -> None:
    with make() as fd, pytest.raises(ProtocolError):  # type: ignore[operator]
        tenure.bequeath(said, [fd])
    assert estates(keeper) == []
    assert [process.pid for service in keeper.status().services for process in service.processes] == [os.getpid()]


def test_this_process_is_named_for_certain() -> None:
    assert started(os.getpid()) > 0 and started(1 << 22) == 0
