"""Processes that live and die together: the ranks of one engine."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from fer.errors import EngineDied, PeerRankFailed
from fer.standby import wire
from fer.standby.process import Command, Process, Spawn

log = logging.getLogger("fer.standby")


PEER_S = 1.0
"""Seconds in which the rank ends that another one says it ended for."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long the end of a process may take, seconds: after SIGTERM, and after SIGKILL."""

    term_s: float = 10.0
    kill_s: float = 30.0


class RankGroup:
    """One process a rank. The first death ends the group: the others are ended too, and all are waited for.

    Args:
        commands: one a rank, rank 0 first.
        spawn: how each is started.

    Attributes:
        stand: what each is told that takes orders; None for a spare, which waits for :meth:`go`.
        waited: it was a spare.
        processes: those that were started.
        wedged: those that did not end in time after SIGKILL, as where the kernel waits for a GPU. Whoever they held
            memory of gets it back only when the kernel lets go of them.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        spawn: Spawn,
        limits: Limits = Limits(),
        stand: wire.Stand | None = wire.SERVE,
    ) -> None:
        self._commands, self._spawn, self._limits, self.stand = commands, spawn, limits, stand
        self.waited = False
        self.processes: list[Process] = []
        self.wedged: list[Process] = []

    async def start(self) -> None:
        """Start every rank.

        Raises:
            OSError, FerError: one could not be started; those before it have been ended.
        """
        try:
            for command in self._commands:
                self.processes.append(process := await Process.start(command, self._spawn, self.stand))
                process.name = command.name
        except BaseException:
            await self.end()
            raise

    def go(self, stand: wire.Stand) -> None:
        """Let a spare start."""
        self.stand, self.waited = stand, True
        for process in self.processes:
            process.go(stand)

    async def obeys(self) -> None:
        """Wait until all that were a spare have heard how to start: one that hangs never will."""
        if self.waited:
            await asyncio.gather(*(asyncio.shield(process.obeys) for process in self.processes))

    async def ready(self) -> wire.Ready:
        """Wait until every rank is ready; what rank 0 said."""
        return (await asyncio.gather(*(process.ready for process in self.processes)))[0]

    async def closing(self) -> None:
        """Wait for the first sign of a death; see :class:`Process`."""
        signs = [asyncio.shield(process.closing) for process in self.processes]
        await asyncio.wait(signs, return_when=asyncio.FIRST_COMPLETED)

    def lingering(self) -> Process:
        """The first that showed such a sign."""
        return min((process for process in self.processes if process.closed), key=lambda process: process.closed)

    async def death(self) -> Process:
        """Wait for the first process that ends."""
        endings = [asyncio.shield(process.ended) for process in self.processes]
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        for first in [process for process in self.processes if process.ended.done()]:
            await first.heard()
            if others := [asyncio.shield(process.ended) for process in self._causes(first)]:
                await asyncio.wait(others, timeout=PEER_S, return_when=asyncio.FIRST_COMPLETED)
        ended = sorted((process for process in self.processes if process.ended.done()), key=lambda p: p.died)
        if len(ended) == 1:
            return ended[0]
        # Of several at once the one that could say why is most likely the cause, or else the one that was killed:
        # ranks end by themselves when another one has.
        for process in ended:
            await process.heard()
        causes = [process for process in ended if not isinstance(process.broken, PeerRankFailed)]
        told = [process for process in causes if process.broken is not None]
        killed = [process for process in ended if await process.status() < 0]
        return [*told, *killed, *causes, *ended][0]

    def _causes(self, ended: Process) -> list[Process]:
        """Those that one may have ended for, and which will end in a moment: it says so, or they have begun to."""
        if ended.broken is not None and not isinstance(ended.broken, PeerRankFailed):
            return []
        left = [process for process in self.processes if not process.ended.done()]
        ending = [process for process in left if process.broken is not None or process.closing.done()]
        return ending or (left if ended.broken is not None else [])

    @property
    def first(self) -> Process:
        """The one that answers, and takes the orders."""
        return self.processes[0]

    def kill(self) -> None:
        """SIGKILL to every rank, without waiting."""
        for process in self.processes:
            process.signal(signal.SIGKILL)

    async def end(self, *, at_once: bool = False) -> None:
        """End every process and wait until the last one is gone, however long the kernel takes.

        Args:
            at_once: SIGKILL without SIGTERM before, as among ranks whose peer has died.
        """
        if not at_once:
            for process in self.processes:
                process.signal(signal.SIGTERM)
            await self._wait(self._limits.term_s)
        self.kill()
        await self._wait(self._limits.kill_s)
        self.wedged = [process for process in self.processes if not process.ended.done()]
        for process in self.wedged:
            log.error("process %d does not end after SIGKILL: %s", process.pid, process.stuck())
        await self._wait(None)
        self.wedged = []
        for path in (path for command in self._commands for path in command.files):
            path.unlink(missing_ok=True)
        await self.close()

    async def close(self) -> None:
        """Let go of all processes, ended or not."""
        for process in self.processes:
            await process.close()

    async def _wait(self, limit_s: float | None) -> None:
        left = [asyncio.shield(process.ended) for process in self.processes if not process.ended.done()]
        if left:
            await asyncio.wait(left, timeout=limit_s)


async def explain(process: Process) -> EngineDied:
    """The death of a process as an error."""
    why = await process.why()
    why = f"{process.name}: {why}" if process.name else why
    return EngineDied(f"engine process {process.pid} ended", why=why, pid=process.pid, status=await process.status())
