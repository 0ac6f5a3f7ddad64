"""One cohort answers for a service, whatever is killed, closed or deleted: keepers and holders are real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from fer import paths
from fer.errors import KeeperUnavailable, ServiceHeld
from fer.weights import locks
from fer.weights.keeper.sockets import LOCK
from fer.weights.services import hold, this_process
from tests.support.keeper import Keeper, read_line, wait_until
from tests.support.processes import WAIT_S, Children, halt, kill_and_wait

HOLDER = """
import subprocess, sys
from pathlib import Path
from fer.weights import services, wire
from fer.weights.client import KeeperClient
place, label, others, wait_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
cohort = [services.this_process()]
for _ in range(others):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    cohort.append(wire.Process(child.pid, services.started(child.pid)))
print("asks", *(each.pid for each in cohort), flush=True)
def lost(why):
    print("lost", why, flush=True)
tenure = services.hold(
    str(place), connect=lambda: KeeperClient.connect(place, label=label), wait_s=wait_s, processes=cohort, lost=lost
)
print("holds by", tenure.by, flush=True)
if sys.stdin.readline() == "release\\n":
    tenure.release()
    print("released", flush=True)
    sys.stdin.read()
"""


class Holder:
    """A process that asks for a service and goes on holding it. Locks are the machine's: it has the place's name."""

    def __init__(self, children: Children, place: Path, label: str, *, others: int = 0, wait_s: float = WAIT_S) -> None:
        self.child: subprocess.Popen[str] = children.python(
            HOLDER, str(place), label, str(others), str(wait_s), stdin=subprocess.PIPE
        )
        self.pids = [int(pid) for pid in read_line(self.child.stdout).split()[1:]]

    def says(self, words: str) -> bool:
        return read_line(self.child.stdout).startswith(words)

    def release(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("release\n")
        self.child.stdin.flush()


def holder_of(keeper: Keeper) -> list[int]:
    return [process.pid for service in keeper.status().services for process in service.processes]


def waits(keeper: Keeper, *labels: str) -> None:
    wait_until(lambda: [each.label for each in keeper.status().waiting] == [*labels], f"{labels} wait")


def test_the_next_one_is_granted_when_the_last_of_a_cohort_is_gone(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper.directory, "first", others=2)
    assert first.says("holds by keeper")
    second = Holder(children, keeper.directory, "second")
    waits(keeper, "second")
    kill_and_wait(first.pids[1])  # a child rank alone
    assert second.says("holds by keeper")
    assert not any(os.path.exists(f"/proc/{pid}/exe") and _alive(pid) for pid in first.pids)
    assert holder_of(keeper) == second.pids
    assert len(keeper.events("fenced")) == 1


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_stopped_holder_is_no_dead_one(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper.directory, "first")
    assert first.says("holds")
    halt(first.pids[0])
    second = Holder(children, keeper.directory, "second", wait_s=0.3)
    assert second.child.wait(WAIT_S) == 1
    assert holder_of(keeper) == first.pids
    children.kill(first.child)
    assert Holder(children, keeper.directory, "third").says("holds")


def test_candidates_wait_in_order_and_may_withdraw(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper.directory, "first")
    assert first.says("holds")
    second = Holder(children, keeper.directory, "second")
    waits(keeper, "second")
    third = Holder(children, keeper.directory, "third")
    waits(keeper, "second", "third")
    children.kill(second.child)
    waits(keeper, "third")
    first.release()
    assert first.says("released") and third.says("holds")
    assert holder_of(keeper) == third.pids


def test_a_held_service_is_refused_after_the_wait_with_its_holder(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper.directory, "first")
    assert first.says("holds")
    with pytest.raises(ServiceHeld, match=f"processes {first.pids[0]} hold it"):
        hold(str(keeper.directory), connect=keeper.client, wait_s=0.0)
    with hold(f"{keeper.directory}/t", connect=keeper.client, wait_s=0.0) as tenure:
        assert tenure.by == "keeper"


STEPS = ["executed", "stored", "journalled", "replied", "consumed"]


@pytest.mark.parametrize("step", STEPS)
def test_no_kill_of_the_keeper_makes_two_holders(children: Children, runtime_dir: Path, step: str) -> None:
    plan = [f"{step}:claim_service", f"{step}:release_service"]
    keeper = Keeper(children, runtime_dir, fault=",".join(plan))
    first = Holder(children, keeper.directory, "first", others=1)
    assert first.says("holds by keeper")
    second = Holder(children, keeper.directory, "second")
    waits(keeper, "second")
    assert holder_of(keeper) == first.pids
    kill_and_wait(first.pids[1])
    assert second.says("holds by keeper")
    assert holder_of(keeper) == second.pids
    third = Holder(children, keeper.directory, "third")
    waits(keeper, "third")
    second.release()
    assert second.says("released") and third.says("holds")
    assert holder_of(keeper) == third.pids
    assert keeper.faults() == plan


def test_a_holder_that_died_with_the_keeper_is_followed(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper.directory, "first", others=1)
    assert first.says("holds")
    second = Holder(children, keeper.directory, "second")
    waits(keeper, "second")
    halt(keeper.minder.pid)  # so that nobody starts the next keeper too early
    keeper.kill()
    children.kill(first.child)
    os.kill(keeper.minder.pid, signal.SIGCONT)
    assert second.says("holds by keeper")
    assert not _alive(first.pids[1]), "the rest of its cohort was ended before"


def test_a_keeper_that_lost_everything_grants_nothing_beside_the_holder(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper.directory, "first")
    assert first.says("holds")
    halt(first.pids[0])  # it cannot even say so
    kill_and_wait(keeper.minder.pid)
    keeper.kill()
    wait_until(lambda: not _listens(keeper.directory), "nobody listens")
    blank = Keeper(children, keeper.directory)
    with pytest.raises(ServiceHeld, match="another keeper"):
        hold(str(blank.directory), connect=blank.client, wait_s=0.2)
    second = Holder(children, keeper.directory, "second")
    waits(blank, "second")
    os.kill(first.pids[0], signal.SIGCONT)
    wait_until(lambda: holder_of(blank) == first.pids, "the holder tells the keeper")
    children.kill(first.child)
    assert second.says("holds by keeper")
    assert holder_of(blank) == second.pids


def _listens(directory: Path) -> bool:
    from fer.weights.client import KeeperClient

    try:
        KeeperClient.connect(directory, timeout=0.2).close()
    except KeeperUnavailable:
        return False
    return True


def test_a_second_keeper_in_a_place_whose_paths_were_deleted_grants_nothing(keeper: Keeper, children: Children) -> None:
    first = Holder(children, keeper.directory, "first")
    assert first.says("holds")
    for name in (paths.SOCKET, LOCK):
        (keeper.directory / name).unlink()
    other = Keeper(children, keeper.directory)
    second = Holder(children, keeper.directory, "second")
    waits(other, "second")
    assert holder_of(other) == []
    children.kill(first.child)
    assert second.says("holds by keeper")


def test_without_a_keeper_the_lock_alone_keeps_others_out(runtime_dir: Path, children: Children) -> None:
    first = Holder(children, runtime_dir, "first")
    assert first.says("holds by lock")
    second = Holder(children, runtime_dir, "second", wait_s=0.2)
    assert second.child.wait(WAIT_S) == 1
    patient = Holder(children, runtime_dir, "patient")
    children.kill(first.child)
    assert patient.says("holds by lock")
    first = patient
    keeper = Keeper(children, runtime_dir)
    third = Holder(children, runtime_dir, "third")
    waits(keeper, "third")
    children.kill(first.child)
    assert third.says("holds by keeper")


def test_nothing_stays_behind(keeper: Keeper, no_fd_leak: None) -> None:
    with keeper.client() as client:
        before = client.status()
        for _ in range(3):
            with hold(str(keeper.directory), connect=keeper.client, wait_s=0.0):
                assert client.status().descriptors == before.descriptors + 2, "a connection and a lock"
        wait_until(lambda: client.status().descriptors == before.descriptors, "both are gone")
        assert client.status().services == []
    assert locks.make(str(keeper.directory)).close() is None  # type: ignore[union-attr]
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "tenure"], "no thread is left")
    assert this_process().pid == os.getpid()
