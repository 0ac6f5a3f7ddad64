"""Keeps engines running: one is active, others stand by; what dies is started again.

A member's engine goes ``starting`` → ``standby`` → ``promoting`` → ``active``; from ``draining`` it returns to
``standby``. When it dies the next standby is promoted in the same turn of the event loop, and the one after it where
that fails; the member starts a new engine, at once or after a back-off, parked where another one serves. The service's
state follows from its members' roles. Who may serve the workers decide among themselves, through the keeper: a
supervisor only says who is to try.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from fer.errors import EngineDied, FerError, RequestError, UsageError, from_dict
from fer.standby import wire
from fer.standby.member import STABLE_S, Member, delay_s
from fer.standby.outage import Outage
from fer.standby.process import Command, Process, Spawn
from fer.standby.rankgroup import Limits, RankGroup, explain
from fer.standby.router import Router, Target

log = logging.getLogger("fer.standby")

State = Literal["starting", "active", "switching", "recovering", "backoff", "wedged", "draining", "stopped"]
STATES: tuple[State, ...] = get_args(State)

TOKEN_S = 2.0
"""Seconds a standby that has taken over has for its first token before its predecessor is started again."""

AGAIN_S = 1.0
"""Seconds after which a standby that could not be promoted may be tried again."""

Commands = Callable[[Path], Sequence[Command]]
"""The commands, one a rank, of an engine whose rank 0 is to answer at a socket."""


@dataclass(frozen=True, kw_only=True)
class SupervisorLimits:
    """How long.

    Attributes:
        start_s: seconds from a start to readiness, after which it counts as failed.
        drain_s: seconds that running answers have before a switch or the end.
        promote_s: seconds a standby has to get the service, the end of those before it included.
        end: for the end of a process.
    """

    start_s: float = 1800.0
    drain_s: float = 30.0
    promote_s: float = 20.0
    end: Limits = field(default_factory=Limits)


class Supervisor:
    """Runs the members of one service.

    Args:
        commands: what an engine is.
        folder: private directory for the engines' sockets.
        spawn: how processes are started.
        router: told who is active.
        members: engines at once; all but one stand by.
        service: what the active one claims from the keeper, ``""`` for nothing.
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
        service: str = "",
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
        self._service = service
        self._promoting: asyncio.Task[None] | None = None
        self._background: set[asyncio.Future[None]] = set()
        self._token = asyncio.Event()

    # -- what others ask

    @property
    def state(self) -> State:
        """The service's."""
        if self._phase in ("draining", "stopped"):
            return self._phase
        if self._router.active is not None:
            return "active"
        if self._switching.locked():
            return "switching"
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

        Requests that come meanwhile wait. Answers that take longer than ``drain_s`` are cut off there and completed by
        the new one, as after a death.

        Returns:
            the name of the new active member.

        Raises:
            RequestError: there is nobody to switch to, or none of them could be promoted; then the former one serves.
        """
        # Shielded: whoever asked may go away in the middle, when nobody is active.
        return await asyncio.shield(asyncio.ensure_future(self._switch()))

    async def _switch(self) -> str:
        async with self._switching:
            old = next((member for member in self.members if member.role == "active"), None)
            new = next((member for member in self.members if member.role == "standby"), None)
            if new is None or new.group is None:
                why = ", ".join(f"{member.name} is {member.state}" for member in self.members)
                raise RequestError("no standby is ready", why=why, fix="Start with --standbys 1", status=409)
            if old is not None:
                await self._relieve(old)
                if old.role == "active":
                    why = (
                        f"answers did not end within {self._limits.drain_s:g} s, and --resume fail lets none be cut off"
                    )
                    raise RequestError("nothing was switched", why=why, fix="Raise --drain-s", status=409)
            if new.role == "standby":
                await self._promote(new)
        self._elect()  # what died or failed meanwhile has left that to us
        while self._promoting is not None:
            await asyncio.wait([self._promoting])
        if new.role != "active":
            fix = "The former engine serves, or the next one will; see /status"
            raise RequestError(f"{new.name} could not take over", why=new.unfit or "it ended", fix=fix, status=409)
        self.switches += 1
        log.info("switched to %s", new.name)
        return new.name

    async def _relieve(self, old: Member) -> None:
        """Let the active member finish its answers, and stand by; it stays active where they may not be cut off."""
        assert old.target is not None and old.group is not None
        target, group = old.target, old.group
        old.become("draining")
        self._router.activate(None)
        self._tell(self.state)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(target.idle.wait(), self._limits.drain_s)
        if old.role == "draining" and not target.idle.is_set() and self._router.resume == "fail":
            old.become("active")
            self._router.activate(target)
            return
        answer = await group.first.ask(wire.Park()) if group.first.orders else None
        if old.role == "draining":  # else it has died meanwhile
            old.parked = isinstance(answer, wire.Parked) and answer.freed
            old.become("standby")

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
        """Where a standby takes over, let it answer before a start takes processors from it."""
        while self._promoting is not None:
            await asyncio.wait([self._promoting])
        if self._router.active is not None and self._router.on_token is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._token.wait(), TOKEN_S)

    async def _live(self, member: Member) -> bool:
        """One engine from its start to its end; whether it was of use: it answered, or was ready for a while."""
        member.become("starting")
        member.blame, member.ready, member.unfit = "", None, ""
        member.parked = any(_serves(other) for other in self.members if other is not member)
        member.starts += 1
        self.restarts += member.starts > 1
        path = self._folder / f"{member.name}-{member.starts}.sock"
        group = member.group = RankGroup(
            self._commands(path), self._spawn, self._limits.end, wire.Stand(parked=member.parked, service=self._service)
        )
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
                if self._router.active is not None and not member.parked:
                    self._have_parked(member)
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
        """Where nobody is active, the first that stands by and was not found unfit is to become it."""
        if self._router.active is not None or self._promoting is not None or self._stop.is_set():
            return
        if self._switching.locked():  # that is just being done
            return
        member = next((member for member in self.members if member.role == "standby" and not member.unfit), None)
        if member is not None and member.group is not None:
            if not member.group.first.orders:
                self._activate(member, None)
            else:
                self._promoting = asyncio.create_task(self._try(member))

    async def _try(self, member: Member) -> None:
        try:
            await self._promote(member)
        finally:
            self._promoting = None
        self._elect()

    async def _promote(self, member: Member) -> None:
        """Have a standby serve. It is active afterwards, or unfit, or has died."""
        assert member.group is not None
        if not member.group.first.orders:
            self._activate(member, None)
            return
        member.become("promoting")
        self._tell(self.state)
        answer = await member.group.first.ask(wire.Promote(self._limits.promote_s))
        if member.role != "promoting":  # it has died, which others look after
            return
        if isinstance(answer, wire.Promoted):
            self._activate(member, answer)
        elif isinstance(answer, wire.Unpromoted):
            member.unfit = str(from_dict(answer.error))
            member.become("standby")
            self._failed(member, f"cannot serve now: {member.unfit}")
            if self.outage is not None and not self.outage.active:
                self.outage.failed[member.name] = member.unfit
            asyncio.get_running_loop().call_later(AGAIN_S, self._again, member)

    def _again(self, member: Member) -> None:
        member.unfit = ""
        self._elect()

    def _activate(self, member: Member, promoted: wire.Promoted | None) -> None:
        """From now on requests go to this member."""
        assert member.target is not None
        member.parked = False
        member.become("active")
        if self._phase == "starting":
            self._phase = "active"
        if self.outage is not None and not self.outage.active:
            self.outage.promotion = promoted
            self._end_outage(self.outage, member)
        self._router.activate(member.target)
        self._tell(self.state)
        for other in (each for each in self.members if each.role == "standby" and not each.parked):
            self._have_parked(other)

    def _have_parked(self, member: Member) -> None:
        """A standby that was started to serve gives its memory back."""
        assert member.group is not None
        first = member.group.first

        async def park() -> None:
            answer = await first.ask(wire.Park()) if first.orders else None
            if member.group is not None and member.group.processes[:1] == [first] and member.role == "standby":
                member.parked = isinstance(answer, wire.Parked) and answer.freed

        self._background.add(task := asyncio.ensure_future(park()))
        task.add_done_callback(self._background.discard)

    def _leave(self, member: Member, died: Process | None) -> None:
        """The engine is gone or goes: nobody is sent there any more."""
        target, member.target = member.target, None
        was = member.role
        if target is None or (self._router.active is not target and was != "draining"):
            return
        member.become("ending")
        if self._router.active is target:
            self._router.activate(None)
            self._router.on_token = None
        if died is not None:
            self.outage = Outage(died=died.died)
            log.warning("%s, process %d, died while %s", member.name, died.pid, was)
        for other in self.members:
            other.unfit = ""  # what it held is free
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


def _serves(member: Member) -> bool:
    """Whether a member serves, or is to as soon as it can: then the others need no memory for answers."""
    if member.role == "starting":
        return not member.parked and member.starts > 0
    return member.role in ("promoting", "active", "draining")


def _pids(group: RankGroup) -> str:
    return ", ".join(str(process.pid) for process in group.processes)
