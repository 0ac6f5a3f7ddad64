"""A restart that begins at the first sign of a death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fer.standby import process, supervisor
from fer.standby.process import through
from tests.support.spare_service import Service
from tests.unit.test_supervisor_groups import until
from tests.unit.test_supervisor_processes import gone, play


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


@pytest.mark.parametrize("useful", ["answered", "for long", ""])
def test_a_death_after_useful_work_counts_as_the_first(
    service: Service, monkeypatch: pytest.MonkeyPatch, useful: str
) -> None:
    async def work() -> None:
        async with service.running():
            member = service.supervisor.members[0]
            member.failures = 7
            assert member.target is not None
            if useful == "answered":
                member.target.first.set()
            monkeypatch.setattr(supervisor, "STABLE_S", 0.0 if useful == "for long" else 60.0)
            assert (service.supervisor._early(member) is not None) == bool(useful)

    play(work)


def test_the_next_engine_begins_while_the_one_before_still_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    monkeypatch.setattr(process, "CLOSED_S", 20.0)
    service = Service(tmp_path, through("off"))
    service.fault.write_text("closes")

    async def work() -> None:
        async with service.running():
            member = service.supervisor.members[0]
            os.kill(service.pid, signal.SIGUSR1)
            await until(lambda: member.begun is not None and bool(member.begun.group.processes))
            assert member.begun is not None
            await member.begun.group.ready()
            service.fault.unlink()  # now it ends
            await service.next()
            (outage,) = service.outages
            assert outage.noticed < outage.spawned < outage.ready < outage.died and outage.path == "exec"
            assert "exit status 9" in service.supervisor.last_error

    play(work)


def test_one_that_says_why_it_ends_may_need_others_to_give_way_first(tmp_path: Path) -> None:
    service = Service(tmp_path, through("off"))
    service.fault.write_text("broken")

    async def work() -> None:
        async with service.running():
            os.kill(service.pid, signal.SIGUSR1)
            await service.next()
            (outage,) = service.outages
            assert outage.spawned > outage.died
            assert "the cache does not fit" in service.supervisor.last_error

    play(work)


def test_one_that_speaks_no_more_and_lives_on_is_killed(
    service: Service, monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    monkeypatch.setattr(process, "CLOSED_S", 0.1)
    service.fault.write_text("closes")

    async def work() -> None:
        async with service.running():
            first, spare = service.pid, await service.waiting()
            os.kill(first, signal.SIGUSR1)
            assert await service.next() == spare
            assert gone(first) and "SIGKILL" in service.supervisor.last_error

    play(work)


@pytest.mark.parametrize("what", ["ordered", "failures", "stop"])
def test_nothing_begins_early_where_none_is_to_come_at_once(service: Service, what: str) -> None:
    async def work() -> None:
        async with service.running():
            member = service.supervisor.members[0]
            assert service.supervisor._early(member) is not None
            if what == "ordered":
                member.ordered = "it moves"
            elif what == "failures":
                member.failures = 2
            else:
                member.stop.set()
            assert service.supervisor._early(member) is None

    play(work)
