"""The batch engine: one more on the same weights, which answers what can wait and is the first to give way.

It runs while an online engine is active. When an online engine, or an update, lacks memory, it is sent SIGKILL and
awaited; it comes back by itself once that engine has come up and one is active. It claims nothing, so it never stands
in the way of who serves. Its requests have a router of their own, where they wait meanwhile: their answers are then
completed as those of any engine that died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fer.errors import FerError, from_dict
from fer.standby import wire
from fer.standby.life import Lives, SupervisorLimits
from fer.standby.member import FREE_RESTARTS, Member, delay_s
from fer.standby.process import Process
from fer.standby.router import Router, Target
from fer.standby.succession import Succession
from fer.standby.version import Version

log = logging.getLogger("fer.standby")

AGAIN_S = 1.0
"""Seconds after which a batch engine without memory asks for it again, at first; then twice as long each time."""


class Preemptible:
    """The batch engine's place in a service.

    Args:
        version: has the commands of a batch engine.
        router: where its requests go.
        succession: who serves online, which comes first.
        back: called with the seconds from an engine's end until the next one answered.

    Attributes:
        paused: why an operator or an update wants none, ``""`` where one is wanted.
        preempted: how often each reason ended one.
        back_s: seconds of the last return, 0 before the first.
    """

    def __init__(
        self,
        version: Version,
        router: Router,
        lives: Lives,
        succession: Succession,
        limits: SupervisorLimits,
        *,
        back: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.member = Member(name="batch", version=version)
        self.router = router
        self._lives, self._succession, self._limits, self._back = lives, succession, limits, back
        self.paused = ""
        self.preempted: Counter[str] = Counter()
        self.back_s = 0.0
        self._for: Member | None = None
        """Who it gave way to and has not come up yet, in its start of this number or a later one."""
        self._start = 0
        self._ended = 0.0  # when the last engine was ended or died, on the clock of time.monotonic(); 0: it runs
        self._lacking = False  # it gave way since its start
        self._poked = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    # -- what others ask

    def poke(self) -> None:
        """Something has changed: look again whether a batch engine is wanted."""
        self._poked.set()

    async def give_way(self, why: str, to: Member | None = None) -> bool:
        """End the engine for somebody who lacks memory; whether there was one, which is gone now.

        Args:
            to: no batch engine is started before this one has come up or failed.
        """
        if to is not None:
            self._for, self._start = to, to.starts + (to.role == "standby")  # which is to start again
        if self.member.gone.is_set():
            return False
        self._lacking = True
        if not await self._end(why):
            return False
        self.preempted["memory"] += 1
        return True

    async def pause(self, why: str) -> None:
        """End the engine, and start none until :meth:`resume`. Requests wait."""
        self.paused = why
        if await self._end(why):
            self.preempted["order"] += 1
        self._ended = 0.0  # the time of a pause is nobody's loss
        self._settle()

    def resume(self) -> None:
        """Start one again as soon as an online engine is active."""
        if self.paused and self.member.gone.is_set():
            self._ended = time.monotonic()
        self.paused = ""
        self.poke()

    async def move(self, version: Version) -> None:
        """Start engines of another version from now on; one that runs has ``drain_s`` for its answers."""
        self.member.version = version
        target = self.member.target
        if target is not None and self.router.active is target:
            self.router.activate(None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.router.drained(target, shown=False), self._limits.drain_s)
        await self._end(f"it moves to {version}")
        self.poke()

    def stalled(self, target: Target) -> None:
        """It had work and says nothing any more."""
        if self.member.target is target and self.member.group is not None and not self.member.blame:
            self.member.blame = "it had work and said nothing for too long"
            log.error("batch hangs and is ended")
            self.member.group.kill()

    def status(self, *, private: bool) -> dict[str, Any]:
        """For ``/status``."""
        return {
            **self.member.status(private=private),
            "paused": self.paused,
            "in_flight": self.router.in_flight,
            "most": self.router.limits.requests,
            "resumed": self.router.resumed,
            "differed": self.router.differed,
            "preempted": dict(self.preempted),
            "back_s": round(self.back_s, 3),
        }

    # -- its life

    async def keep(self) -> None:
        """Keep an engine while one is wanted, until ``member.stop``."""
        member = self.member
        member.become("paused")
        while not member.stop.is_set():
            await member.until_stop(self._wanted())
            if member.stop.is_set():
                break
            # Parked, since an online engine answers: it warms up with one thread, and asks for memory afterwards.
            self._lacking = False
            worked = await self._lives.run(
                member, self._commands(), wire.Stand(parked=True, beside=True), ready=self._ready, leave=self._leave
            )
            if member.stop.is_set():
                break
            # One that is preempted again and again, before it is of use, comes back ever later, as one that dies does.
            if worked:
                member.failures = 1
            elif self._lacking or not member.ordered:
                member.failures = max(member.failures, FREE_RESTARTS if member.lacked else 0) + 1
            delay = delay_s(member.failures) if self._lacking or not member.ordered else 0.0
            if delay:
                member.become("backoff")
                log.warning("batch starts again in %g s, after %d ends in a row", delay, member.failures)
                await member.until_stop(asyncio.sleep(delay))
            self._settle()
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        member.become("stopped")

    def _commands(self) -> Any:
        commands = self.member.version.batch
        assert commands is not None, "a service with a batch engine has versions that say what it is"
        return commands

    def _settle(self) -> None:
        """Without an engine: whether one is to come or none is wanted."""
        if self.member.gone.is_set() and not self.member.stop.is_set():
            self.member.become("paused" if self.paused else "starting")

    async def _wanted(self) -> None:
        """Wait until an engine is wanted and stands in nobody's way."""
        while True:
            self._poked.clear()
            if self._gave_way():
                pass
            elif self._may_run():
                self._for = None
                await self._succession.first_token()
                if self._may_run():
                    return
                continue
            await self._poked.wait()

    def _gave_way(self) -> bool:
        """Whether whom it gave way to is yet to come up."""
        other = self._for
        if other is None or other.role in ("backoff", "stopped"):
            return False
        return other.starts < self._start or other.role in ("starting", "promoting", "ending")

    def _may_run(self) -> bool:
        return not self.paused and self._succession.active is not None

    def _ready(self) -> None:
        self.member.become("standby")
        self._serving = asyncio.ensure_future(self._serve(self.member.target))

    async def _serve(self, target: Target | None) -> None:
        """Take memory for answers, again and again where there is none, and answer."""
        member, tries = self.member, 0
        while member.target is target and target is not None and member.group is not None:
            first = member.group.first
            if not first.orders:
                break
            member.become("promoting")
            answer = await first.ask(wire.Promote(self._limits.promote_s))
            if member.target is not target or member.role != "promoting" or member.ordered:
                return
            if not isinstance(answer, wire.Unpromoted):
                break
            error: FerError = from_dict(answer.error)
            member.become("standby")
            self._lives.failed(member, f"cannot answer now: {error}")
            tries += 1
            await asyncio.sleep(min(AGAIN_S * 2.0 ** (tries - 1), 30.0))
        if member.target is target and target is not None and not member.ordered and not target.dismissed:
            self._activate(target)

    def _activate(self, target: Target) -> None:
        member = self.member
        member.parked = False
        member.become("batch")
        self.router.activate(target)
        if self._ended:
            self.back_s, self._ended = time.monotonic() - self._ended, 0.0
            self._back(self.back_s)
            log.info("batch is back after %.3f s", self.back_s)
        else:
            log.info("batch answers")

    def _leave(self, died: Process | None) -> None:
        member, target = self.member, self.member.target
        member.target = None
        if self._serving is not None:
            self._serving.cancel()
            self._serving = None
        if target is None:
            return
        if member.role == "batch" and not self._ended:
            self._ended = time.monotonic()
        if self.router.active is target:
            self.router.activate(None)

    async def _end(self, why: str) -> bool:
        """SIGKILL to exactly its process, and wait for its end; whether there was one."""
        member = self.member
        if member.gone.is_set():
            return False
        log.info("batch gives way: %s", why)
        if member.role == "batch":
            self._ended = time.monotonic()
        if self.router.active is member.target:
            self.router.activate(None)
        return await self._lives.dismiss(member, why)
