"""The worker's side of its private socket: a connection a request, events as the engine makes them."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path

from fer.errors import RequestError
from fer.memory import fdpass
from fer.standby import wire
from fer.standby.model import Model, job_of
from fer.standby.scheduler import Job, Scheduler

log = logging.getLogger("fer.standby")

BACKLOG = 1024
REQUEST_S = 30.0
"""Seconds the front has to send its one line."""


def listen(path: Path) -> socket.socket:
    """Listen at ``path``, in a directory that is private. Whatever lay there was a predecessor's."""
    path.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        fdpass.bind(sock, path)
        path.chmod(0o600)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class Answers:
    """Serves requests in the event loop of one thread, while the engine runs in another.

    Args:
        model: what is served.
        open: answer from the beginning, and not only after :meth:`admit`.
    """

    def __init__(self, model: Model, *, open: bool = True) -> None:
        self._admitted = open
        self.scheduler = Scheduler(model.rows, model.ends, self._deliver)
        self._model = model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[Job, tuple[asyncio.StreamWriter, asyncio.Event]] = {}

    def admit(self) -> None:
        """Answer from now on. From any thread."""
        self._admitted = True

    def shut(self) -> None:
        """Answer nobody from now on, and break off what is under way: the front asks another. From any thread."""
        self._admitted = False
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._break_off)

    def _break_off(self) -> None:
        for writer, last in self._open.values():
            writer.transport.abort()
            last.set()

    def run(self, sock: socket.socket) -> None:
        """Serve for ever: the thread's whole work."""
        asyncio.run(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_unix_server(self._answer, sock=sock, limit=wire.LINE_LIMIT)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if _is_ours(writer) and self._admitted:
                await self._generate(reader, writer)
        except (ConnectionError, TimeoutError):
            pass  # the front has gone, and with it whoever would read this
        finally:
            writer.close()

    async def _generate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await asyncio.wait_for(reader.readline(), REQUEST_S)
        if not line:
            return
        try:
            request = wire.request(line)
            # In a thread: a long prompt takes its time, and running answers are written from this loop.
            job = await asyncio.to_thread(job_of, self._model, request)
        except RequestError as error:
            fields = error.fields
            failed = wire.Failed(fields["status"], str(error), fields.get("param"), fields.get("code"))
            writer.write(wire.line(failed))
            return
        except Exception as error:  # a template is the model's own program, and may raise anything
            log.exception("a request could not be prepared")
            writer.write(wire.line(wire.Failed(500, f"the request could not be prepared: {error}")))
            return
        writer.write(wire.line(wire.Began(len(job.prompt) - (0 if request.replay else len(request.known)))))
        # An earlier worker died between its last token and its last word.
        if job.text.stopped or len(request.known) >= job.limit:
            writer.write(wire.line(wire.Ended("stop" if job.text.stopped else "length")))
            return
        await self._follow(job, reader, writer)
        await writer.drain()

    async def _follow(self, job: Job, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until the job's last event, or until the front closes its side."""
        if not self._admitted:  # since we looked
            return
        last = asyncio.Event()
        self._open[job] = (writer, last)
        self.scheduler.submit(job)
        done, gone = asyncio.ensure_future(last.wait()), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            job.cancelled = True
            del self._open[job]
            for task in (done, gone):
                task.cancel()
            await asyncio.gather(done, gone, return_exceptions=True)

    def _deliver(self, events: list[tuple[Job, list[wire.Event]]]) -> None:
        assert self._loop is not None, "jobs come from the loop"
        self._loop.call_soon_threadsafe(self._write, events)

    def _write(self, events: list[tuple[Job, list[wire.Event]]]) -> None:
        for job, made in events:
            writer, last = self._open.get(job, (None, None))
            if writer is None or last is None:
                continue  # cancelled while the step was under way
            # No waiting for a slow reader: an answer is bounded by the context, and so is what collects here.
            writer.write(b"".join(wire.line(event) for event in made))
            if isinstance(made[-1], wire.Ended | wire.Failed):
                last.set()


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether the other side is this user's. The directory is private; this is the second lock on the same door."""
    sock: socket.socket = writer.get_extra_info("socket")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return bool(uid == os.getuid())
