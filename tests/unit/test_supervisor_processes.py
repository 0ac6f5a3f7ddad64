"""Processes and rank groups: seen dying, ended for certain, told apart from those that no signal reaches."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fer.errors import LauncherError
from fer.standby import wire
from fer.standby.launcher_client import Child
from fer.standby.member import FREE_RESTARTS, LONGEST_DELAY_S, delay_s
from fer.standby.process import TAIL_BYTES, Command, Process, through
from fer.standby.rankgroup import Limits, RankGroup, explain
from tests.support.descriptors import leaked, open_descriptors

WAIT_S = 20.0
SLEEPER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = "import signal; signal.signal(15, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
READY = """
import os, sys, time
from fer.errors import LauncherError
from fer.standby import wire
os.write(0, wire.line(wire.Begun(time.monotonic_ns())))
os.write(0, wire.line(wire.Ready(time.monotonic_ns(), 10, 1, {"rank": sys.argv[1]})))
os.read(0, 1)
"""


def command(code: str, *arguments: str) -> Command:
    return Command(arguments=(sys.executable, "-c", code, *arguments))


def play(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine, within a bound."""

    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await work()

    asyncio.run(bounded())


async def output(process: Process, text: str) -> None:
    """Wait until it has written something."""
    while text not in process.tail:
        await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("ranks", [1, 3])
def test_any_death_ends_the_whole_group(ranks: int, no_fd_leak: None) -> None:
    async def work() -> None:
        group = RankGroup([command(READY, str(rank)) for rank in range(ranks)], through("off"))
        await group.start()
        assert (await group.ready()).report == {"rank": "0"}
        pids = [process.pid for process in group.processes]
        os.kill(pids[-1], signal.SIGKILL)  # a child rank alone
        died = await group.death()
        assert died.pid == pids[-1] and died.died >= died.begun >= died.started > 0
        await group.end(at_once=True)
        assert all(gone(pid) for pid in pids)
        error = await explain(died)
        assert error.why == "killed by SIGKILL" and error.fields == {"pid": pids[-1], "status": -signal.SIGKILL}

    play(work)


def test_a_process_that_ignores_sigterm_is_killed(no_fd_leak: None) -> None:
    async def work() -> None:
        group = RankGroup([command(STUBBORN), command(SLEEPER)], through("off"), Limits(term_s=0.3))
        await group.start()
        for process in group.processes:
            await output(process, "up")
        await group.end()
        assert [await process.status() for process in group.processes] == [-signal.SIGKILL, -signal.SIGTERM]

    play(work)


def test_a_process_that_sigkill_does_not_end_is_named_until_the_kernel_lets_go(
    monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    async def work() -> None:
        group = RankGroup([command(SLEEPER)], through("off"), Limits(term_s=0.05, kill_s=0.05))
        await group.start()
        (process,) = group.processes
        await output(process, "up")
        real = Child.send_signal
        # What a driver does to a process in uninterruptible sleep: signals reach it when it is over.
        monkeypatch.setattr(Child, "send_signal", lambda self, number: None)
        ending = asyncio.create_task(group.end())
        while not group.wedged:
            await asyncio.sleep(0.01)
        assert group.wedged == [process] and process.stuck().startswith("sleep")
        assert not ending.done()
        monkeypatch.setattr(Child, "send_signal", real)
        process.signal(signal.SIGKILL)
        await ending
        assert not group.wedged and await process.status() == -signal.SIGKILL

    play(work)


def test_a_group_of_which_one_cannot_be_started_leaves_nothing(no_fd_leak: None) -> None:
    async def work() -> None:
        group = RankGroup([command(SLEEPER), Command(arguments=("/nonexistent/program",))], through("off"))
        with pytest.raises(FileNotFoundError):
            await group.start()
        assert gone(group.processes[0].pid)

    play(work)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit(3)", "exit status 3"),
        ("import missing_library", "exit status 1: ModuleNotFoundError: No module named 'missing_library'"),
        ("import os; os.abort()", "killed by SIGABRT"),
    ],
)
def test_how_a_process_ended_is_told_in_one_line(code: str, why: str, no_fd_leak: None) -> None:
    async def work() -> None:
        process = await Process.start(command(code), through("off"))
        await process.ended
        assert await process.why() == why
        await process.close()
        await process.close()

    play(work)


def test_a_process_that_speaks_otherwise_is_ended(no_fd_leak: None) -> None:
    async def work() -> None:
        speaking = 'import os, signal; os.write(0, b\'{"type": "hello"}\\n\'); signal.pause()'
        process = await Process.start(command(speaking), through("off"))
        await process.ended
        assert await process.status() == -signal.SIGKILL
        assert "not understood" in await process.why()
        await process.close()

    play(work)


OBEDIENT = """
import os, time
from fer.errors import LauncherError
from fer.standby import wire
os.write(0, wire.line(wire.Begun(time.monotonic_ns(), orders=True)))
with os.fdopen(os.dup(0), "rb") as orders:
    for line in orders:
        if (order := wire.order(line)).__class__ is not wire.Stand:
            time.sleep(0.2)
            said = wire.Parked(time.monotonic_ns(), True) if isinstance(order, wire.Park) else wire.Unpromoted({})
            os.write(0, wire.line(said))
"""


def test_two_orders_at_once_get_each_its_own_answer(no_fd_leak: None) -> None:
    async def work() -> None:
        process = await Process.start(command(OBEDIENT), through("off"))
        while not process.orders:
            await asyncio.sleep(0.01)
        park, promote = await asyncio.gather(process.ask(wire.Park()), process.ask(wire.Promote(1.0)))
        assert isinstance(park, wire.Parked) and isinstance(promote, wire.Unpromoted)
        process.signal(signal.SIGKILL)
        await process.ended
        assert await process.ask(wire.Park()) is None
        await process.close()

    play(work)


def test_only_the_end_of_a_long_output_is_kept() -> None:
    async def work() -> None:
        process = await Process.start(command("print('x' * 300_000); print('the end')"), through("off"))
        await process.ended
        await output(process, "the end")
        assert len(process.tail) <= TAIL_BYTES
        await process.close()

    play(work)


def test_back_off_begins_late_and_ends_somewhere() -> None:
    delays = [delay_s(failures) for failures in range(30)]
    assert delays[: FREE_RESTARTS + 1] == [0.0] * (FREE_RESTARTS + 1)
    assert delays[FREE_RESTARTS + 1] > 0 and delays == sorted(delays)
    assert delays[-1] == LONGEST_DELAY_S


def test_the_supervisor_and_what_leads_to_it_need_no_torch(tmp_path: Path) -> None:
    import subprocess

    code = "import sys, fer.standby.service, fer.standby.answers, fer.standby.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.stdout == "False\n", done.stderr


def test_one_that_cannot_be_started_leaves_nothing_open_however_long_its_error_is_kept() -> None:
    async def work() -> None:
        before = open_descriptors()
        kept = []
        for _ in range(3):
            with pytest.raises(LauncherError) as caught:
                await Process.start(replace(command(SLEEPER), forked=True), through("off"))
            kept.append(caught)
        assert not leaked(before, open_descriptors())

    play(work)
