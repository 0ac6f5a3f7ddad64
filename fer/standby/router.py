"""Between clients and workers: every request goes to the one active worker, and on to the next when that dies.

Decoding is greedy, so an answer that was cut off can be completed by another worker from the tokens that are there
already; the client sees a pause and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from fer.errors import ProtocolError, RequestError
from fer.memory import fdpass
from fer.standby import wire

log = logging.getLogger("fer.standby")

Resume = Literal["retry", "prefill", "fail"]
RESUMES: tuple[Resume, ...] = ("retry", "prefill", "fail")
NOTICE_S = 2.0
"""Seconds in which a worker that closed a connection has to be seen dead; then it is asked once more."""
RETRY_AFTER_S = 5


@dataclass(eq=False)
class Target:
    """A worker that answers, until it ends or rests: never to be taken for the next, nor for itself after that.

    Attributes:
        heard: when it last said anything, seconds of :func:`time.monotonic`.
        first: set when it has made a token for anybody.
        weights: what its model's files are: one with other weights does not complete its answers.
        dismissed: its end, or that it rests, was ordered, so that no request is to blame for what it breaks off.
        streams: requests it has now.
    """

    name: str
    path: Path
    heard: float = field(default_factory=time.monotonic)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    weights: str = ""
    dismissed: bool = False
    streams: int = 0

    @property
    def answered(self) -> bool:
        """Whether it has made a token for anybody."""
        return self.first.is_set()

    def anew(self) -> Target:
        """The same worker after a rest: answers that it broke off before then are not told of what it does next."""
        return Target(self.name, self.path, first=self.first, weights=self.weights)


@dataclass(frozen=True, kw_only=True)
class RouterLimits:
    """How much and how long.

    Attributes:
        requests: at once, those that wait among them.
        wait_s: seconds a request waits for an active worker.
        stall_s: seconds without any word of a worker that has work, after which it counts as hung.
        attempts: workers that may die under one request: more, and the request is what kills them.
        flag: what an operator sets ``requests`` by.
    """

    requests: int = 64
    wait_s: float = 60.0
    stall_s: float = 300.0
    attempts: int = 3
    flag: str = "--queue"


@dataclass(frozen=True)
class Anew:
    """The answer is begun again by an engine with other weights: forget what came of it. No client has seen any."""


Event = wire.Event | Anew


class WorkerGone(Exception):
    """The connection ended before the answer did. Never leaves this file."""


class Router:
    """Holds the active worker's address, and carries requests to it.

    Args:
        resume: what becomes of an answer that was begun when its worker dies. ``"retry"`` makes the tokens that are
            there once more, step by step, and then goes on; ``"prefill"`` reads them with the prompt, which is quicker
            for long answers, but rounds otherwise: with half-precision weights a near tie may then fall the other way.
            ``"fail"`` ends the answer with an error. One of which nothing was delivered is always begun again.
        stalled: called with a worker that counts as hung.

    Attributes:
        resumed: answers that another worker went on with; ``retried``: requests that one began again.
        differed: resumed answers whose tokens came out otherwise the second time, and were read instead.
        shown: answers under way of which a client has seen something: only engines with the same weights can go on
            with them.
    """

    def __init__(self, limits: RouterLimits, resume: Resume, stalled: Callable[[Target], None]) -> None:
        self.limits, self.resume = limits, resume
        self.active: Target | None = None
        self.in_flight = self.resumed = self.retried = self.differed = 0
        self.shown = 0
        self.on_token: Callable[[], None] | None = None
        self._stalled = stalled
        self._changed, self._less = asyncio.Event(), asyncio.Event()
        self._ending: Target | None = None
        self._closed = self._ended = ""
        self._idle = asyncio.Event()
        self._idle.set()

    # -- what the supervisor does

    def activate(self, target: Target | None, *, ending: Target | None = None) -> None:
        """From now on requests go there; None: they wait.

        Args:
            ending: a worker that answers nothing new, but goes on with what clients have seen of answers that are its
                own or its predecessor's.
        """
        self.active, self._ending = target, ending
        self._changed.set()
        self._changed = asyncio.Event()

    async def drained(self, target: Target, *, shown: bool) -> None:
        """Wait until a worker has no request; with ``shown``, nor any answer is left that a client has seen some of."""
        while target.streams or (shown and self.shown):
            await self._less.wait()

    def _fewer(self) -> None:
        self._less.set()
        self._less = asyncio.Event()

    async def change(self) -> None:
        """Wait until another worker is active, or none."""
        await self._changed.wait()

    def close(self, why: str) -> None:
        """Take no more requests. Those that are under way go on."""
        self._closed = why

    def end(self, why: str) -> None:
        """No engine follows the one that is active: what is still under way when that ends, or waits, is refused."""
        self._closed = self._ended = why
        self._changed.set()
        self._changed = asyncio.Event()

    async def idle(self, limit_s: float) -> bool:
        """Wait until no request is left; whether that came about."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return not self.in_flight

    # -- what the front does

    async def answer(self, request: wire.Generate, *, shown: bool = True) -> AsyncGenerator[Event, None]:
        """The events of one request, whatever becomes of its workers: Began, Pieces, Ended.

        Closing the iterator ends the generation.

        Args:
            shown: the client sees pieces as they come. If not, and the next engine has other weights, the answer is
                begun again there, which :class:`Anew` says.

        Raises:
            RequestError: the request is refused, there is no room, no worker came in time, or an answer was cut off.
        """
        if self._closed:
            raise _unavailable(self._closed)
        if self.in_flight >= self.limits.requests:
            raise RequestError(
                f"{self.in_flight} requests are under way, which is the most",
                fix=f"Try again later, or raise {self.limits.flag}",
                status=429,
                code="queue_full",
                retry_after=1,
            )
        self.in_flight += 1
        self._idle.clear()
        under_way = _Answer(request, shown)
        try:
            async with contextlib.aclosing(self._through_deaths(under_way)) as events:
                async for event in events:
                    yield event
        finally:
            self.shown -= under_way.seen
            self.in_flight -= 1
            self._fewer()
            if not self.in_flight:
                self._idle.set()

    async def _through_deaths(self, answer: _Answer) -> AsyncGenerator[Event, None]:
        deaths = 0
        while True:
            target = await self._target(answer)
            if answer.known and answer.weights != target.weights:
                answer.begin_anew()  # raises where a client has seen tokens of the other model
                yield Anew()
            answer.weights = target.weights
            try:
                async with contextlib.aclosing(self._ask(target, answer.asked(self.resume))) as events:
                    async for event in events:
                        if isinstance(event, wire.Failed):
                            raise _failed(event)
                        if isinstance(event, wire.Began):
                            if answer.begun:
                                continue
                            answer.begun = True
                        elif isinstance(event, wire.Differed):
                            self.differed += 1
                            log.warning("an answer came out otherwise at token %d when it was resumed", event.place)
                            continue
                        elif isinstance(event, wire.Piece):
                            self.shown += answer.take(event)
                        yield event
                        if isinstance(event, wire.Ended):
                            return
            except WorkerGone:
                if self._ended:
                    raise _unavailable(self._ended) from None
                if not target.dismissed:
                    deaths += 1
                    self._give_up(bool(answer.known), deaths)
                self.resumed += bool(answer.known)
                self.retried += not answer.known
                await self._notice(target)

    def _give_up(self, delivered: bool, deaths: int) -> None:
        if deaths >= self.limits.attempts:
            raise RequestError(
                f"the engine died {deaths} times under this request",
                fix="See what it died of in /status; the request is not tried again",
                status=502,
                code="engine_died",
            )
        if delivered and self.resume == "fail":
            raise RequestError("the engine died in the middle of this answer", status=502, code="engine_died")

    async def _target(self, answer: _Answer) -> Target:
        deadline = time.monotonic() + self.limits.wait_s
        while self.active is None:
            if self._ended:
                raise _unavailable(self._ended)
            if self._ending is not None and answer.seen and answer.weights == self._ending.weights:
                return self._ending
            left = deadline - time.monotonic()
            if left <= 0:
                raise _unavailable(f"no engine became active in {self.limits.wait_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return self.active

    async def _notice(self, gone: Target) -> None:
        """Wait until the supervisor has seen that this worker is dead. It has the pidfd; we saw a socket close."""
        if gone in (self.active, self._ending):
            try:
                await asyncio.wait_for(self._changed.wait(), NOTICE_S)
            except TimeoutError:
                log.warning("%s lives, and broke off an answer; it is asked again", gone.name)

    async def _ask(self, target: Target, request: wire.Generate) -> AsyncGenerator[wire.Event, None]:
        """One request to one worker. Raises WorkerGone where the connection ends before the answer."""
        try:
            reader, writer = await _connect(target.path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # ours, and no fault of the engine's
                raise _unavailable("this service has no descriptor left to ask the engine with") from error
            raise WorkerGone from error
        target.streams += 1
        try:
            writer.write(wire.line(request))
            await writer.drain()
            while True:
                event = await self._next(target, reader)
                yield event
                if isinstance(event, wire.Ended | wire.Failed):
                    return
        except (OSError, ProtocolError) as error:
            raise WorkerGone from error
        finally:
            target.streams -= 1
            self._fewer()
            writer.close()

    async def _next(self, target: Target, reader: asyncio.StreamReader) -> wire.Event:
        line, begun = asyncio.ensure_future(reader.readline()), time.monotonic()

        def patience() -> float:
            # Others may be served meanwhile: a worker is hung when it says nothing to anybody. And not before we have
            # listened for so long ourselves: a slow client holds us up, and what was said meanwhile is yet unread.
            return max(target.heard, begun) + self.limits.stall_s - time.monotonic()

        try:
            while not (await asyncio.wait([line], timeout=max(0.0, patience())))[0]:
                if patience() <= 0:
                    self._stalled(target)
                    raise WorkerGone
            data = line.result()
        finally:
            line.cancel()
        if not data.endswith(b"\n"):
            raise WorkerGone
        target.heard = time.monotonic()
        event = wire.event(data)
        if isinstance(event, wire.Piece):
            target.first.set()
        if self.on_token is not None and isinstance(event, wire.Piece):
            told, self.on_token = self.on_token, None
            told()
        return event


@dataclass
class _Answer:
    """What is known of one answer.

    Attributes:
        known: its tokens; ``weights`` those of the engine that made them.
        begun: its first word was passed on; ``seen``: a client has had some of it.
    """

    request: wire.Generate
    shown: bool
    known: list[int] = field(default_factory=list)
    weights: str = ""
    begun: bool = False
    seen: bool = False

    def asked(self, resume: Resume) -> wire.Generate:
        """The request for the next engine: known tokens are part of it; an answer without any is simply begun again."""
        replay = resume == "retry" and bool(self.known)
        return msgspec.structs.replace(self.request, known=[*self.known], replay=replay)

    def take(self, piece: wire.Piece) -> bool:
        """Note a piece; whether it is the first that a client sees."""
        self.known += piece.ids
        first = self.shown and not self.seen
        self.seen = self.seen or self.shown
        return first

    def begin_anew(self) -> None:
        """Forget what is known. Raises RequestError where a client has seen it."""
        if self.seen:
            raise RequestError(
                "the model was updated in the middle of this answer",
                why="its files are not those that this answer began with, by their times if not by their content, "
                "and no answer goes on with another model's words",
                fix="Ask again",
                status=502,
                code="model_updated",
            )
        self.known.clear()
        self.begun = False


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        fdpass.connect(sock, path)  # a Unix socket connects at once or not at all
        return await asyncio.open_unix_connection(sock=sock, limit=wire.LINE_LIMIT)
    except BaseException:
        sock.close()
        raise


def _unavailable(why: str) -> RequestError:
    fix = "Try again later; /status says what became of the engine"
    return RequestError(
        "no engine can answer now", why=why, fix=fix, status=503, code="engine_unavailable", retry_after=RETRY_AFTER_S
    )


def _failed(event: wire.Failed) -> RequestError:
    return RequestError(event.message, status=event.status, param=event.param, code=event.code)
