"""One engine from its start to its end; what it is for in between others decide."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fer.errors import EngineDied, FerError
from fer.standby import wire
from fer.standby.member import FREE_RESTARTS, LONGEST_DELAY_S, STABLE_S, Begun, Member, delay_s
from fer.standby.process import CLOSED_S, Command, Process, Spawn
from fer.standby.rankgroup import Limits, RankGroup, explain
from fer.standby.router import Target
from fer.standby.version import Version

log = logging.getLogger("fer.standby")

SPARE_S = 1.0
"""Seconds an engine has served when a spare is begun beside it: requests come first."""
OBEY_S = 2.0
"""Seconds in which a spare that is told to start says that it does; then another process is started in its place."""


@dataclass(frozen=True, kw_only=True)
class SupervisorLimits:
    """How long.

    Attributes:
        start_s: seconds from a start to readiness, after which it counts as failed.
        drain_s: seconds that running answers have before a switch or the end.
        promote_s: seconds a standby has to get the service, the end of those before it included.
        settle_s: seconds without a request after which the first engine of an update counts as proven.
        end: for the end of a process.
    """

    start_s: float = 1800.0
    drain_s: float = 30.0
    promote_s: float = 20.0
    settle_s: float = 3.0
    end: Limits = field(default_factory=Limits)


class Lives:
    """Starts the engines of a service, and sees that they end.

    Args:
        folder: private directory for the engines' sockets.
        spawn: how processes are started.
        tell: called after every change.

    Attributes:
        restarts: engines that were started again, since the beginning; not those whose end was ordered.
        last_error: of the last failure of any engine.
    """

    def __init__(self, folder: Path, spawn: Spawn, limits: SupervisorLimits, tell: Callable[[], None]) -> None:
        self._folder, self._spawn, self._limits, self._tell = folder, spawn, limits, tell
        self.restarts = 0
        self.last_error = ""
        self._discards: set[asyncio.Task[None]] = set()

    async def run(
        self,
        member: Member,
        commands: Callable[[Path], Sequence[Command]],
        stand: wire.Stand,
        *,
        ready: Callable[[], None],
        leave: Callable[[Process | None], None],
        early: Callable[[], wire.Stand | None] = lambda: None,
        spare: Callable[[], bool] = lambda: False,
    ) -> bool:
        """One engine, until it ends or ``member.stop`` is set and it has been ended.

        Args:
            commands, stand: what is started, and how it is to stand by.
            ready: called when it is ready; its member has a target from then on.
            leave: called when it is gone or is to go, with the process that died, None where none did.
            early: called when it is dying, but not gone: how its successor is to stand by, if that may begin meanwhile.
            spare: whether a process is to wait to become its successor.

        Returns:
            whether it was of use: it answered, or was ready for a while.
        """
        version = member.version
        self.restarts += member.starts > 0 and not member.ordered
        begun = await self._take(member, stand) or self._begin(member, commands, stand)
        path, group = begun.path, begun.group
        member.begin(parked=group.stand is not None and group.stand.parked)
        member.group = group
        self._tell()
        ready_at, target = 0.0, None
        died: Process | None = None
        try:
            try:
                weights = await begun.started
            except (OSError, FerError) as error:
                member.broken = error if isinstance(error, FerError) else None
                self.failed(member, str(error))
                return False
            if member.ordered:
                group.kill()  # it came too late for who gave that order
            first = group.processes[0]
            what = "takes over, which was a spare" if group.waited else "started"
            log.info("%s: process %s %s, via=%s: %s", member.name, _pids(group), what, first.how, first.why_so)
            died = await self._start(member, version, group)
            if died is None and member.ready is not None:
                same = await asyncio.to_thread(version.weights) == weights
                # Files that changed while it read them prove nothing: such an engine is like no other.
                target = member.target = Target(member.name, path, weights=weights if weights and same else path.name)
                ready_at = time.monotonic()
                ready()
                keeping = asyncio.create_task(self._keep_spare(member, commands, spare))
                try:
                    died = await member.until_stop(self._death(member, group, commands, early))
                finally:
                    keeping.cancel()
                    await asyncio.gather(keeping, return_exceptions=True)
        finally:
            leave(died)
            lived_s = time.monotonic() - ready_at if ready_at else 0.0
            if group.processes:
                if not member.stop.is_set():
                    member.become("ending")
                await group.end(at_once=died is not None)
                if died is not None:
                    await self._explain(member, died)
            path.unlink(missing_ok=True)
            member.gone.set()
        return lived_s >= STABLE_S or (target is not None and target.answered)

    def _begin(self, member: Member, commands: Callable[[Path], Sequence[Command]], stand: wire.Stand | None) -> Begun:
        """Put a member's next engine on its way; without ``stand`` it is a spare."""
        path = self._folder / f"{member.name}-{member.starts + 1}.sock"
        given = commands(path) if stand is not None else [replace(each, forked=True) for each in commands(path)]
        group = RankGroup(given, self._spawn, self._limits.end, stand)

        async def start() -> str:
            weights = await asyncio.to_thread(member.version.weights)
            await group.start()
            return weights

        return Begun(member.version, path, group, asyncio.create_task(start()))

    async def _take(self, member: Member, stand: wire.Stand) -> Begun | None:
        """The engine that was begun ahead, a spare told to start; None where there is none that may be used."""
        begun = member.begun
        if begun is None:
            return None
        fits = await begun.fit(member.version)
        if member.begun is not begun:  # it has died meanwhile
            return None
        member.begun = None
        if not fits:
            self._discard(begun)
            return None
        if begun.spare:
            begun.group.go(stand)
        return begun

    async def _keep_spare(
        self, member: Member, commands: Callable[[Path], Sequence[Command]], wanted: Callable[[], bool]
    ) -> None:
        """Some time after an engine began to serve, have another process wait to become the next one.

        Only one that a launcher has forked, which costs next to nothing: it shares its memory with the template. One
        that dies while it waits is followed by another, ever later where they die one after the other.
        """
        deaths, missed = 0, ""
        while True:
            while not (wanted() and member.begun is None):
                await asyncio.sleep(SPARE_S)
            begun = member.begun = self._begin(member, commands, None)
            began = time.monotonic()
            try:
                await asyncio.shield(begun.started)
            except (OSError, FerError) as error:
                why = error.why if isinstance(error, FerError) and error.why else str(error)
                if why != missed:
                    log.info("%s has no spare: %s", member.name, why)
                missed = why
            forked = bool(begun.group.processes) and begun.group.first.how == "launcher"
            if member.begun is begun and forked:
                log.info("%s: process %s waits as its spare", member.name, _pids(begun.group))
                await begun.group.death()
            if member.begun is not begun or not begun.spare:
                return  # the engine dies, and this one is to be the next
            member.begun = None
            self._discard(begun)
            if forked:
                log.info("%s has a spare no more", member.name)
                deaths, missed = 1 if time.monotonic() - began >= STABLE_S else deaths + 1, ""
                await asyncio.sleep(delay_s(FREE_RESTARTS + deaths))
            else:  # the launcher is being replaced by a fresh one, or has gone and may come back
                await asyncio.sleep(LONGEST_DELAY_S)

    def _discard(self, begun: Begun) -> None:
        """End what was begun and is not needed. Nobody waits for that: a launcher that hangs must not hold us up."""
        task = asyncio.create_task(begun.discard(2 * self._limits.end.kill_s))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)

    async def forgo(self, member: Member) -> None:
        """End a member's next engine, where that has begun and is not wanted any more; wait until all such are gone."""
        begun, member.begun = member.begun, None
        if begun is not None:
            self._discard(begun)
        if self._discards:
            await asyncio.wait({*self._discards})

    async def _death(
        self,
        member: Member,
        group: RankGroup,
        commands: Callable[[Path], Sequence[Command]],
        early: Callable[[], wire.Stand | None],
    ) -> Process:
        """Wait for the first process that ends, or has closed all it had and is not let go by the kernel in time.

        Its successor is begun at the first sign, where that may be.
        """
        closing, death = asyncio.ensure_future(group.closing()), asyncio.ensure_future(group.death())
        try:
            await asyncio.wait([closing, death], return_when=asyncio.FIRST_COMPLETED)
            if not death.done() and (stand := early()) is not None:
                log.info("%s: %s is dying, the next engine begins", member.name, _pids(group))
                member.begun = await self._take(member, stand) or self._begin(member, commands, stand)
            await asyncio.wait([death], timeout=CLOSED_S + self._limits.end.kill_s)
            return death.result() if death.done() else group.lingering()
        finally:
            for task in (closing, death):
                task.cancel()
            await asyncio.gather(closing, death, return_exceptions=True)

    async def _start(self, member: Member, version: Version, group: RankGroup) -> Process | None:
        """Wait until the engine is ready; the process that ended instead, if one did."""
        obeys, ready = asyncio.ensure_future(group.obeys()), asyncio.ensure_future(group.ready())
        death = asyncio.ensure_future(group.death())
        steps = [(obeys, OBEY_S, "did not begin when it was told to"), (ready, self._limits.start_s, "was not ready")]
        try:
            for step, limit_s, failure in steps:
                await member.until_stop(
                    asyncio.wait([step, death], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                )
                if death.done():
                    return death.result()
                if member.stop.is_set():
                    return None
                if not step.done():
                    member.blame = f"it {failure} after {limit_s:g} s"
                    self.failed(member, member.blame)
                    group.kill()
                    return await death
            member.ready = ready.result()
            version.note(member.ready)
            log.info("%s is ready after %.3f s", member.name, member.ready.report.get("total_s", 0.0))
            return None
        finally:
            for task in (obeys, ready, death):
                task.cancel()
            await asyncio.gather(obeys, ready, death, return_exceptions=True)

    async def dismiss(self, member: Member, why: str) -> bool:
        """SIGKILL a member's engine by order, and wait until it is gone with its memory.

        Returns:
            whether there was one that is gone now; not so where the kernel does not let go of it in time.
        """
        if member.gone.is_set() or member.group is None:
            return False
        member.ordered = member.ordered or why
        if member.target is not None:
            member.target.dismissed = True  # no request is to blame for this death
        member.group.kill()  # of one that is only being started, run() does the rest
        try:
            await asyncio.wait_for(member.gone.wait(), self._limits.end.kill_s)
        except TimeoutError:
            return False
        return True

    def failed(self, member: Member, why: str) -> None:
        """Say why an engine is of no use just now."""
        member.last_error = self.last_error = why
        log.warning("%s: %s", member.name, why)
        self._tell()

    async def _explain(self, member: Member, died: Process) -> None:
        if member.ordered:
            log.info("%s was ended: %s", member.name, member.ordered)
            return
        error = await explain(died)
        member.tail, member.broken = died.tail, died.broken
        self.failed(member, f"{error.why} ({member.blame})" if member.blame else error.why)


async def abandon(members: Sequence[Member]) -> EngineDied:
    """Let go of processes that SIGKILL did not end; the error that says which."""
    groups = [member.group for member in members if member.group is not None]
    left = [process for group in groups for process in group.wedged]
    for group in groups:
        await group.close()
    return EngineDied(
        "not every process ended after SIGKILL",
        why=", ".join(f"{process.pid}: {process.stuck()}" for process in left),
        fix="The kernel or a driver holds them: look at the GPU with nvidia-smi and at the kernel's log",
        pid=left[0].pid if left else 0,
    )


def _pids(group: RankGroup) -> str:
    return ", ".join(str(process.pid) for process in group.processes)
