"""Another model in place of the one that is served: engines move over one by one, and no request fails.

1. *starting*: an engine of the new model starts, parked, beside the old ones; its start publishes an edition beside
   theirs.
2. *switching*: the active engine finishes its answers, and the new one is promoted, as in any planned switch.
3. *trial*: until its first token the former engine stands by: if the new one dies, that serves again.
4. *moving*: the standbys and the batch engine are started anew, one after another.
5. *evicting*: the keeper gives up the old edition.

Whatever fails before the end of the third step leaves the old model serving. After it the new one is the service's,
whatever becomes of the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any, Protocol

from fer.errors import FerError, RequestError
from fer.standby.eviction import Editions
from fer.standby.life import Lives, SupervisorLimits
from fer.standby.member import Member
from fer.standby.preemptible import Preemptible
from fer.standby.succession import Succession
from fer.standby.version import Version, unpublished

log = logging.getLogger("fer.standby")

HAND_OVERS = 3
"""Times a switch is tried whose active engine dies in the middle of it."""

UP_OR_NOT = ("standby", "active", "backoff", "stopped")
"""Roles of a member whose start has come to something."""


class Staff(Protocol):
    """Who has the members; :class:`fer.standby.supervisor.Supervisor` does."""

    batch: Preemptible | None

    @property
    def ending(self) -> bool:
        """Whether nothing new is begun."""

    def hire(self, version: Version) -> Member:
        """Another member, on trial."""

    async def retire(self, member: Member) -> None:
        """End a member for good."""


class Update:
    """The updates of one service, one at a time.

    Attributes:
        step: what the one that runs is doing, ``""`` where none runs.
        done: updates that came to their end; ``failed``: those that did not.
    """

    def __init__(
        self, staff: Staff, succession: Succession, lives: Lives, limits: SupervisorLimits, editions: Editions
    ) -> None:
        self._staff, self._succession, self._lives, self._limits = staff, succession, lives, limits
        self._editions = editions
        self.step = ""
        self.done = self.failed = 0
        self._last: dict[str, Any] = {}
        self._last_error = ""
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._seconds: dict[str, float] = {}
        self._since = 0.0

    @property
    def running(self) -> bool:
        """Whether one is under way."""
        return self._task is not None and not self._task.done()

    def status(self, *, private: bool) -> dict[str, Any]:
        """For ``/status``; ``private`` adds folders and errors."""
        seconds = {**self._seconds, **({self.step: time.monotonic() - self._since} if self.step else {})}
        shown = {"step": self.step, "seconds": {name: round(value, 3) for name, value in seconds.items()}}
        counted = {"done": self.done, "failed": self.failed}
        return {**shown, **counted, **({"last": self._last, "last_error": self._last_error} if private else {})}

    async def to(self, version: Version, *, keep_old: bool = False, cut: bool = False) -> dict[str, Any]:
        """Have another version served.

        Args:
            keep_old: leave the old edition with the keeper, so that the way back is short.
            cut: let answers end with an error that outlast ``drain_s`` and of which a client has seen something.

        Returns:
            what was done: who is active, what was evicted and kept, seconds of each step.

        Raises:
            RequestError: another update is under way, or the switch was not possible; the old model serves.
            FerError: what the new model's engine said; the old model serves. OutOfMemory has ``needed`` and ``free``.
        """
        self.refuse_second()
        # A task of its own, and shielded: whoever asked may go away in the middle.
        self._task = asyncio.ensure_future(self._run(version, keep_old=keep_old, cut=cut))
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if not self._task.done():
                self._task.add_done_callback(_forget)
                raise
            raise RequestError("the update was broken off: the service ends", status=503) from None

    def refuse_second(self) -> None:
        """Raise RequestError where one is under way, or the service ends."""
        if self._staff.ending:
            raise RequestError("the service ends", status=503)
        if self.running:
            raise RequestError("another update is under way", why=f"it is {self.step}", status=409, code="update_runs")

    def cancel(self) -> None:
        """Break off the one that runs: the service ends."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, version: Version, *, keep_old: bool, cut: bool) -> dict[str, Any]:
        old, self._seconds, self._last_error = self._succession.version, {}, ""
        log.info("update from %s to %s", old, version)
        try:
            former = await self._change(version, cut=cut)
            self._enter("moving")
            waiting = await self._move(version, former)
            self._enter("evicting")
            evicted, kept = await self._give_up(old.editions - version.editions, keep_old=keep_old)
        except BaseException as error:
            self.failed += 1
            self._last_error = str(error)
            log.error("the update to %s failed: %s", version, error)
            raise
        finally:
            self._enter("")
        self.done += 1
        active = self._succession.active
        self._last = {
            "version": version.number,
            "folder": str(version.model),
            "active": active.name if active else None,
            "evicted": evicted,
            "kept": kept,
            "waiting": waiting,
            "seconds": {name: round(value, 3) for name, value in self._seconds.items()},
        }
        log.info("updated to %s; evicted %s, kept %s", version, evicted or "nothing", kept or "nothing")
        return self._last

    def _enter(self, step: str) -> None:
        now = time.monotonic()
        if self.step:
            self._seconds[self.step] = now - self._since
        self.step, self._since = step, now

    # -- up to where there is no way back

    async def _change(self, version: Version, *, cut: bool) -> Member | None:
        """Have an engine of the new version active and proven; who was active before."""
        self._enter("starting")
        before = await self._editions.of(version.model)
        new = self._staff.hire(version)
        try:
            await self._up(new)
            await self._share(new)
            self._enter("switching")
            former = await self._hand_over(new, cut=cut)
            self._enter("trial")
            await self._prove(new)
        except BaseException:
            # Also where we are broken off, and in its first seconds as the active one: nothing is left half done.
            if new.trial or new.role != "active":
                await asyncio.shield(self._staff.retire(new))
                # Also one that it published and then died of something else.
                made = (version.published | await self._editions.of(version.model)) - before
                await self._give_up(made - self._succession.version.editions)
            raise
        return former

    async def _up(self, new: Member) -> None:
        await new.until(lambda: new.role in ("standby", "stopped"))
        if new.role != "standby":
            raise self._refused(new, "its engine did not come up")

    async def _share(self, new: Member) -> None:
        """Where its weights could not be published, as for want of room, have batch give way, and start it again.

        An engine with weights of its own serves as well; but then each one that follows loads a copy.
        """
        batch, old = self._staff.batch, self._succession.version
        why = unpublished(new.ready) if new.ready is not None else ""
        if not why or not old.editions:  # no keeper has the old ones either
            return
        if batch is not None and await batch.give_way(f"{new.name} could not publish: {why}", new):
            await self._lives.dismiss(new, "it starts again, to publish")
            await self._up(new)
            why = unpublished(new.ready) if new.ready is not None else ""
        if why:
            log.warning("%s serves with weights of its own, and so will each engine after it: %s", new.name, why)

    async def _hand_over(self, new: Member, *, cut: bool) -> Member | None:
        for attempt in range(1, HAND_OVERS + 1):
            await self._succession.recovered(self._limits.drain_s)
            try:
                return (await self._succession.hand_over(new, cut=cut))[1]
            except RequestError as error:
                if error.fields.get("code") == "interrupted" and new.role == "standby" and attempt < HAND_OVERS:
                    log.warning("%s; once more when its successor serves", error)
                    continue
                if new.broken is not None or new.role != "standby":
                    raise self._refused(new, str(error.what)) from error
                raise
        raise AssertionError("the last attempt returns or raises")

    async def _prove(self, new: Member) -> None:
        """Wait for the new engine's first token, or a while without requests. Raises where it dies before."""
        if (target := new.target) is not None:
            token = asyncio.ensure_future(target.first.wait())
            gone = asyncio.ensure_future(new.until(lambda: new.role != "active"))
            try:
                done: set[asyncio.Future[Any]] = set()
                # Where requests wait for that token, no time stands for it: who says nothing for long is ended as hung.
                while not done and (not self._waited() or self._succession.busy):
                    done, _ = await asyncio.wait(
                        [token, gone], timeout=self._limits.settle_s, return_when=asyncio.FIRST_COMPLETED
                    )
            finally:
                for waiting in (token, gone):
                    waiting.cancel()
                await asyncio.gather(token, gone, return_exceptions=True)
        if new.trial and new.role != "active":
            await new.until(lambda: new.role == "stopped")
            raise self._refused(new, "its engine died before its first token")
        self._succession.commit(new)

    def _waited(self) -> bool:
        return time.monotonic() - self._since >= self._limits.settle_s

    def _refused(self, new: Member, what: str) -> FerError:
        """Why the new engine cannot serve, as the error that it met."""
        serves = f"{self._succession.version} serves as before"
        if new.broken is None:
            why = new.last_error or new.unfit or "it ended"
            return RequestError(f"the update failed: {what}", why=why, fix=serves, status=409, code="update_failed")
        broken = new.broken
        fix = f"{broken.fix.rstrip('.')}. {serves}" if broken.fix else serves
        return type(broken)(f"the update failed: {broken.what}", why=broken.why, fix=fix, **broken.fields)

    # -- from there on

    async def _move(self, version: Version, former: Member | None) -> list[str]:
        """Start the other engines anew, one after another; those that did not come up yet."""
        waiting = []
        others = [member for member in self._succession.members if member.version is not version]
        # One more is there than there are places, and the former one has no memory that another might need.
        leaving = former if former in others else others[0]
        for member in others:
            if member is leaving:
                continue
            member.version = version
            await self._lives.dismiss(member, f"it moves to {version}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.start_s):
                    await member.until(lambda member=member: member.role in UP_OR_NOT)  # type: ignore[misc]
            if member.role not in ("standby", "active"):
                waiting.append(member.name)
        await self._staff.retire(leaving)
        if self._staff.batch is not None:
            await self._staff.batch.move(version)
        return waiting

    async def _give_up(self, editions: set[str], *, keep_old: bool = False) -> tuple[list[str], dict[str, str]]:
        """Have the keeper evict editions of ours: what it did, and why it kept the rest."""
        evicted, kept = [], {}
        for edition in sorted(editions):
            why = "--keep-old" if keep_old else await self._editions.evict(edition)
            if why:
                kept[edition] = why
            else:
                evicted.append(edition)
        return evicted, kept


def _forget(task: asyncio.Task[Any]) -> None:
    """Nobody waits for it any more; its error is logged and in the status."""
    if not task.cancelled():
        task.exception()
