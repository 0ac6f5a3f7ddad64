"""Keeps engines running: one is active, others stand by; what dies is started again.

A member's engine goes ``starting`` → ``standby`` → ``promoting`` → ``active``; from ``draining`` it returns to
``standby``. When it dies the next standby is promoted in the same turn of the event loop, and the one after it where
that fails; the member starts a new engine, at once or after a back-off, parked where another one serves. The service's
state follows from its members' roles.

:class:`~fer.standby.succession.Succession` decides who serves, :class:`~fer.standby.life.Lives` starts and ends
engines, :class:`~fer.standby.preemptible.Preemptible` keeps the batch engine, :class:`~fer.standby.update.Update`
brings another model; here they are one service.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from fer.errors import FerError, RequestError, UsageError
from fer.standby import wire
from fer.standby.eviction import Editions
from fer.standby.life import Lives, SupervisorLimits, abandon
from fer.standby.member import STABLE_S, Member, delay_s
from fer.standby.outage import Outage
from fer.standby.preemptible import Preemptible
from fer.standby.process import Spawn
from fer.standby.router import Router, Target
from fer.standby.succession import Succession
from fer.standby.update import Update
from fer.standby.version import Commands, Version
from fer.weights.keeper.pidfds import started
from fer.weights.wire_parts import Process

__all__ = ["STATES", "Commands", "State", "Supervisor", "SupervisorLimits"]

log = logging.getLogger("fer.standby")

State = Literal["starting", "active", "switching", "recovering", "backoff", "wedged", "draining", "stopped"]
LIMITS = SupervisorLimits()
STATES: tuple[State, ...] = get_args(State)


class Supervisor:
    """Runs the members of one service.

    Args:
        version: what an engine is.
        folder: private directory for the engines' sockets.
        spawn: how processes are started.
        router: told who is active; ``batch`` the same of the batch engine, None where there is to be none.
        members: engines at once; all but one stand by.
        service: what the active one claims from the keeper, ``""`` for nothing.
        tell: called after every change of state, with the state.
        editions: what the keeper holds, to give up those of a model that is served no more.
        keep_cache: an engine's cache is left to the one that serves next, where that can go on with it.

    Attributes:
        switches: since the beginning.
        outages: called with each outage when its first token came, or when it ended and no request waited.
        back: called with the seconds that the batch engine was away, when it is back.
    """

    def __init__(
        self,
        version: Version,
        folder: Path,
        spawn: Spawn,
        router: Router,
        *,
        batch: Router | None = None,
        members: int = 1,
        service: str = "",
        limits: SupervisorLimits = LIMITS,
        tell: Callable[[State], None] = lambda state: None,
        outages: Callable[[Outage], None] = lambda outage: None,
        back: Callable[[float], None] = lambda seconds: None,
        editions: Editions | None = None,
        keep_cache: bool = True,
    ) -> None:
        self._router, self._limits, self._say, self._service = router, limits, tell, service
        self._keep_cache = keep_cache
        self._guardian = Process(os.getpid(), started(os.getpid()))
        self.switches = 0
        self._phase: State = "starting"  # of the service's life: starting, draining, stopped
        self._fatal: FerError | None = None
        self._stop, self._look = asyncio.Event(), asyncio.Event()
        self._keeping: set[asyncio.Task[None]] = set()
        self._numbers = 0
        self.lives = Lives(folder, spawn, limits, self._tell)
        self.succession = Succession(
            version, router, self.lives, limits, tell=self._tell, outages=outages, relief=self._relieve
        )
        self.batch: Preemptible | None = None
        if batch is not None:
            self.batch = Preemptible(version, batch, self.lives, self.succession, limits, back=back)
        self.update = Update(self, self.succession, self.lives, limits, editions or Editions())
        for _ in range(members):
            self._place(version)

    # -- what others ask

    @property
    def members(self) -> list[Member]:
        """Those that may serve; the batch engine is none of them."""
        return self.succession.members

    @property
    def restarts(self) -> int:
        return self.lives.restarts

    @property
    def outage(self) -> Outage | None:
        """The current or the last one."""
        return self.succession.outage

    @property
    def last_error(self) -> str:
        """Of the last failure of any engine."""
        return self.lives.last_error

    @property
    def state(self) -> State:
        """The service's."""
        if self._phase in ("draining", "stopped"):
            return self._phase
        if self._router.active is not None:
            return "active"
        if self.succession.changing.locked():
            return "switching"
        states = {member.state for member in self.members}
        if "wedged" in states:
            return "wedged"
        if states == {"backoff"}:
            return "backoff"
        return "recovering" if self.succession.began else "starting"

    @property
    def ready(self) -> bool:
        """Whether an engine has recovered and could answer."""
        serving = self._phase == "starting" and self.succession.began
        return serving and any(member.role in ("active", "standby") for member in self.members)

    def status(self, *, private: bool = False) -> dict[str, Any]:
        """Everything, as plain data."""
        active, version = self.succession.active, self.succession.version
        return {
            "state": self.state,
            "active": active.name if active else None,
            "pid": active.group.processes[0].pid if active and active.group else None,
            "version": version.number,
            **({"folder": str(version.model)} if private else {}),
            "restarts": self.restarts,
            "switches": self.switches,
            "last_error": self.last_error,
            "last_outage": self.outage.seconds() if self.outage else None,
            "members": [member.status(private=private) for member in self.members],
            "batch": self.batch.status(private=private) if self.batch else None,
            "update": self.update.status(private=private),
        }

    async def run(self) -> None:
        """Keep all members until :meth:`stop`; ends them, and returns when they are gone.

        Raises:
            FerError: the first start showed that none can succeed: the model or a setting is wrong.
            EngineDied: a process did not end.
        """
        for member in self.members:
            self._start(self._keep(member))
        if self.batch is not None:
            self._start(self.batch.keep())
        try:
            # A member is kept until it is to stop: one whose task fails before that has met a bug of ours.
            while not self._stop.is_set() and not any(_failed(task) for task in self._keeping):
                self._look.clear()
                self._keeping = {task for task in self._keeping if not task.done()}
                await self._look.wait()
            self.stop()
            # A process that the kernel does not let go of must not hold us as well.
            limit_s = self._limits.end.term_s + 2 * self._limits.end.kill_s
            left = (await asyncio.wait(self._keeping, timeout=limit_s))[1] if self._keeping else set()
        finally:
            self.stop()
            for task in self._keeping:
                task.cancel()
            found = await asyncio.gather(*self._keeping, return_exceptions=True)
        self._phase = "stopped"
        self._tell()
        if left:
            raise await abandon([*self.members, *([self.batch.member] if self.batch else [])])
        if self._fatal is not None:
            raise self._fatal
        for error in found:
            if isinstance(error, Exception):
                raise error

    def drain(self) -> None:
        """Take no more requests."""
        self._phase = "draining"
        for router in (self._router, *([self.batch.router] if self.batch else [])):
            router.close("the service ends")
        self._tell()

    def stop(self) -> None:
        """Have :meth:`run` end everything."""
        self._stop.set()
        self._look.set()
        self.update.cancel()
        self.succession.ended = True
        for member in (*self.members, *([self.batch.member] if self.batch else [])):
            member.stop.set()

    async def switch(self) -> str:
        """Make a standby active and let the former one finish its answers; it stands by from then on.

        Requests that come meanwhile wait. Where the new one goes on with the cache, answers are handed over at once;
        else those that take longer than ``drain_s`` are cut off there and completed by the new one, as after a death.

        Returns:
            the name of the new active member.

        Raises:
            RequestError: there is nobody to switch to, or none of them could be promoted; then the former one serves.
        """
        if self.update.running:
            raise RequestError("an update is under way, which switches by itself", why=self.update.step, status=409)
        # Shielded: whoever asked may go away in the middle, when nobody is active.
        return await asyncio.shield(asyncio.ensure_future(self._switch()))

    async def _switch(self) -> str:
        new, _ = await self.succession.hand_over()
        self.switches += 1
        log.info("switched to %s", new.name)
        return new.name

    def stalled(self, target: Target) -> None:
        """An engine with work says nothing any more: end it, which starts it again."""
        for member in self.members:
            if member.target is target and member.group is not None and not member.blame:
                member.blame = "it had work and said nothing for too long"
                log.error("%s hangs and is ended", member.name)
                member.group.kill()

    # -- members

    def hire(self, version: Version) -> Member:
        """Another member, on trial: its engine is not started again before it has proven itself."""
        member = self._place(version)
        member.trial = True
        self._start(self._keep(member))
        return member

    @property
    def ending(self) -> bool:
        """Whether the service ends, and nothing new is begun."""
        return self._phase in ("draining", "stopped") or self._stop.is_set()

    async def retire(self, member: Member) -> None:
        """End a member's engine, and wait until it and its place are gone."""
        member.stop.set()
        await member.until(lambda: member.role == "stopped")
        if member in self.members:
            self.members.remove(member)
        self._tell()

    def _place(self, version: Version) -> Member:
        member = Member(name=f"engine-{self._numbers}", version=version)
        self._numbers += 1
        if self._stop.is_set():
            member.stop.set()
        self.members.append(member)
        return member

    def _start(self, work: Any) -> None:
        self._keeping.add(task := asyncio.create_task(work))
        task.add_done_callback(lambda task: self._look.set())

    async def _keep(self, member: Member) -> None:
        try:
            await self._keep_going(member)
        finally:
            await self.lives.forgo(member)
        member.become("stopped")
        self._tell()

    async def _keep_going(self, member: Member) -> None:
        while not member.stop.is_set():
            worked = await self.lives.run(
                member,
                member.version.online,
                self._stand(member),
                ready=lambda: self.succession.ready(member),
                leave=lambda died: self.succession.leave(member, died),
                early=lambda: self._early(member),
                spare=lambda: self._wants_spare(member),
            )
            if member.stop.is_set() or self._hopeless(member):
                break
            if member.ordered:
                continue
            if member.lacked is not None and await self._relieve(
                f"{member.name} lacks memory: {member.lacked}", member
            ):
                continue
            if member.trial:
                break
            member.failures = 1 if worked else member.failures + 1
            await self._before_the_next(member)

    def _wants_spare(self, member: Member) -> bool:
        """Where no standby takes over: a launcher forks another process for next to nothing, if there is one."""
        processes = member.group.processes if member.group is not None else []
        obeys = len(processes) == 1 and processes[0].orders
        alone = self.succession.active is member and len(self.members) == 1
        return obeys and alone and not (member.trial or self.ending)

    def _early(self, member: Member) -> wire.Stand | None:
        """How the next engine of a dying one is to begin, before that one is gone; None where it is not to.

        Only where clients wait for it: a standby that takes over needs the processors more. Ranks that have lost one
        of them live until they are ended, with all their memory. One that said why it ends may need others to give way.
        """
        processes = member.group.processes if member.group is not None else []
        by_surprise = len(processes) == 1 and not (member.ordered or member.blame or processes[0].broken)
        alone = self.succession.active is member and len(self.members) == 1
        # Of use already, so this death counts as the first; see run() of its lives.
        useful = (member.target is not None and member.target.answered) or time.monotonic() - member.since >= STABLE_S
        late = delay_s(1 if useful else member.failures + 1)
        wanted = not (member.stop.is_set() or member.trial or self.ending or late)
        return self._stand(member) if by_surprise and alone and wanted else None

    async def _before_the_next(self, member: Member) -> None:
        delay = delay_s(member.failures)
        if not delay:
            await member.until_stop(self.succession.first_token())
            return
        member.become("backoff")
        self._tell()
        log.warning("%s starts again in %g s, after %d deaths in a row", member.name, delay, member.failures)
        await member.until_stop(asyncio.sleep(delay))

    def _hopeless(self, member: Member) -> bool:
        """Where no engine was ever active, a mistake of the user's will not go away by trying again."""
        wrong = isinstance(member.broken, UsageError) and not self.succession.began and not member.trial
        if wrong and self._fatal is None and self._phase == "starting":
            self._fatal = member.broken
            self.stop()
        return wrong

    def _stand(self, member: Member) -> wire.Stand:
        beside = self._stands_by(member)
        return wire.Stand(
            parked=beside or self.succession.keeps,
            service=self._service,
            beside=beside,
            guardian=self._guardian,
            keep=self._keep_cache,
        )

    def _stands_by(self, member: Member) -> bool:
        return any(_serves(other) for other in self.members if other is not member)

    async def _relieve(self, why: str, to: Member) -> bool:
        """Have the batch engine give its memory back; whether it did."""
        return self.batch is not None and await self.batch.give_way(why, to)

    def _tell(self) -> None:
        if self.batch is not None:
            self.batch.poke()
        self._say(self.state)


def _failed(task: asyncio.Task[None]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _serves(member: Member) -> bool:
    """Whether a member serves, or is to as soon as it can: then the others need no memory for answers."""
    if member.role == "starting":
        return not member.parked and member.starts > 0
    return member.role in ("promoting", "active", "draining")
