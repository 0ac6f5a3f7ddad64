"""Who serves: one member is active, and when it dies or is to rest, another one is promoted.

Who may serve the workers decide among themselves, through the keeper: here it is only said who is to try. Only engines
of the service's version are tried; those of another one stand by for an update, or for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable

from fer.errors import FerError, OutOfMemory, RequestError, from_dict
from fer.standby import wire
from fer.standby.life import Lives, SupervisorLimits
from fer.standby.member import Member
from fer.standby.outage import Outage
from fer.standby.process import Process
from fer.standby.router import Router
from fer.standby.version import Version

log = logging.getLogger("fer.standby")

TOKEN_S = 2.0
"""Seconds a standby that has taken over has for its first token before its predecessor is started again."""

AGAIN_S = 1.0
"""Seconds after which a standby that could not be promoted may be tried again."""

Relief = Callable[[str, Member], Awaitable[bool]]
"""Has whoever may be preempted give its memory back to a member, for the reason given; whether somebody did."""


class Succession:
    """The members of a service, and which of them is active.

    Args:
        version: what is served at first.
        lives: told of engines that could not serve.
        tell: called after every change.
        outages: called with each outage when its first token came, or when it ended and no request waited.
        relief: asked once where an engine lacks memory to serve.

    Attributes:
        version: only its engines are promoted.
        fallback: the version before, until the first engine of an update has proven itself.
        outage: the current or the last one.
        began: whether an engine was ever active; ``ended``: nobody is promoted any more.
        keeps: the active engine's cache outlives it, so that the next one needs no memory before it serves.
        changing: held while the active member is changed as planned.
    """

    def __init__(
        self,
        version: Version,
        router: Router,
        lives: Lives,
        limits: SupervisorLimits,
        *,
        tell: Callable[[], None],
        outages: Callable[[Outage], None],
        relief: Relief,
    ) -> None:
        self.version = version
        self.fallback: Version | None = None
        self._router, self._lives, self._limits = router, lives, limits
        self._tell, self._outages, self._relief = tell, outages, relief
        self.members: list[Member] = []
        self.outage: Outage | None = None
        self.began = self.ended = self.keeps = False
        self._dead: list[tuple[Process, str]] = []  # who died while serving or taking over since, and the blame
        self.changing = asyncio.Lock()
        self._promoting: asyncio.Task[None] | None = None
        self._background: set[asyncio.Future[None]] = set()
        self._token = asyncio.Event()

    @property
    def active(self) -> Member | None:
        """Who answers now."""
        return next((member for member in self.members if member.role == "active"), None)

    # -- what becomes of members

    def ready(self, member: Member) -> None:
        """A member's engine has recovered: it stands by, or serves where nobody does."""
        member.become("standby")
        if self._router.active is not None and not member.parked:
            self._have_parked(member)
        self.elect()
        self._tell()

    def leave(self, member: Member, died: Process | None) -> None:
        """A member's engine is gone or goes: nobody is sent there any more."""
        target, member.target = member.target, None
        was = member.role
        if died is not None and was in ("active", "draining", "promoting"):
            self._dead.append((died, member.blame))
        if target is None or (self._router.active is not target and was != "draining"):
            return
        member.become("ending")
        self._router.activate(None)
        self._router.on_token = None
        if died is not None:
            seen = died.died or time.monotonic_ns()  # of one that the kernel does not let go of
            self.outage = Outage(died=seen, noticed=min(died.closed or seen, seen))
            log.warning("%s, process %d, died while %s", member.name, died.pid, was)
        if member.trial and target.answered:
            self.commit(member)
        elif member.trial and died is not None:
            self._roll_back(member)
        for other in self.members:
            other.unfit = ""  # what it held is free
        self.elect()
        self._tell()

    def commit(self, member: Member) -> None:
        """The first engine of an update has proven itself: there is no way back by itself from here."""
        member.trial, self.fallback = False, None

    def _roll_back(self, member: Member) -> None:
        assert self.fallback is not None, "an engine on trial is active only while there is a way back"
        log.error("%s of %s died before its first token: %s serves again", member.name, self.version, self.fallback)
        self.version, self.fallback = self.fallback, None

    # -- after a death

    def elect(self) -> None:
        """Where nobody is active, the first that stands by and was not found unfit is to become it."""
        if self._router.active is not None or self._promoting is not None or self.ended:
            return
        if self.changing.locked():  # that is just being done
            return
        member = next((member for member in self.members if self._fits(member) and not member.unfit), None)
        if member is not None and member.group is not None:
            if not member.group.first.orders:
                self._activate(member, None)
            else:
                self._promoting = asyncio.create_task(self._try(member))

    def _fits(self, member: Member) -> bool:
        return member.role == "standby" and member.version is self.version

    async def settled(self) -> None:
        """Wait until no promotion is under way."""
        while self._promoting is not None:
            await asyncio.wait([self._promoting])

    @property
    def busy(self) -> bool:
        """Whether requests are under way."""
        return self._router.in_flight > 0

    async def recovered(self, limit_s: float) -> None:
        """Wait until an engine is active, as long as answers are under way that only one with the same weights ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._router.active is None and self._router.shown:
                    await self._router.change()

    async def first_token(self) -> None:
        """Where a standby takes over, let it answer before a start takes processors from it."""
        await self.settled()
        if self._router.active is not None and self._router.on_token is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._token.wait(), TOKEN_S)

    async def _try(self, member: Member) -> None:
        try:
            await self._promote(member)
        finally:
            self._promoting = None
        self.elect()

    async def _promote(self, member: Member) -> None:
        """Have a standby serve. It is active afterwards, or unfit, or has died."""
        assert member.group is not None
        first = member.group.first
        if not first.orders:
            self._activate(member, None)
            return
        member.become("promoting")
        self._tell()
        order = wire.Promote(self._limits.promote_s, trust=await self._trusts())
        answer = await first.ask(order)
        error = from_dict(answer.error) if isinstance(answer, wire.Unpromoted) else None
        if isinstance(error, OutOfMemory) and await self._relief(
            f"{member.name} lacks memory to serve: {error}", member
        ):
            answer = await first.ask(order)  # of one that died meanwhile: None
            error = from_dict(answer.error) if isinstance(answer, wire.Unpromoted) else None
        if member.role != "promoting":  # it has died, which others look after
            return
        if isinstance(answer, wire.Promoted):
            self._activate(member, answer)
        elif error is not None:
            self._reject(member, error)

    async def _trusts(self) -> bool:
        """Whether what the engine before left may be gone on with: it was ended from outside, or rests as ordered."""
        for process, blame in [*self._dead]:  # any of them may have written to it
            if blame or await process.status() not in (-signal.SIGKILL, -signal.SIGTERM):
                return False
        return True

    def _reject(self, member: Member, error: FerError) -> None:
        member.broken, member.unfit = error, str(error)
        member.become("standby")
        self._lives.failed(member, f"cannot serve now: {member.unfit}")
        if self.outage is not None and not self.outage.active:
            self.outage.failed[member.name] = member.unfit
        asyncio.get_running_loop().call_later(AGAIN_S, self._again, member)

    def _again(self, member: Member) -> None:
        member.unfit = ""
        self.elect()

    def _activate(self, member: Member, promoted: wire.Promoted | None) -> None:
        """From now on requests go to this member."""
        assert member.target is not None
        member.parked = False
        member.become("active")
        self.began = True
        self._dead.clear()
        self.keeps = promoted is not None and promoted.keeps
        if self.outage is not None and not self.outage.active:
            self.outage.promotion = promoted
            self._end_outage(self.outage, member)
        self._router.activate(member.target)
        self._tell()
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

    def _end_outage(self, outage: Outage, member: Member) -> None:
        assert member.group is not None and member.ready is not None
        first = member.group.processes[0]
        outage.spawned, outage.begun, outage.told = first.started, first.begun, first.told
        outage.ready = member.ready.at
        outage.active = time.monotonic_ns()
        outage.path = "standby" if outage.ready < outage.noticed else first.how

        def token() -> None:
            outage.token = time.monotonic_ns()
            self._token.set()
            self._outages(outage)

        if self._router.in_flight:
            self._token.clear()
            self._router.on_token = token
        else:
            self._outages(outage)

    # -- as planned

    def _candidate(self) -> Member:
        """A standby that could take over. Raises RequestError: there is none."""
        found = next((member for member in self.members if self._fits(member)), None)
        if found is None or found.group is None:
            why = ", ".join(f"{member.name} is {member.state}" for member in self.members)
            raise RequestError("no standby is ready", why=why, fix="Start with --standbys 1", status=409)
        return found

    async def hand_over(self, new: Member | None = None, *, cut: bool = False) -> tuple[Member, Member | None]:
        """Let the active member finish its answers, and make a standby active. Requests that come meanwhile wait.

        A standby of another version makes that the service's; the one before stays as ``fallback``. Answers of which a
        client has seen something are then not completed by the new one: where they take longer than ``drain_s``,
        nothing is handed over, unless they may be ``cut`` and end with an error. Others are begun again.

        Args:
            new: by default the first standby.

        Returns:
            who is active, and who was before, where that one stands by now.

        Raises:
            RequestError: the new one could not take over, or answers did not end in time; then the former one serves.
        """
        try:
            async with self.changing:
                await self.settled()  # a promotion that is under way may make somebody active yet
                new = new or self._candidate()
                before, updates = self.version, new.version is not self.version
                old = self.active
                if old is not None:
                    await self._relieve(old, new, finish=updates and not cut)
                    if old.role == "active":
                        raise self._undrained(updates)
                    if updates and old.role != "standby" and self._router.shown and not cut:
                        # It died, and only an engine of its version can go on with what clients have seen of it.
                        raise RequestError(
                            f"{old.name} died while its answers ended", fix="Ask again", status=409, code="interrupted"
                        )
                if new.role == "standby":
                    if updates:
                        self.version, self.fallback = new.version, before
                    await self._promote(new)
                    if updates and self.active is not new and self.version is new.version:
                        self.version, self.fallback = before, None
        finally:
            self.elect()  # what died or failed meanwhile has left that to us
        await self.settled()
        if new.role != "active":
            fix = "The former engine serves, or the next one will; see /status"
            if not new.unfit:  # it died: of what is known in a moment
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(new.gone.wait(), self._limits.end.kill_s)
            why = new.unfit or new.last_error or "it ended"
            raise RequestError(f"{new.name} could not take over", why=why, fix=fix, status=409)
        return new, old if old is not None and old.role == "standby" else None

    async def _relieve(self, old: Member, new: Member, *, finish: bool) -> None:
        """Let the active member finish its answers, and stand by; it stays active where they may not be cut off.

        Where the next one goes on with its cache, answers are handed over in the middle: nobody waits for their end.

        Args:
            new: who is to serve instead.
            finish: answers of which a client has seen something may not be.
        """
        assert old.target is not None and old.group is not None
        target, group = old.target, old.group
        old.become("draining")
        self._router.activate(None, ending=target if finish else None)
        self._tell()
        ends = asyncio.ensure_future(self._router.drained(target, shown=finish))
        gone = asyncio.ensure_future(old.until(lambda: old.role != "draining"))
        same = new.target is not None and new.target.weights == target.weights
        goes_on = self.keeps and same and not finish and self._router.resume != "fail"
        drain_s = 0.0 if goes_on else self._limits.drain_s
        await asyncio.wait([ends, gone], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        kept = not ends.done() and (self._router.resume == "fail" or (finish and self._router.shown > 0))
        for waiting in (ends, gone):
            waiting.cancel()
        if old.role == "draining" and kept:
            old.become("active")
            self._router.activate(target)
            return
        self._router.activate(None)
        target.dismissed = group.first.orders  # it breaks answers off as it is told: no request is to blame for that
        answer = await group.first.ask(wire.Park()) if group.first.orders else None
        if answer is None and group.first.orders:
            await old.until(lambda: old.role != "draining")  # it has died, which is seen at once
        if old.role == "draining":
            old.parked = isinstance(answer, wire.Parked) and answer.freed
            old.target = target.anew()
            old.become("standby")

    def _undrained(self, updates: bool) -> RequestError:
        why = f"answers did not end within {self._limits.drain_s:g} s, and "
        if updates:
            why += f"another model does not go on with the {self._router.shown} of which clients have seen something"
            fix = "Raise --drain-s, or have them end with an error: --cut"
        else:
            why, fix = why + "--resume fail lets none be cut off", "Raise --drain-s"
        return RequestError("nothing was switched", why=why, fix=fix, status=409)
