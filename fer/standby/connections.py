"""Connections of clients: how many may be open, how long one may say nothing, and the server that sees to both.

An asyncio server that runs out of descriptors logs a traceback for every try and tries on, while nothing else of the
process can open anything either, engines' pipes and sockets first. So a connection is refused long before: what is
left is kept for engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from fer.errors import RequestError
from fer.standby import openai
from fer.standby.launcher_client import Child
from fer.standby.process import Command, Spawn
from fer.standby.router import RETRY_AFTER_S

log = logging.getLogger("fer.standby")

BACKLOG = 128
"""Connections that the kernel keeps for us until we take them."""
AT_ONCE = 4
"""Connections taken in one turn of the event loop. Those of about five turns are open before the first of them can be
refused, so this times five has to be far less than :data:`RESERVE`."""
IDLE_S = 30.0
"""Seconds a connection may have no request: none yet, none after the last answer, or a head that is not complete."""
RESERVE = 64
"""Descriptors that no client gets: our own, the keeper's and the launcher's, and connections about to be refused."""
EACH_PROCESS = 8
"""Descriptors that a process of an engine may take here: control socket, output, pidfd, tie, what its start needs."""
EACH_CONNECTION = 2
"""Its own, and that of its request at the engine."""
MOST = 16384
"""Connections at once, whatever the limit is: each takes memory too."""
OPERATORS = 16
"""Connections at once at the admin socket. They are apart, so that clients cannot keep the operator out."""
SAY_S = 60.0
"""Seconds between two log lines about refused connections."""


@contextlib.contextmanager
def raised_limit() -> Iterator[int]:
    """Inside the block this process may have as many files open as its user may; yields the soft limit before.

    The soft limit is 1024 as a rule, for the sake of programs that use select(), which this one does not: to take
    fewer clients than the system grants would be to no end.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a hard limit above what the kernel now allows
        log.warning("the limit of open files stays at %d: %s", soft, error)
    try:
        yield soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def lowered(spawn: Spawn, soft: int) -> Spawn:
    """Start engines with the soft limit of open files that the service was started with: they may use select()."""

    def start(command: Command, stdio: tuple[int, int, int]) -> Child:
        child = spawn(command, stdio)
        # Afterwards, since an engine may be forked by a launcher: its interpreter begins or it waits for our word then.
        try:
            _, hard = resource.prlimit(child.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (soft, hard))
        except ProcessLookupError:
            pass  # it has died already, as its pidfd will say
        except (OSError, ValueError) as error:
            log.warning("process %d keeps our limit of open files instead of %d: %s", child.pid, soft, error)
        return child

    return start


class Bound:
    """How many connections may be open.

    Attributes:
        most, open: as many may be, and as many are.
        refused: those that were one too many, ever.
    """

    def __init__(self, most: int) -> None:
        self.most, self.open, self.refused = most, 0, 0
        self._unsaid, self._said = 0, -math.inf

    @classmethod
    def of_limit(cls, processes: int) -> Bound:
        """What this process's limit of open files allows, beside so many processes of engines."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return cls(MOST)
        # Where the limit is tiny a few clients are served all the same.
        left = max(limit - RESERVE - EACH_PROCESS * processes, limit // 4)
        return cls(max(1, min(MOST, left // EACH_CONNECTION)))

    def take(self) -> bool:
        """Whether one more may be open; then it counts until :meth:`release`."""
        if self.open < self.most:
            self.open += 1
            return True
        self.refused += 1
        self._unsaid += 1
        if (now := time.monotonic()) - self._said >= SAY_S:
            log.warning("%d connections are open, as many as may be: %d refused", self.open, self._unsaid)
            self._said, self._unsaid = now, 0
        return False

    def release(self) -> None:
        """One has been closed."""
        self.open -= 1

    def status(self) -> dict[str, int]:
        """For whoever asks."""
        return {"open": self.open, "most": self.most, "refused": self.refused}


class Connection(H11Protocol):
    """A client's connection, refused where it is one too many, and closed when it has had no request for a while.

    Uvicorn's own limits do not do: ``limit_concurrency`` is looked at when a request is complete, and the time of
    ``timeout_keep_alive`` begins with the first answer and ends with the first byte of a head.

    Args:
        idle_s: see :data:`IDLE_S`. No answer under way is ever cut by it.
    """

    def __init__(self, *given: Any, bound: Bound, idle_s: float, **more: Any) -> None:
        super().__init__(*given, **more)
        self._bound, self._idle_s = bound, idle_s
        self._counted = False
        self._idle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, or refuse it at once: it holds a descriptor."""
        self._counted = self._bound.take()
        if not self._counted:
            transport.write(_refusal())
            transport.close()
            return
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It no longer counts."""
        if not self._counted:
            return  # uvicorn never knew it
        self._bound.release()
        self._unwatch()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """A request may have begun."""
        super().handle_events()
        self._watch()

    def on_response_complete(self) -> None:
        """A request has ended, and the next one may have begun."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Measure the time without a request; bytes of an incomplete head do not begin it anew."""
        if (self.cycle is not None and not self.cycle.response_complete) or self.transport.is_closing():
            self._unwatch()
        elif self._idle is None:
            self._idle = self.loop.call_later(self._idle_s, self._close)

    def _unwatch(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _close(self) -> None:
        self._idle = None
        self.transport.close()  # what is still to be sent of the last answer is


@functools.cache
def _refusal() -> bytes:
    error = RequestError(
        "too many connections are open", fix="Try again later, and close those that are not needed", status=503
    )
    body = json.dumps(openai.failure(error)).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"retry-after: {RETRY_AFTER_S}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


class Server(uvicorn.Server):
    """Uvicorn in a loop that is ours: signals are not its business, and nothing is to be looked for all the time."""

    def __init__(self, app: Starlette, bound: Bound, idle_s: float) -> None:
        protocol = functools.partial(Connection, bound=bound, idle_s=idle_s)
        config = uvicorn.Config(
            app,
            http=cast(type[asyncio.Protocol], protocol),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=math.ceil(idle_s),
            timeout_graceful_shutdown=1,  # answers had their time before
            backlog=AT_ONCE,  # asyncio accepts as many in a turn as it lets the kernel keep
        )
        super().__init__(config)
        self.begun, self.ending = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it; then the kernel is told to keep more than is taken in a turn."""
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)

    async def main_loop(self) -> None:
        """Wait for the end."""
        self.begun.set()
        await self.ending.wait()


@contextlib.asynccontextmanager
async def serving(*served: tuple[Server, socket.socket]) -> AsyncIterator[None]:
    """Let servers take requests at their listening sockets inside the block."""
    tasks = [asyncio.create_task(server.serve(sockets=[sock])) for server, sock in served]
    try:
        for (server, _), task in zip(served, tasks, strict=True):
            begun = asyncio.create_task(server.begun.wait())
            await asyncio.wait((begun, task), return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            if task.done():
                task.result()
        yield
    finally:
        for server, _ in served:
            server.ending.set()
        await asyncio.gather(*tasks)
