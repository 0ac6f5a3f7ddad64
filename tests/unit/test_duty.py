"""A worker that takes orders: what it does while nobody says anything."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fer.standby import rankgroup, wire
from fer.standby.process import Command, Process, through
from fer.standby.rankgroup import RankGroup
from tests.support.processes import ROOT
from tests.unit.test_supervisor_groups import until
from tests.unit.test_supervisor_processes import command, play

WORKER = """
import sys
from pathlib import Path
from fer.errors import OutOfMemory
from fer.report import Report
from fer.standby import duty
from tests.support.serve_engine import ArithmeticModel
path, said = Path(sys.argv[1]), Path(sys.argv[2])
duty.SPARE_S, duty.AT_ONCE_S = float(sys.argv[3]), float(sys.argv[4])
def say(what):
    with said.open("a") as file:
        file.write(what + " ")
class Engine:
    parked, intact, cache = True, False, None
    def __init__(self, stand):
        say("load")
        self.report = Report()
        self.report.finish()
    def keep(self): pass
    def settle(self): say("settle")
    def conclude(self): pass
    def park(self):
        say("park")
        return True
    def unpark(self, kept=None):
        if path.with_name("full").exists():
            raise OutOfMemory("the cache does not fit", needed=2, free=1)
        say("unpark")
        return {"backing": 0.0, "self_test": 0.0}
def look():
    if path.with_name("stale").exists():
        sys.exit(7)
duty.LOOK_S = 0.02
make = lambda stand: (ArithmeticModel(2), Engine(stand))
duty.run(make, path, None, imagine=lambda: say("imagine"), look=look)
"""
NEVER, SOON = "60", "0.01"


class Worker:
    """Such a process, and what it has done, in order."""

    def __init__(self, folder: Path, spare: str, at_once: str) -> None:
        self._said = folder / "said"
        arguments = (sys.executable, "-c", WORKER, str(folder / "w.sock"), str(self._said), spare, at_once)
        self._command = Command(arguments=arguments, folder=ROOT)
        self.process: Process

    async def start(self, stand: wire.Stand | None) -> Process:
        self.process = await Process.start(self._command, through("off"), stand)
        return self.process

    @property
    def said(self) -> list[str]:
        return self._said.read_text().split() if self._said.exists() else []

    async def end(self) -> None:
        self.process.signal(9)
        await self.process.ended
        await self.process.close()


@pytest.fixture
def worker(tmp_path: Path) -> Callable[[str, str], Worker]:
    return lambda spare, at_once: Worker(tmp_path, spare, at_once)


def test_one_that_is_told_nothing_imagines_and_waits(worker: Callable[[str, str], Worker], no_fd_leak: None) -> None:
    async def work() -> None:
        made = worker(SOON, NEVER)
        spare = await made.start(None)
        await until(lambda: made.said == ["imagine"])
        assert spare.begun and not spare.told and not spare.ready.done()
        spare.go(wire.SERVE)
        await spare.ready
        assert made.said == ["imagine", "load"] and spare.told > spare.begun
        assert isinstance(await spare.ask(wire.Promote(1.0)), wire.Promoted)
        await made.end()

    play(work)


def test_one_that_waits_looks_whether_it_is_still_of_use(
    worker: Callable[[str, str], Worker], tmp_path: Path, no_fd_leak: None
) -> None:
    async def work() -> None:
        made = worker(SOON, NEVER)
        spare = await made.start(None)
        await until(lambda: made.said == ["imagine"])
        (tmp_path / "stale").touch()
        await spare.ended
        assert await spare.status() == 7 and made.said == ["imagine"]
        await spare.close()

    play(work)


def test_one_may_be_told_before_it_can_hear(worker: Callable[[str, str], Worker], no_fd_leak: None) -> None:
    async def work() -> None:
        made = worker(NEVER, NEVER)
        spare = await made.start(None)
        spare.go(wire.SERVE)
        assert not spare.told
        await spare.ready
        assert made.said == ["load"] and spare.told >= spare.begun > 0
        await made.end()

    play(work)


def test_one_that_is_promoted_at_once_does_not_settle(worker: Callable[[str, str], Worker]) -> None:
    async def work() -> None:
        made = worker(NEVER, NEVER)
        engine = await made.start(wire.SERVE)
        await engine.ready
        assert isinstance(await engine.ask(wire.Promote(1.0)), wire.Promoted)
        assert isinstance(await engine.ask(wire.Park()), wire.Parked)
        assert made.said == ["load", "unpark", "park"]
        await made.end()

    play(work)


def test_one_that_nobody_promotes_settles_once(worker: Callable[[str, str], Worker]) -> None:
    async def work() -> None:
        made = worker(NEVER, SOON)
        engine = await made.start(wire.SERVE)
        await engine.ready
        await until(lambda: made.said == ["load", "settle"])
        assert isinstance(await engine.ask(wire.Promote(1.0)), wire.Promoted)
        assert isinstance(await engine.ask(wire.Park()), wire.Parked)
        assert isinstance(await engine.ask(wire.Promote(1.0)), wire.Promoted)
        assert made.said == ["load", "settle", "unpark", "park", "unpark"]
        await made.end()

    play(work)


def test_one_that_could_not_be_promoted_may_be_asked_again(
    worker: Callable[[str, str], Worker], tmp_path: Path
) -> None:
    async def work() -> None:
        made = worker(NEVER, NEVER)
        engine = await made.start(wire.SERVE)
        await engine.ready
        (tmp_path / "full").touch()
        assert isinstance(await engine.ask(wire.Promote(1.0)), wire.Unpromoted)
        (tmp_path / "full").unlink()
        assert isinstance(await engine.ask(wire.Promote(1.0)), wire.Promoted)
        assert [what for what in made.said if what != "settle"] == ["load", "unpark"]
        await made.end()

    play(work)


# --- ranks that end for another's sake ---

ENDS = """
import os, sys, time
from fer.errors import PeerRankFailed
from fer.standby import wire
from fer.standby.supervised import plain
kind, file = sys.argv[1:]
if kind == "peer":
    os.write(0, wire.line(wire.Broken(plain(PeerRankFailed("a rank has failed")))))
    os._exit(1)
while not os.path.exists(file):
    time.sleep(0.005)
os._exit(7)
"""


@pytest.mark.parametrize("cause", [True, False])
def test_a_rank_that_ends_for_anothers_sake_is_not_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: bool, no_fd_leak: None
) -> None:
    monkeypatch.setattr(rankgroup, "PEER_S", 20.0 if cause else 0.05)
    file = tmp_path / "now"

    async def work() -> None:
        group = RankGroup([command(ENDS, kind, str(file)) for kind in ("peer", "other")], through("off"))
        await group.start()
        peer, other = group.processes
        death = asyncio.create_task(group.death())
        await peer.ended
        await asyncio.sleep(0.1)
        if cause:
            assert not death.done(), "the other one may be about to end"
            file.touch()
        assert await death is (other if cause else peer), "or, where it lives on, there is nobody else to blame"
        await group.end(at_once=True)

    play(work)
