"""One place in the service, and the engines that fill it one after another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fer.errors import FerError, OutOfMemory
from fer.standby.rankgroup import RankGroup
from fer.standby.router import Target
from fer.standby.version import Version
from fer.standby.wire import Ready

Role = Literal[
    "starting",
    "standby",
    "promoting",
    "active",
    "batch",
    "draining",
    "paused",
    "backoff",
    "ending",
    "wedged",
    "stopped",
]
ROLES: tuple[Role, ...] = get_args(Role)

FREE_RESTARTS = 2
"""Deaths in a row that are answered at once."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
STABLE_S = 10.0
"""Seconds for which an engine has to be ready, or else to answer something, for its death to count as the first."""


def delay_s(failures: int) -> float:
    """Seconds before the start after that many deaths in a row: the first are free, then twice as long each time."""
    late = failures - FREE_RESTARTS
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(late - 1, 16)) if late > 0 else 0.0


@dataclass(frozen=True)
class Begun:
    """An engine whose processes are on their way, or wait as a spare to be told how to start.

    Attributes:
        started: done when they run: what the model's weights were before that. Raises OSError, FerError.
    """

    version: Version
    path: Path
    group: RankGroup
    started: asyncio.Task[str]

    @property
    def spare(self) -> bool:
        return self.group.stand is None

    async def fit(self, version: Version) -> bool:
        """Whether it may still become an engine of this version: it lives, and has seen the files as they are."""
        if version is not self.version:
            return False
        if not self.spare:
            return True
        if not self.started.done() or self.started.cancelled() or self.started.exception() is not None:
            return False
        if any(process.closing.done() or process.ended.done() for process in self.group.processes):
            return False
        return await asyncio.to_thread(version.weights) == self.started.result()

    async def discard(self, limit_s: float) -> None:
        """End it: it is not needed. What the kernel holds for longer than ``limit_s`` is let go of here."""
        await asyncio.gather(self.started, return_exceptions=True)
        try:
            async with asyncio.timeout(limit_s):
                await self.group.end(at_once=True)
        except TimeoutError:
            await self.group.close()


@dataclass(kw_only=True)
class Member:
    """A place for an engine.

    Attributes:
        role: what its engine is just now; ``since`` on the clock of :func:`time.monotonic`.
        starts: engines that were started here; ``restarts``: those after the first.
        failures: deaths in a row of engines that were of no use before.
        last_error: of the last death, in one line; ``tail``: the last lines of that engine's output.
        version: the model that its next engine is started on.
        trial: its engine is the first of an update and has not made a token for a client yet; it is not started again.
        stop: set when no further engine is wanted here; ``gone``: while there is none.
        broken: the error that the last engine ended with, where it could say one.
        blame: why the supervisor itself ended the engine, ``""`` where it did not.
        ordered: why its end was ordered, ``""`` where it was not: such an end is no failure.
        parked: its engine has no memory for answers, or starts without.
        begun: its next engine, where that is on its way already.
        unfit: why it could not be promoted, ``""`` where nobody tried or it may be tried again.
    """

    name: str
    version: Version
    trial: bool = False
    role: Role = "starting"
    since: float = field(default_factory=time.monotonic)
    starts: int = 0
    failures: int = 0
    last_error: str = ""
    tail: str = ""
    broken: FerError | None = None
    blame: str = ""
    ordered: str = ""
    parked: bool = False
    unfit: str = ""
    group: RankGroup | None = None
    begun: Begun | None = None
    target: Target | None = None
    ready: Ready | None = None
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lacked(self) -> OutOfMemory | None:
        """The memory its last engine did not find, where it ended of that."""
        return self.broken if isinstance(self.broken, OutOfMemory) else None

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def state(self) -> Role:
        """The role, or ``"wedged"`` while a process does not end."""
        return "wedged" if self.group is not None and self.group.wedged else self.role

    def begin(self, *, parked: bool) -> None:
        """A new engine is started here; nothing that is said of the last one holds of it."""
        self.blame = self.ordered = self.unfit = ""
        self.ready, self.broken, self.parked = None, None, parked
        self.starts += 1
        self.gone.clear()
        self.become("starting")

    def become(self, role: Role) -> None:
        self.role, self.since = role, time.monotonic()
        self._changed.set()
        self._changed = asyncio.Event()

    def __post_init__(self) -> None:
        self.gone.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what is looked at again whenever the role changes."""
        while not holds():
            await self._changed.wait()

    async def until_stop(self, work: Awaitable[Any]) -> Any:
        """The work's result, or None when no further engine is wanted here before it comes."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for waiting in (task, stop):
                waiting.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    def status(self, *, private: bool) -> dict[str, Any]:
        """For ``/status``; ``private`` adds what the engine wrote, which may tell more than its clients should see."""
        group = self.group
        processes = [
            {
                "pid": process.pid,
                "born": process.born,
                "via": process.how,
                "why": process.why_so,
                "stuck": process.stuck() if stuck else "",
            }
            for process in (group.processes if group is not None else ())
            for stuck in [group is not None and process in group.wedged]
        ]
        return {
            "name": self.name,
            "role": self.state,
            "version": self.version.number,
            "parked": self.parked,
            "seconds": round(time.monotonic() - self.since, 3),
            "processes": processes,
            "restarts": self.restarts,
            "failures": self.failures,
            "last_error": self.last_error,
            **({"tail": self.tail} if private else {}),
            "spare": self._spare_pid(),
            "recovery": _recovery(self.ready),
        }

    def _spare_pid(self) -> int | None:
        spare = self.begun.group.processes if self.begun is not None and self.begun.spare else []
        return spare[0].pid if spare else None


def _recovery(ready: Ready | None) -> dict[str, Any] | None:
    """What of the recovery's report an operator looks at first."""
    if ready is None:
        return None
    report = ready.report
    return {
        "total_s": report.get("total_s"),
        "phase_s": report.get("phase_s"),
        "step_s": {f"{step['parent']}/{step['name']}": _seconds(step) for step in report.get("steps", [])},
        "stages": {stage["name"]: {"path": stage["path"], "why": stage["why"]} for stage in report.get("stages", [])},
    }


def _seconds(span: dict[str, Any]) -> float:
    return round((int(span["end"]) - int(span["start"])) / 1e9, 6)
