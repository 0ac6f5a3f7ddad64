"""Rank groups under the supervisor: restarted as one, and never beside a process that does not end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from fer.errors import EngineDied
from fer.standby.launcher_client import Child
from fer.standby.process import Command, through
from fer.standby.rankgroup import Limits
from fer.standby.router import Router, RouterLimits
from fer.standby.supervisor import Supervisor, SupervisorLimits
from fer.standby.version import Version
from tests.unit.test_supervisor_processes import READY, gone, play

QUICK = SupervisorLimits(end=Limits(term_s=0.05, kill_s=0.05))
PATIENT = SupervisorLimits(end=Limits(term_s=5.0, kill_s=20.0))


def supervisor(folder: Path, limits: SupervisorLimits, ranks: int = 2) -> Supervisor:
    def commands(path: Path) -> Sequence[Command]:
        return [Command(arguments=(sys.executable, "-c", READY, str(rank))) for rank in range(ranks)]

    router = Router(RouterLimits(), "retry", lambda target: None)
    return Supervisor(Version(online=commands), folder, through("off"), router, limits=limits)


def pids(service: Supervisor) -> list[int]:
    return [process["pid"] for process in service.status()["members"][0]["processes"]]


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(service: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(service.run())
    try:
        yield task
    finally:
        service.stop()
        await asyncio.gather(task, return_exceptions=True)


def test_the_death_of_one_rank_restarts_them_all(runtime_dir: Path, no_fd_leak: None) -> None:
    async def work() -> None:
        service = supervisor(runtime_dir, PATIENT, ranks=3)
        async with running(service):
            await until(lambda: service.state == "active")
            first = pids(service)
            os.kill(first[2], signal.SIGKILL)
            await until(lambda: service.restarts == 1 and service.state == "active")
            assert len(pids(service)) == 3 and not {*first} & {*pids(service)}
            assert all(gone(pid) for pid in first)
            last = pids(service)
        assert all(gone(pid) for pid in last) and service.state == "stopped"

    play(work)


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Signals reach nobody until it is undone, as those in uninterruptible sleep."""
    monkeypatch.setattr(Child, "send_signal", lambda self, number: None)
    return monkeypatch


def test_nothing_is_started_beside_a_process_that_does_not_end(
    runtime_dir: Path, deaf: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    async def work() -> None:
        service = supervisor(runtime_dir, QUICK)
        async with running(service):
            await until(lambda: service.state == "active")
            stuck, killed = pids(service)
            os.kill(killed, signal.SIGKILL)
            await until(lambda: service.state == "wedged")
            (member,) = service.status()["members"]
            assert member["role"] == "wedged" and member["restarts"] == 0
            assert [bool(process["stuck"]) for process in member["processes"]] == [True, False]
            os.kill(stuck, signal.SIGKILL)  # the kernel lets go of it
            deaf.undo()
            await until(lambda: service.state == "active")
            assert service.restarts == 1

    play(work)


def test_the_service_does_not_wait_for_such_a_process_for_ever(runtime_dir: Path, deaf: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        service = supervisor(runtime_dir, QUICK, ranks=1)
        async with running(service) as task:
            await until(lambda: service.state == "active")
            (stuck,) = pids(service)
            service.stop()
            with pytest.raises(EngineDied, match=f"not every process ended after SIGKILL: {stuck}: "):
                await task
        assert service.state == "stopped"
        os.kill(stuck, signal.SIGKILL)

    play(work)
