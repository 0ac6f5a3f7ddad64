"""What survives: the keeper killed at every step, its minder killed, both killed; and orderly ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fer import paths
from fer.errors import KeeperUnavailable, LeasesStand, Refused
from fer.memory.seal import read_sealed
from fer.weights.client import KeeperClient, SlabInfo
from fer.weights.keeper.journal import Journal
from fer.weights.keeper.start import UNIT_PROPERTIES, start_keeper
from tests.support.descriptors import open_descriptors
from tests.support.keeper import PAGE, Keeper, begin, engine_at, key, publish, slab, wait_until
from tests.support.keeper_manager import Manager
from tests.support.processes import ROOT, WAIT_S, Children, halt, kill_all_with, kill_and_wait, with_variable

# --- the keeper, killed at every step of every request ---

READING = ["find", "slabs", "status"]  # these store and journal nothing


@pytest.mark.parametrize("step", ["executed", "stored", "journalled", "replied", "consumed"])
def test_no_kill_of_the_keeper_is_noticed_by_its_client(children: Children, runtime_dir: Path, step: str) -> None:
    requests = ["hello", "find", "claim", "begin", "add_slabs", "commit", "lease", "slabs", "annotate", "status"]
    requests += ["acquire_role", "release_role", "release", "make_room"]
    if step in ("stored", "journalled"):
        requests = [name for name in requests if name not in READING]
    plan = [f"{step}:{name}" for name in requests]
    keeper = Keeper(children, runtime_dir, fault=",".join(plan))
    with keeper.client() as client:
        assert client.find(key()).candidates == []
        assert client.claim(key(), wait_s=0).outcome == "claimed"
        transaction = client.begin(key(), fields=b"f", checkpoint=b"c", total=300 * PAGE).transaction
        with slab(b"w") as fd:
            client.add_slabs(transaction, [(SlabInfo("host", PAGE), fd)] * 300)
        edition = client.commit(transaction, b"manifest", wait_s=5).edition
        assert edition == transaction
        with client.lease(edition) as leased:
            assert len(leased.slabs) == 300
            assert leased.manifest == b"manifest"
            assert {read_sealed(fd, PAGE) for _, fd in leased.slabs} == {b"w" * PAGE}
        client.annotate(edition, digests=b"d")
        status = client.status()
        assert [info.digests for info in status.editions] == [True]
        assert (status.pending, status.claims) == ([], [])
        assert client.acquire_role("active", wait_s=0)
        client.release_role("active")
        client.release(edition)
        client.make_room("host", None)
        status = client.status()
        assert status.editions == []
        assert status.restarts == len(plan)
        assert keeper.faults() == plan, "every one of them fired"
        assert status.descriptors == 4, "listener, journal, lock and this connection"
        assert len(status.connections) == 1


@pytest.mark.parametrize("step", ["executed", "stored", "journalled"])
def test_a_kill_while_a_connection_ends_leaves_nothing_of_it(children: Children, runtime_dir: Path, step: str) -> None:
    keeper = Keeper(children, runtime_dir, fault=f"{step}:hangup")
    with keeper.client() as client:
        child = engine_at(children, keeper, "add", key())
        children.kill(child)
        status = client.status()
        assert keeper.faults() == [f"{step}:hangup"]
        assert status.restarts == 1
        assert (status.pending, status.claims, len(status.connections)) == ([], [], 1)
        assert status.descriptors == 4


def test_a_waiting_claim_and_a_waiting_role_outlive_the_keeper(keeper: Keeper) -> None:
    with keeper.client("loader") as loader, keeper.client("claimer") as claimer, keeper.client("next") as successor:
        assert loader.claim(key(), wait_s=0).outcome == "claimed"
        assert loader.acquire_role("active", wait_s=0)
        outcomes: dict[str, object] = {}
        calls = {
            "claim": lambda: claimer.claim(key(launch="other"), wait_s=WAIT_S).outcome,
            "role": lambda: successor.acquire_role("active", wait_s=WAIT_S),
        }
        threads = [
            threading.Thread(target=lambda n=name, c=call: outcomes.update({n: c()}), daemon=True)
            for name, call in calls.items()
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(keeper.status().waiting) == 2, "both wait")
        keeper.kill()
        assert len(loader.status().waiting) == 2
        publish(loader, key())
        loader.release_role("active")
        for thread in threads:
            thread.join(WAIT_S)
        assert outcomes == {"claim": "look_again", "role": True}


def test_a_wait_ends_when_it_was_to_end_whatever_the_keeper_suffers(keeper: Keeper) -> None:
    with keeper.client() as loader, keeper.client() as waiter:
        assert loader.claim(key(), wait_s=0).outcome == "claimed"
        outcomes: list[str] = []
        thread = threading.Thread(
            target=lambda: outcomes.append(waiter.claim(key(launch="other"), wait_s=0.5).outcome), daemon=True
        )
        thread.start()
        wait_until(lambda: len(keeper.status().waiting) == 1, "it waits")
        keeper.kill()
        thread.join(WAIT_S)
        assert outcomes == ["timeout"]


def test_a_group_outlives_a_keeper_killed_between_its_commits(keeper: Keeper) -> None:
    keys = [key(rank=f"tp{number}/2", local_size=2) for number in range(2)]
    with keeper.client() as r0, keeper.client() as r1:
        first = begin(r0, keys[0])
        committed: list[str] = []
        thread = threading.Thread(
            target=lambda: committed.append(r0.commit(first, b"m", wait_s=WAIT_S).edition), daemon=True
        )
        thread.start()
        wait_until(lambda: len(keeper.status().waiting) == 1, "rank 0 waits")
        keeper.kill()
        r1.commit(begin(r1, keys[1]), b"m", wait_s=WAIT_S)
        thread.join(WAIT_S)
        assert committed == [first]


def test_leases_stand_and_nothing_is_evicted_over_the_death(children: Children, runtime_dir: Path) -> None:
    """Three leased editions on one GPU, far over the budget of unleased ones."""
    keeper = Keeper(children, runtime_dir, FER_KEEPER_GRACE_S="0")
    clients = [keeper.client(group) for group in "abc"]
    editions = [publish(client, key(group)) for client, group in zip(clients, "abc", strict=True)]
    keeper.kill()
    status = clients[0].status()
    assert [info.edition for info in status.editions] == editions
    assert [info.holders[0].label for info in status.editions] == list("abc")
    for client in clients:
        client.close()
        keeper.status()  # two ends seen in one turn of the loop would have no order
    assert [info.edition for info in keeper.status().editions] == editions[-1:]


def test_an_engine_that_died_meanwhile_is_seen_on_return(keeper: Keeper, children: Children) -> None:
    with keeper.client("survivor") as survivor:
        kept = publish(survivor, key("kept"))
        child = engine_at(children, keeper, "commit", key("killed"))
        unfinished = engine_at(children, keeper, "add", key("unfinished"))
        halt(keeper.minder.pid)  # so that nobody starts the next keeper too early
        keeper.kill()
        children.kill(child)
        children.kill(unfinished)
        os.kill(keeper.minder.pid, signal.SIGCONT)
        status = survivor.status()
        assert status.restarts == 1
        assert [holder.label for holder in status.connections] == ["survivor"]
        assert (status.pending, status.claims) == ([], [])
        holders = {info.edition: len(info.holders) for info in status.editions}
        assert holders.pop(kept) == 1
        assert list(holders.values()) == [0], "one unleased edition is within the budget"


def test_connects_queue_while_no_keeper_runs(keeper: Keeper) -> None:
    with keeper.client() as client:
        publish(client, key())
    halt(keeper.minder.pid)
    dead = keeper.kill()
    clients: list[KeeperClient] = []
    thread = threading.Thread(target=lambda: clients.append(keeper.client()), daemon=True)
    thread.start()
    wait_until(lambda: queued(keeper) > 0, "the connect is queued")
    assert not clients
    os.kill(keeper.minder.pid, signal.SIGCONT)
    thread.join(WAIT_S)
    with clients[0] as client:
        assert client.keeper_pid != dead
        assert len(client.status().editions) == 1


def queued(keeper: Keeper) -> int:
    """Connections of the socket that nobody has accepted, as the kernel lists them (state 02: connecting)."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sum(str(keeper.directory) in line and line.split()[5] == "02" for line in lines)


def test_weights_outlive_publisher_and_keeper(keeper: Keeper, children: Children) -> None:
    child = engine_at(children, keeper, "commit", key())
    children.kill(child)
    keeper.kill()
    with keeper.client() as client:
        [candidate] = client.find(key()).candidates
        with client.lease(candidate.edition) as leased:
            assert [read_sealed(fd, PAGE) for _, fd in leased.slabs] == [b"x" * PAGE] * 2


def test_clients_at_work_never_notice_a_keeper_killed_again_and_again(children: Children, runtime_dir: Path) -> None:
    keeper = Keeper(children, runtime_dir, FER_KEEPER_BUDGET_EDITIONS="9")
    finished, errors, cycles = threading.Event(), [], [0, 0, 0]

    def work(number: int) -> None:
        try:
            while not finished.is_set():
                with keeper.client(f"worker {number}") as client:
                    of = key(f"group {number}", launch=f"launch {cycles[number]}")
                    found = client.find(of).candidates
                    if found:
                        assert [info.edition for info in client.evict(found[0].edition)] == [found[0].edition]
                    assert client.claim(of, wait_s=WAIT_S).outcome == "claimed"
                    with client.lease(publish(client, of, slabs=5)) as leased:
                        assert len(leased.slabs) == 5
                cycles[number] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        before = sum(cycles)
        keeper.kill()
        # On to the next kill once the successor has served every one of them for a while, or one of them gave up.
        wait_until(lambda least=before + 6: sum(cycles) >= least or bool(errors), "they go on")
    finished.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert errors == []
    status = keeper.status()
    assert status.restarts == 6
    assert (status.pending, status.claims, len(status.editions)) == ([], [], 3)


# --- the minder ---


def protection(client: KeeperClient) -> str:
    return client.status().protection


def protected(client: KeeperClient, times: int) -> bool:
    """Whether a keeper has found a minder again, that many times."""
    return sum(event.kind == "protected" for event in client.status().events) == times


def test_a_killed_minder_is_replaced_and_the_new_one_protects(keeper: Keeper) -> None:
    with keeper.client() as client:
        edition = publish(client, key(), slabs=5)
        pid = keeper.pid
        kill_and_wait(keeper.minder.pid)
        wait_until(lambda: protected(client, 1), "a new minder protects")
        kill_and_wait(parents(keeper)[-1])
        wait_until(lambda: protected(client, 2), "another one protects")
        assert keeper.pid == pid, "the keeper itself went on"
        assert protection(client) == "minder"
        assert any("minder died" in e.text for e in client.status().events if e.kind == "unprotected")
        keeper.kill()
        status = client.status()
        assert (status.restarts, [info.edition for info in status.editions]) == (1, [edition])
        assert status.editions[0].holders[0].label == "test"
        assert not with_zombies(keeper)
        with client.lease(edition) as leased:
            assert len(leased.slabs) == 5


def test_a_minder_that_hangs_is_replaced(keeper: Keeper) -> None:
    with keeper.client() as client:
        halt(keeper.minder.pid)
        edition = publish(client, key())
        wait_until(lambda: protected(client, 1), "a new minder protects")
        assert keeper.minder.wait(WAIT_S) == -signal.SIGKILL, "the old one must not start a second keeper later"
        keeper.kill()
        assert [info.edition for info in client.status().editions] == [edition]


def with_zombies(keeper: Keeper) -> list[int]:
    """Dead children the keeper has not reaped."""
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    return [int(pid) for pid in children if not cmdline(int(pid))]


def parents(keeper: Keeper) -> list[int]:
    """Processes of this keeper other than itself: its minders, the newest last."""
    pids = with_variable("FER_RUNTIME_DIR", str(keeper.directory))
    return sorted(pid for pid in pids if pid != keeper.pid and b"--adopt" in cmdline(pid))


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_with_keeper_and_minder_killed_the_next_start_is_clean(keeper: Keeper, children: Children) -> None:
    with keeper.client() as client:
        publish(client, key())
        pids = [keeper.pid, keeper.minder.pid]
        for pid in pids:
            halt(pid)
        for pid in pids:
            kill_and_wait(pid)
        kill_all_with("FER_RUNTIME_DIR", str(keeper.directory))
        with pytest.raises(KeeperUnavailable):
            client.status()
    with pytest.raises(KeeperUnavailable):
        KeeperClient.connect()
    with Keeper(children, keeper.directory).client() as client:
        status = client.status()
        assert (status.editions, status.restarts) == ([], 0)
        publish(client, key())


# --- ends that were asked for ---


def ended(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() and cmdline(pid) for pid in pids)


def test_stop_refuses_while_leases_stand_and_frees_everything_when_forced(keeper: Keeper) -> None:
    pids = [keeper.pid, keeper.minder.pid]
    with keeper.client("engine") as engine, keeper.client() as client:
        publish(engine, key())
        with pytest.raises(LeasesStand, match="engine"):
            client.stop()
        client.stop(force=True)
        assert keeper.minder.wait(WAIT_S) == 0
        wait_until(lambda: ended(pids), "both are gone")
        with pytest.raises(KeeperUnavailable):
            engine.status()
    assert not (keeper.directory / paths.SOCKET).exists()


def test_stop_ends_an_adopted_keeper_too(keeper: Keeper) -> None:
    with keeper.client() as client:
        kill_and_wait(keeper.minder.pid)
        wait_until(lambda: protected(client, 1), "a new minder protects")
        pids = [keeper.pid, *parents(keeper)]
        assert len(pids) == 2
        client.stop()
    wait_until(lambda: ended(pids), "both are gone")


@pytest.mark.parametrize("whom", ["keeper", "minder"])
def test_sigterm_stops_both(keeper: Keeper, whom: str) -> None:
    pids = [keeper.pid, keeper.minder.pid]
    with keeper.client() as client:
        publish(client, key())
        os.kill(keeper.pid if whom == "keeper" else keeper.minder.pid, signal.SIGTERM)
        assert keeper.minder.wait(WAIT_S) == 0
    wait_until(lambda: ended(pids), "both are gone")
    assert not (keeper.directory / paths.SOCKET).exists()


def test_sighup_restarts_in_place(keeper: Keeper) -> None:
    with keeper.client() as client:
        edition = publish(client, key())
        before = keeper.pid
        os.kill(before, signal.SIGHUP)
        wait_until(lambda: keeper.pid != before, "another process is the keeper")
        assert [info.edition for info in client.status().editions] == [edition]


# --- under a service manager ---


@pytest.fixture
def manager(children: Children, runtime_dir: Path) -> Iterator[Manager]:
    made = Manager(children, runtime_dir)
    made.start()
    yield made
    children.end()
    made.close()


def test_the_fd_store_of_a_service_manager_brings_everything_back(manager: Manager) -> None:
    with manager.client() as client:
        assert protection(client) == "systemd"
        edition = publish(client, key(), slabs=300)
        assert client.acquire_role("active", wait_s=0)
        manager.kill()
        manager.start()
        status = client.status()
        assert [info.edition for info in status.editions] == [edition]
        assert [role.role for role in status.roles] == ["active"]
        with client.lease(edition) as leased:
            assert len(leased.slabs) == 300
        client.release(edition)
        client.evict()
        client.status()
    assert not any(name.startswith(("e", "p")) for name in manager.store)


def test_a_restart_of_the_unit_keeps_the_weights_and_stop_frees_them(manager: Manager) -> None:
    with manager.client() as client:
        publish(client, key())
        manager.process.terminate()  # systemctl restart
        assert manager.process.wait(WAIT_S) == 0
        manager.start()
        assert len(client.status().editions) == 1
        client.stop()
        assert manager.process.wait(WAIT_S) == 0
        assert manager.store == {}
        with pytest.raises(KeeperUnavailable):
            client.status()


def test_an_edition_whose_descriptors_did_not_come_back_is_lost_by_name(manager: Manager) -> None:
    with manager.client() as client:
        whole, broken = publish(client, key("whole")), publish(client, key("broken"), slabs=3)
        manager.kill()
        manager.store.pop(f"{broken}.1").close()
        manager.start()
        status = client.status()
        assert [info.edition for info in status.editions] == [whole]
        assert any(broken in event.text for event in status.events if event.kind == "lost")
        assert not any(name.startswith(broken) for name in manager.store)
        with pytest.raises(Refused):
            client.lease(broken)


def test_a_journal_of_another_version_starts_empty_instead_of_dying_for_ever(manager: Manager) -> None:
    with manager.client() as client:
        publish(client, key())
        manager.kill()
        journal = Journal(manager.store["journal"].dup())
        journal.write(b"\x81\xa7unknown\x01")
        journal.close()
        manager.start()
        with pytest.raises(KeeperUnavailable):
            client.status()
    with manager.client() as client:
        status = client.status()
        assert status.editions == []
        assert status.events[0].kind == "forgot"
        publish(client, key())


def test_the_unit_file_says_what_a_transient_unit_gets() -> None:
    lines = (ROOT / "packaging/systemd/fer-keeper.service").read_text().splitlines()
    assert set(UNIT_PROPERTIES) <= set(lines)


# --- starting ---


def test_two_starts_at_once_end_with_one_keeper(children: Children, runtime_dir: Path) -> None:
    code = "from fer.weights.keeper.start import start_keeper; s = start_keeper(); print(s.how, s.pid)"
    starters = [children.python(code) for _ in range(3)]
    said = [child.communicate(timeout=WAIT_S)[0].split() for child in starters]
    assert {how for how, _ in said} <= {"detached", "running"}
    with KeeperClient.connect() as client:
        assert {int(pid) for _, pid in said} == {client.keeper_pid}
        assert protection(client) == "minder"
    wait_until(lambda: len(list(with_variable("FER_RUNTIME_DIR", str(runtime_dir)))) == 2, "one keeper, one minder")


def test_a_started_keeper_outlives_its_starter_and_holds_nothing_of_it(children: Children, runtime_dir: Path) -> None:
    code = "import sys; from fer.weights.keeper.start import start_keeper; print(start_keeper().pid, flush=True)"
    child = children.python(code)
    out, _ = child.communicate(timeout=WAIT_S)
    pid = int(out)
    assert start_keeper().how == "running"
    assert start_keeper().shares_cgroup
    assert os.getsid(pid) != os.getsid(0)
    assert not any("pipe:" in what for what in open_descriptors(pid).values())
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert (runtime_dir / "keeper.log").stat().st_mode & 0o777 == 0o600
    with KeeperClient.connect() as client:
        client.stop()


def test_a_keeper_that_cannot_start_says_why(runtime_dir: Path) -> None:
    (runtime_dir / paths.SOCKET).mkdir()
    with pytest.raises(KeeperUnavailable, match="no socket of this user"):
        start_keeper(timeout=2)


def test_the_module_explains_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fer.weights.keeper", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0
    assert "--runtime-dir" in done.stdout
