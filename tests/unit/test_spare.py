"""A process that waits to become the next engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fer.errors import LauncherError
from fer.standby import life, member
from fer.standby.launcher_client import Child
from fer.standby.member import FREE_RESTARTS, Begun
from fer.standby.process import Command, through
from fer.standby.version import Version
from tests.support.spare_service import Service, forked
from tests.unit.test_supervisor_groups import until
from tests.unit.test_supervisor_processes import gone, play


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def test_it_waits_untold_and_serves_next(service: Service, no_fd_leak: None) -> None:
    async def work() -> None:
        async with service.running():
            spare = await service.waiting()
            begun = service.supervisor.members[0].begun
            assert begun is not None and begun.group.stand is None and begun.group.first.told == 0
            assert not gone(spare) and spare != service.pid
            os.kill(service.pid, signal.SIGKILL)
            assert await service.next() == spare
            (outage,) = service.outages
            assert outage.path == "launcher" and outage.spawned < outage.begun < outage.noticed <= outage.told
            assert outage.told < outage.ready < outage.active and outage.noticed <= outage.died
            assert {"noticed", "told"} <= set(outage.seconds())
            another = await service.waiting()
            assert another not in (0, spare)
            pids = [service.pid, another]
        assert all(gone(pid) for pid in pids) and service.spare == 0

    play(work)


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30])
def test_none_is_left_that_was_only_on_its_way(service: Service, turns: int, no_fd_leak: None) -> None:
    async def work() -> None:
        async with service.running():
            member = service.supervisor.members[0]
            while member.begun is None:
                await asyncio.sleep(0)
            begun = member.begun
            for _ in range(turns):
                await asyncio.sleep(0)
        assert all(gone(process.pid) for process in begun.group.processes)

    play(work)


def test_one_that_died_is_named_no_more_and_not_waited_for(service: Service, no_fd_leak: None) -> None:
    async def work() -> None:
        async with service.running():
            spare = await service.waiting()
            os.kill(spare, signal.SIGKILL)
            await until(lambda: not service.spare)
            os.kill(service.pid, signal.SIGKILL)
            assert await service.next() != spare

    play(work)


def test_one_that_died_is_followed_by_another_ever_later(
    service: Service, monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    deaths: list[int] = []

    def delay_s(failures: int) -> float:
        deaths.append(failures)
        return 0.0

    monkeypatch.setattr(life, "delay_s", delay_s)

    async def work() -> None:
        async with service.running():
            engine, ended = service.pid, []
            for _ in range(3):
                ended.append(await service.waiting())
                os.kill(ended[-1], signal.SIGKILL)
                await until(lambda: service.spare not in (0, *ended))
            assert len({*ended}) == 3 and deaths == [FREE_RESTARTS + 1, FREE_RESTARTS + 2, FREE_RESTARTS + 3]
            assert all(0.0 < early < late for early, late in itertools.pairwise(map(member.delay_s, deaths)))
            assert service.pid == engine and service.supervisor.restarts == 0 and not service.supervisor.last_error
            last = await service.waiting()
            os.kill(engine, signal.SIGKILL)
            assert await service.next() == last

    play(work)


def test_one_that_waited_for_long_counts_as_the_first_to_die(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    deaths: list[int] = []
    monkeypatch.setattr(life, "delay_s", lambda failures: deaths.append(failures) or 0.0)
    monkeypatch.setattr(life, "STABLE_S", 0.0)

    async def work() -> None:
        async with service.running():
            for _ in range(2):
                spare = await service.waiting()
                os.kill(spare, signal.SIGKILL)
                await until(lambda spare=spare: service.spare not in (0, spare))
            assert deaths == [FREE_RESTARTS + 1] * 2

    play(work)


def test_one_that_hangs_is_ended_and_another_process_started(
    service: Service, monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    monkeypatch.setattr(life, "OBEY_S", 0.2)

    async def work() -> None:
        async with service.running():
            engine, spare = service.pid, await service.waiting()
            os.kill(spare, signal.SIGSTOP)
            os.kill(engine, signal.SIGKILL)
            await until(lambda: service.pid not in (0, engine, spare))
            assert gone(spare) and "did not begin when it was told to" in service.supervisor.last_error

    play(work)


@pytest.mark.parametrize("spare_first", [True, False])
def test_both_may_die_at_once(service: Service, spare_first: bool, no_fd_leak: None) -> None:
    async def work() -> None:
        async with service.running():
            both = [service.pid, await service.waiting()]
            for pid in reversed(both) if spare_first else both:
                os.kill(pid, signal.SIGKILL)
            await until(lambda: service.pid not in (0, *both))  # a dead spare may count as an engine, or not
            assert all(gone(pid) for pid in both)

    play(work)


def test_it_has_not_seen_files_that_changed_since(service: Service, no_fd_leak: None) -> None:
    async def work() -> None:
        async with service.running():
            spare = await service.waiting()
            os.utime(service.file, (1, 1))
            os.kill(service.pid, signal.SIGKILL)
            assert await service.next() != spare
            assert gone(spare)

    play(work)


def test_it_is_of_its_version_alone(service: Service) -> None:
    async def work() -> None:
        async with service.running():
            await service.waiting()
            begun = service.supervisor.members[0].begun
            assert begun is not None and await begun.fit(service.version)
            assert not await begun.fit(Version(online=service.version.online, model=service.model, number=2))
            unborn = Begun(begun.version, begun.path, begun.group, asyncio.create_task(asyncio.sleep(9, "")))
            assert not await unborn.fit(service.version)
            unborn.started.cancel()

    play(work)


@pytest.mark.parametrize("more", [{"members": 2}, {"ranks": 2}, {"orders": False}, {"spawn": through("off")}])
def test_there_is_none(tmp_path: Path, more: dict[str, Any]) -> None:
    service = Service(tmp_path, **more)

    async def work() -> None:
        async with service.running():
            members = service.supervisor.status()["members"]
            await until(lambda: all(member.role in ("active", "standby") for member in service.supervisor.members))
            await service.looked()
            assert [member["spare"] for member in members] == [None] * more.get("members", 1)

    play(work)


def test_there_is_none_beside_an_engine_on_trial(service: Service) -> None:
    async def work() -> None:
        async with service.running():
            spare = await service.waiting()
            new = service.supervisor.hire(service.version)
            await until(lambda: new.role == "standby")
            await service.looked()
            assert service.supervisor.status()["members"][1]["spare"] is None and service.spare == spare
            await service.supervisor.retire(new)

    play(work)


@pytest.mark.parametrize("error", [OSError("no more processes"), LauncherError("no")])
def test_where_it_cannot_be_started_the_service_goes_on_without(tmp_path: Path, error: Exception) -> None:
    starts: list[str] = []

    def spawn(command: Command, stdio: tuple[int, int, int]) -> Child:
        starts.append("")
        if len(starts) == 2:
            raise error
        return forked(command, stdio)

    service = Service(tmp_path, spawn)

    async def work() -> None:
        async with service.running():
            await until(lambda: len(starts) == 2 and service.supervisor.members[0].begun is None)
            os.kill(service.pid, signal.SIGKILL)
            await service.next()

    play(work)


def test_there_is_one_again_when_a_launcher_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    started: list[Child] = []

    def spawn(command: Command, stdio: tuple[int, int, int]) -> Child:
        started.append(child := forked(command, stdio))
        if len(started) in (2, 3):
            child.via = "exec"  # it has gone, or is being replaced by a fresh one
        return child

    service = Service(tmp_path, spawn)

    async def work() -> None:
        async with service.running():
            await until(lambda: len(started) == 4)
            spare = await service.waiting()
            assert spare == started[3].pid
            await until(lambda: all(gone(child.pid) for child in started[1:3]))
            os.kill(service.pid, signal.SIGKILL)
            assert await service.next() == spare

    play(work)


def test_one_waits_beside_an_engine_that_was_started_plainly(tmp_path: Path, no_fd_leak: None) -> None:
    def spawn(command: Command, stdio: tuple[int, int, int]) -> Child:
        child = forked(command, stdio)
        child.via = "launcher" if command.forked else "exec"  # it came up since
        return child

    service = Service(tmp_path, spawn)

    async def work() -> None:
        async with service.running():
            spare = await service.waiting()
            os.kill(service.pid, signal.SIGKILL)
            assert await service.next() == spare

    play(work)


def test_why_there_is_none_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fer.standby")
    tries: list[Command] = []

    def spawn(command: Command, stdio: tuple[int, int, int]) -> Child:
        if command.forked:
            tries.append(command)
            raise LauncherError("no launcher forks it", why=f"reason {len(tries) // 4}")
        return forked(command, stdio)

    service = Service(tmp_path, spawn)

    async def work() -> None:
        async with service.running():
            await until(lambda: len(tries) == 7)

    play(work)
    told = [record.getMessage() for record in caplog.records if "has no spare" in record.getMessage()]
    assert told == ["engine-0 has no spare: reason 0", "engine-0 has no spare: reason 1"]


def test_one_that_no_launcher_forked_is_ended_again(tmp_path: Path, no_fd_leak: None) -> None:
    started: list[Child] = []

    def spawn(command: Command, stdio: tuple[int, int, int]) -> Child:
        started.append(child := forked(command, stdio))
        if len(started) == 2:
            child.via = "exec"  # the launcher has gone meanwhile
        return child

    service = Service(tmp_path, spawn)

    async def work() -> None:
        async with service.running():
            await until(lambda: len(started) == 2 and gone(started[1].pid))
            assert service.spare == 0
            os.kill(service.pid, signal.SIGKILL)
            await service.next()

    play(work)


def test_a_service_that_ends_while_its_engine_dies_leaves_no_spare(
    service: Service, monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    service.fault.write_text("closes")

    async def work() -> None:
        asked, goes_on = asyncio.Event(), asyncio.Event()

        async def fit(self: Begun, version: Version) -> bool:
            asked.set()
            await goes_on.wait()
            return True

        async with service.running():
            spare = await service.waiting()
            monkeypatch.setattr(Begun, "fit", fit)
            os.kill(service.pid, signal.SIGUSR1)
            await asked.wait()
            service.supervisor.stop()
            await until(lambda: service.supervisor.members[0].target is None)
            goes_on.set()
        assert gone(spare)

    play(work)


def test_a_restart_does_not_wait_for_a_spare_that_is_only_on_its_way(tmp_path: Path, no_fd_leak: None) -> None:
    import threading

    starts: list[str] = []
    goes_on = threading.Event()

    def spawn(command: Command, stdio: tuple[int, int, int]) -> Child:
        starts.append("")
        if len(starts) == 2:
            goes_on.wait(20.0)  # a launcher that hangs
        return forked(command, stdio)

    service = Service(tmp_path, spawn)

    async def work() -> None:
        async with service.running():
            await until(lambda: len(starts) == 2)
            os.kill(service.pid, signal.SIGKILL)
            try:
                await service.next()
            finally:
                goes_on.set()

    play(work)


# --- the first sign of a death ---
