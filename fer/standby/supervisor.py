"""Keeps engines running: one is active, others stand by; what dies is started again.

A member's engine goes ``starting`` → ``standby`` → ``active``; from ``draining`` it returns to ``standby``. When it
dies the next standby becomes active in the same turn of the event loop, and the member starts a new engine, at once or
after a back-off. The service's state follows from its members' roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fer.errors import EngineDied, FerError, RequestError, UsageError
from fer.standby.member import STABLE_S, Member, delay_s
from fer.standby.process import Command, Process, Spawn
from fer.standby.rankgroup import Limits, RankGroup, explain
from fer.standby.router import Router, Target

log = logging.getLogger("fer.standby")

State = Literal["starting", "active", "recovering", "backoff", "wedged", "draining", "stopped"]
STATES: tuple[State, ...] = ("starting", "active", "recovering", "backoff", "wedged", "draining", "stopped")

TOKEN_S = 2.0
"""Seconds a standby that has taken over has for its first token before its predecessor is started again."""

Commands = Callable[[Path], Sequence[Command]]
"""The commands, one a rank, of an engine whose rank 0 is to answer at a socket."""


@dataclass
class Outage:
    """The time between two active engines, in the clock of :func:`time.monotonic_ns`; 0: not yet.

    Attributes:
        died: the death was seen; ``spawned``: the next engine's process was started (before ``died`` for a standby),
            ``begun``: its interpreter ran, ``ready``: it had recovered, ``active``: requests went there.
        token: its first token passed here; only where a request waited for it.
        path: how it came up: ``"standby"``, or how its process was started.
    """

    died: int
    spawned: int = 0
    begun: int = 0
    ready: int = 0
    active: int = 0
    token: int = 0
    path: str = ""

    def seconds(self) -> dict[str, Any]:
        """Each moment as seconds after the death was seen, ``died_ns``; negative: it had happened before."""
        moments = ("spawned", "begun", "ready", "active", "token")
        found = {name: getattr(self, name) for name in moments}
        return {
            "died_ns": self.died,
            "path": self.path,
            **{name: round((at - self.died) / 1e9, 4) for name, at in found.items() if at},
        }


@dataclass(frozen=True, kw_only=True)
class SupervisorLimits:
    """How long.

    Attributes:
        start_s: seconds from a start to readiness, after which it counts as failed.
        drain_s: seconds that running answers have before a switch or the end.
        end: for the end of a process.
    """

    start_s: float = 1800.0
    drain_s: float = 30.0
    end: Limits = field(default_factory=Limits)


class Supervisor:
    """Runs the members of one service.

    Args:
        commands: what an engine is.
        folder: private directory for the engines' sockets.
        spawn: how processes are started.
        router: told who is active.
        members: engines at once; all but one stand by.
        tell: called after every change of state, with the state.

    Attributes:
        restarts, switches: since the beginning.
        outage: the current or the last one.
        outages: called with each outage when its first token came, or when it ended and no request waited.
    """

    def __init__(
        self,
        commands: Commands,
        folder: Path,
        spawn: Spawn,
        router: Router,
        *,
        members: int = 1,
        limits: SupervisorLimits = SupervisorLimits(),
        tell: Callable[[State], None] = lambda state: None,
        outages: Callable[[Outage], None] = lambda outage: None,
    ) -> None:
        self._commands, self._folder, self._spawn, self._router = commands, folder, spawn, router
        self._limits, self._tell, self._outages = limits, tell, outages
        self.members = [Member(name=f"engine-{number}") for number in range(members)]
        self.outage: Outage | None = None
        self.restarts = self.switches = 0
        self.last_error = ""
        self._stop = asyncio.Event()
        self._phase: State = "starting"  # of the service's life: starting, active (it was), draining, stopped
        self._fatal: FerError | None = None
        self._switching = asyncio.Lock()
        self._token = asyncio.Event()

    # -- what others ask

    @property
    def state(self) -> State:
        """The service's."""
        if self._phase in ("draining", "stopped"):
            return self._phase
        if self._router.active is not None:
            return "active"
        states = {member.state for member in self.members}
        if "wedged" in states:
            return "wedged"
        if states == {"backoff"}:
            return "backoff"
        return "starting" if self._phase == "starting" else "recovering"

    @property
    def ready(self) -> bool:
        """Whether an engine has recovered and could answer."""
        return self._phase == "active" and any(member.role in ("active", "standby") for member in self.members)

    def status(self, *, private: bool = False) -> dict[str, Any]:
        """Everything, as plain data."""
        active = next((member for member in self.members if member.role == "active"), None)
        return {
            "state": self.state,
            "active": active.name if active else None,
            "pid": active.group.processes[0].pid if active and active.group else None,
            "restarts": self.restarts,
            "switches": self.switches,
            "last_error": self.last_error,
            "last_outage": self.outage.seconds() if self.outage else None,
            "members": [member.status(private=private) for member in self.members],
        }

    async def run(self) -> None:
        """Keep all members until :meth:`stop`; ends them, and returns when they are gone.

        Raises:
            FerError: the first start showed that none can succeed: the model or a setting is wrong.
            EngineDied: a process did not end.
        """
        keeping = [asyncio.create_task(self._keep(member)) for member in self.members]
        stop = asyncio.create_task(self._stop.wait())
        try:
            # A member is kept until we stop: one whose task ends before that has met a bug of ours.
            await asyncio.wait([stop, *keeping], return_when=asyncio.FIRST_COMPLETED)
            self._stop.set()
            # A process that the kernel does not let go of must not hold us as well.
            limit_s = self._limits.end.term_s + 2 * self._limits.end.kill_s
            _, left = await asyncio.wait(keeping, timeout=limit_s)
        finally:
            for task in (stop, *keeping):
                task.cancel()
            found = await asyncio.gather(*keeping, return_exceptions=True)
        self._phase = "stopped"
        self._tell(self.state)
        if left:
            await self._abandon()
        if self._fatal is not None:
            raise self._fatal
        for error in found:
            if isinstance(error, Exception):
                raise error

    def drain(self) -> None:
        """Take no more requests."""
        self._phase = "draining"
        self._router.close("the service ends")
        self._tell(self.state)

    def stop(self) -> None:
        """Have :meth:`run` end everything."""
        self._stop.set()

    async def switch(self) -> str:
        """Make a standby active and let the former one finish its answers; it stands by from then on.

        Returns:
            the name of the new active member.

        Raises:
            RequestError: there is nobody to switch to.
        """
        async with self._switching:
            old = next((member for member in self.members if member.role == "active"), None)
            new = next((member for member in self.members if member.role == "standby"), None)
            if new is None or new.target is None:
                why = ", ".join(f"{member.name} is {member.state}" for member in self.members)
                raise RequestError("no standby is ready", why=why, fix="Start with --standbys 1", status=409)
            if old is not None:
                old.become("draining")
            new.become("active")
            self._router.activate(new.target)
            self.switches += 1
            log.info("switched to %s", new.name)
            if old is not None and old.target is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(old.target.idle.wait(), self._limits.drain_s)
                if old.role == "draining":  # it may have died meanwhile
                    old.become("standby")
            return new.name

    def stalled(self, target: Target) -> None:
        """An engine with work says nothing any more: end it, which starts it again."""
        for member in self.members:
            if member.target is target and member.group is not None and not member.blame:
                member.blame = "it had work and said nothing for too long"
                log.error("%s hangs and is ended", member.name)
                member.group.kill()

    # -- one member

    async def _keep(self, member: Member) -> None:
        while not self._stop.is_set():
            worked = await self._live(member)
            if self._stop.is_set():
                break
            member.failures = 1 if worked else member.failures + 1
            delay = delay_s(member.failures)
            if delay:
                member.become("backoff")
                self._tell(self.state)
                log.warning("%s starts again in %g s, after %d deaths in a row", member.name, delay, member.failures)
                await self._until_stop(asyncio.sleep(delay))
            else:
                await self._until_stop(self._first_token())
        member.become("stopped")

    async def _first_token(self) -> None:
        """Where a standby has taken over, let it answer before a start takes processors from it."""
        if self._router.active is not None and self._router.on_token is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._token.wait(), TOKEN_S)

    async def _live(self, member: Member) -> bool:
        """One engine from its start to its end; whether it was of use: it answered, or was ready for a while."""
        member.become("starting")
        member.blame, member.ready = "", None
        member.starts += 1
        self.restarts += member.starts > 1
        path = self._folder / f"{member.name}-{member.starts}.sock"
        group = member.group = RankGroup(self._commands(path), self._spawn, self._limits.end)
        self._tell(self.state)
        ready_at, target = 0.0, None
        died: Process | None = None
        try:
            try:
                await group.start()
            except (OSError, FerError) as error:
                self._failed(member, str(error))
                return False
            first = group.processes[0]
            log.info("%s: process %s started, via=%s: %s", member.name, _pids(group), first.how, first.why_so)
            died = await self._start(member, group, path)
            target = member.target
            if target is not None:
                ready_at = time.monotonic()
                died = await self._until_stop(group.death())
        finally:
            self._leave(member, died)
            lived_s = time.monotonic() - ready_at if ready_at else 0.0
            if group.processes:
                if not self._stop.is_set():
                    member.become("ending")
                await group.end(at_once=died is not None)
                if died is not None:
                    await self._explain(member, died)
            path.unlink(missing_ok=True)
        return lived_s >= STABLE_S or (target is not None and target.answered)

    async def _start(self, member: Member, group: RankGroup, path: Path) -> Process | None:
        """Wait until the engine is ready and let it stand by; the process that ended instead, if one did."""
        ready, death = asyncio.ensure_future(group.ready()), asyncio.ensure_future(group.death())
        try:
            await self._until_stop(
                asyncio.wait([ready, death], timeout=self._limits.start_s, return_when=asyncio.FIRST_COMPLETED)
            )
            if death.done():
                return death.result()
            if ready.done():
                member.ready = ready.result()
                member.target = Target(member.name, path)
                member.become("standby")
                log.info("%s is ready after %.3f s", member.name, member.ready.report.get("total_s", 0.0))
                self._elect()
            elif not self._stop.is_set():
                member.blame = f"it was not ready after {self._limits.start_s:g} s"
                self._failed(member, member.blame)
                group.kill()
                return await death
            return None
        finally:
            for task in (ready, death):
                task.cancel()
            await asyncio.gather(ready, death, return_exceptions=True)

    def _elect(self) -> None:
        """Where nobody is active, the first that stands by becomes it."""
        if self._router.active is not None or self._stop.is_set():
            return
        member = next((member for member in self.members if member.role == "standby"), None)
        if member is None or member.target is None:
            return
        member.become("active")
        if self._phase == "starting":
            self._phase = "active"
        if self.outage is not None and not self.outage.active:
            self._end_outage(self.outage, member)
        self._router.activate(member.target)
        self._tell(self.state)

    def _leave(self, member: Member, died: Process | None) -> None:
        """The engine is gone or goes: nobody is sent there any more."""
        target, member.target = member.target, None
        if target is None or self._router.active is not target:
            return
        self._router.activate(None)
        self._router.on_token = None
        if died is not None:
            self.outage = Outage(died=died.died)
            log.warning("%s, process %d, died while active", member.name, died.pid)
        member.become("ending")
        self._elect()
        self._tell(self.state)

    def _end_outage(self, outage: Outage, member: Member) -> None:
        assert member.group is not None and member.ready is not None
        first = member.group.processes[0]
        outage.spawned, outage.begun, outage.ready = first.started, first.begun, member.ready.at
        outage.active = time.monotonic_ns()
        outage.path = "standby" if outage.ready < outage.died else first.how

        def token() -> None:
            outage.token = time.monotonic_ns()
            self._token.set()
            self._outages(outage)

        if self._router.in_flight:
            self._token.clear()
            self._router.on_token = token
        else:
            self._outages(outage)

    async def _explain(self, member: Member, died: Process) -> None:
        error = await explain(died)
        member.tail = died.tail
        self._failed(member, f"{error.why} ({member.blame})" if member.blame else error.why)
        # Where no engine was ever ready, a mistake of the user's will not go away by trying again.
        if isinstance(died.broken, UsageError) and self._phase == "starting" and self._fatal is None:
            self._fatal = died.broken
            self.stop()

    def _failed(self, member: Member, why: str) -> None:
        member.last_error = self.last_error = why
        log.warning("%s: %s", member.name, why)
        self._tell(self.state)

    async def _until_stop(self, work: Awaitable[Any]) -> Any:
        """The work's result, or None when the service stops first."""
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for waiting in (task, stop):
                waiting.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    async def _abandon(self) -> None:
        groups = [member.group for member in self.members if member.group is not None]
        left = [process for group in groups for process in group.wedged]
        for group in groups:
            await group.close()
        raise EngineDied(
            "not every process ended after SIGKILL",
            why=", ".join(f"{process.pid}: {process.stuck()}" for process in left),
            fix="The kernel or a driver holds them: look at the GPU with nvidia-smi and at the kernel's log",
            pid=left[0].pid if left else 0,
        )


def _pids(group: RankGroup) -> str:
    return ", ".join(str(process.pid) for process in group.processes)
