"""A supervisor of engines that answer nothing, whose next one may wait as a spare."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from fer.standby import life
from fer.standby.launcher_client import Child
from fer.standby.outage import Outage
from fer.standby.process import Command, Spawn, through
from fer.standby.rankgroup import Limits
from fer.standby.router import Router, RouterLimits
from fer.standby.supervisor import Supervisor, SupervisorLimits
from fer.standby.version import Version
from tests.unit.test_supervisor_groups import until

LIMITS = SupervisorLimits(end=Limits(term_s=2.0, kill_s=20.0))
ENGINE = """
import os, signal, socket, sys, time
from fer.standby import wire
fault, orders = sys.argv[2], sys.argv[1] == "orders"
sock = socket.socket(fileno=os.dup(0))
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
def say(message):
    sock.sendall(wire.line(message))
def end(number, frame):
    if os.path.exists(fault):
        kind = open(fault).read()
        if kind == "broken":
            say(wire.Broken({"error": "OutOfMemory", "what": "the cache does not fit"}))
        if kind == "closes":
            sock.shutdown(socket.SHUT_RDWR)  # the first that a death shows
            while os.path.exists(fault):
                time.sleep(0.005)
    os._exit(9)
signal.signal(signal.SIGUSR1, end)
lines = sock.makefile("rb")
say(wire.Begun(time.monotonic_ns(), orders=orders))
if orders:
    assert isinstance(wire.order(next(lines)), wire.Stand)
    say(wire.Told())
say(wire.Ready(time.monotonic_ns(), 10, 1, {}))
for line in lines:
    say(wire.Promoted(at=time.monotonic_ns()) if isinstance(wire.order(line), wire.Promote) else wire.Parked(0, True))
"""


def forked(command: Command, stdio: tuple[int, int, int]) -> Child:
    """Started as if a launcher had forked it."""
    child = through("off")(replace(command, forked=False), stdio)
    child.via = "launcher"
    return child


class Service:
    """A supervisor of engines that answer nothing, in a folder that stands for their model's."""

    def __init__(self, folder: Path, spawn: Spawn = forked, *, members: int = 1, ranks: int = 1, orders: bool = True):
        self.model, self.fault = folder / "model", folder / "fault"
        self.model.mkdir()
        self.file.write_text("{}")
        self.outages: list[Outage] = []
        self.looks = 0

        def commands(path: Path) -> Sequence[Command]:
            code = (sys.executable, "-c", ENGINE, "orders" if orders else "none", str(self.fault))
            return [Command(arguments=code) for _ in range(ranks)]

        self.version = Version(online=commands, model=self.model)
        router = Router(RouterLimits(), "retry", lambda target: None)
        self.supervisor = Supervisor(
            self.version, folder, spawn, router, members=members, limits=LIMITS, outages=self.outages.append
        )
        wants = self.supervisor._wants_spare

        def counted(member: Any) -> bool:
            self.looks += 1
            return wants(member)

        self.supervisor._wants_spare = counted  # type: ignore[method-assign]

    @property
    def file(self) -> Path:
        return self.model / "config.json"

    @property
    def pid(self) -> int:
        return int(self.supervisor.status()["pid"] or 0)

    @property
    def spare(self) -> int:
        return int(self.supervisor.status()["members"][0]["spare"] or 0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside the block it runs; spares come at once, and are looked for often."""
        with mock.patch.multiple(life, SPARE_S=0.01, LONGEST_DELAY_S=0.05):
            task = asyncio.create_task(self.supervisor.run())
            try:
                await until(lambda: self.supervisor.state == "active" or task.done())
                yield
            finally:
                self.supervisor.stop()
                await task

    async def waiting(self) -> int:
        """The pid of the spare, once it waits."""
        member = self.supervisor.members[0]

        def waits() -> bool:
            spare = member.begun.group.processes if member.begun is not None else []
            return bool(spare) and spare[0].orders

        await until(waits)
        return self.spare

    async def next(self, restarts: int = 1) -> int:
        """The pid of the engine that serves after so many deaths."""
        await until(lambda: self.supervisor.restarts == restarts and self.supervisor.state == "active")
        return self.pid

    async def looked(self) -> None:
        """Wait until it was asked some times more whether a spare is wanted."""
        enough = self.looks + 5
        await until(lambda: self.looks >= enough)
