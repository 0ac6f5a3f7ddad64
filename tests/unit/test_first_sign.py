"""A death is seen as it begins, by the tie or the control socket, after what the process said last."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fer.errors import OutOfMemory
from fer.standby.process import Command, Process, through
from tests.support.processes import WAIT_S, with_variable
from tests.unit.test_supervisor_processes import gone, play

ENGINE = """
import os, signal, socket, sys, time
from fer.errors import OutOfMemory
from fer.standby import tie, wire
control = socket.socket(fileno=os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
assert tie.show_end_at_once()
if sys.argv[1] == "child" and os.fork() == 0:  # which keeps the control socket open
    signal.pause()
control.sendall(wire.line(wire.Begun(time.monotonic_ns())))
control.sendall(wire.line(wire.Ready(time.monotonic_ns(), 10, 1, {})))
if sys.argv[1] == "says":
    control.recv(1)
    control.sendall(wire.line(wire.Broken(OutOfMemory("x" * int(sys.argv[2])).to_dict())))
    os._exit(1)
signal.pause()
"""


async def engine(*arguments: str) -> Process:
    found = await Process.start(Command(arguments=(sys.executable, "-c", ENGINE, *arguments)), through("off"))
    await found.ready
    return found


async def over(process: Process) -> None:
    await process.ended
    await process.close()
    await process.close()


def test_a_child_that_keeps_the_control_socket_hides_no_death(
    monkeypatch: pytest.MonkeyPatch, no_fd_leak: None
) -> None:
    monkeypatch.setenv("TEST_FIRST_SIGN", mark := str(os.getpid()))

    async def work() -> None:
        process = await engine("child")
        process.signal(signal.SIGKILL)
        await process.closing
        await process.ended
        for pid in with_variable("TEST_FIRST_SIGN", mark):
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        await over(process)

    play(work)


@pytest.mark.parametrize("size", [10, 500_000])
@pytest.mark.parametrize("busy", [False, True])
def test_what_it_said_is_heard_before(size: int, busy: bool, no_fd_leak: None) -> None:
    async def work() -> None:
        process = await engine("says", str(size))

        async def take_turns() -> None:
            while busy:
                end = time.monotonic() + 0.03
                while time.monotonic() < end:
                    pass
                await asyncio.sleep(0)

        turns = asyncio.create_task(take_turns())
        assert process._writer is not None
        process._writer.write(b"\n")
        await process.closing
        assert isinstance(process.broken, OutOfMemory)
        turns.cancel()
        await over(process)

    play(work)


def test_one_that_is_let_go_of_is_heard_no_more(no_fd_leak: None) -> None:
    async def work() -> None:
        process = await engine("lives")
        process.signal(signal.SIGKILL)
        await over(process)
        await asyncio.sleep(0.01)  # longer than what is said last is waited for
        assert gone(process.pid)

    play(work)


def test_a_worker_shows_its_end(no_fd_leak: None) -> None:
    """The engine of ``fer serve`` itself, however far it has come: what holds the tie is a thread of its own."""

    async def work() -> None:
        arguments = ("-m", "fer.standby.worker", "--socket", "/nowhere/w", "--model", "/nowhere", "--device", "cpu")
        process = await Process.start(Command(arguments=(sys.executable, *arguments)), through("off"), None)
        async with asyncio.timeout(WAIT_S):
            while not process.orders:
                await asyncio.sleep(0.01)
        tasks = Path(f"/proc/{process.pid}/task")
        tables = [os.listdir(task / "fd") for task in tasks.iterdir()]
        assert min(map(len, tables)) == 1, "a thread has the tie alone"
        process.signal(signal.SIGKILL)
        await process.closing
        await over(process)

    play(work)
