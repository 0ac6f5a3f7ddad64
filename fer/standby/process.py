"""One process that was started here: watched by its pidfd, heard through its control socket, ended for certain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fer.errors import FerError, LauncherError, ProtocolError, from_dict
from fer.memory.fd import Fd
from fer.standby import wire
from fer.standby.launcher_client import UNKNOWN, Child, NotForked, fork, spawn
from fer.weights.keeper.process import born

TAIL_BYTES = 8 << 10
"""Bytes of a process's last output that are kept for whoever asks why it died."""
CLOSED_S = 1.0
"""Seconds a process may live on that has closed its control socket: it does so by dying, and else is of no use."""
SAID_S = 0.002
"""Seconds in which a process's last words are read after the first sign of its end."""
TAIL_S = 0.05
"""Seconds the last output of an ended process may take to be read; longer only where others hold its pipe open."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """What to start.

    Attributes:
        forked: by a launcher, or not at all.
        name: what it is among those started with it, such as ``"rank 1"``; ``""`` where it is the only one.
        files: what it may leave behind, to be removed when it and all that were started with it have ended.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: Path = field(default_factory=Path.cwd)
    files: tuple[Path, ...] = ()
    name: str = ""
    forked: bool = False


Answer = wire.Promoted | wire.Unpromoted | wire.Parked
"""To an order."""

Spawn = Callable[[Command, tuple[int, int, int]], Child]
"""Starts a command in a session of its own, with these three descriptors as its stdio. Raises OSError or FerError."""


def through(launcher: str = "auto", runtime_dir: Path | None = None) -> Spawn:
    """Start commands by a launcher where one fits, else plainly; see :func:`fer.standby.launcher_client.spawn`."""

    def start(command: Command, stdio: tuple[int, int, int]) -> Child:
        place: dict[str, Any] = {"env": command.environment, "cwd": command.folder}
        place |= {"launcher": launcher, "runtime_dir": runtime_dir}
        if not command.forked:
            return spawn(command.arguments, stdin=stdio[0], stdout=stdio[1], stderr=stdio[2], **place)
        try:
            return fork(command.arguments, streams=stdio, **place)
        except NotForked as reason:
            raise LauncherError("no launcher forks it", why=str(reason), fix="Look at `fer launcher status`") from None

    return start


class Tail:
    """Passes a process's output on to our stderr, in a thread, and keeps its end.

    A thread, since whoever reads our stderr may be slow, and the event loop must not wait for that.
    """

    def __init__(self, fd: Fd) -> None:
        self._fd, self._kept = fd, b""
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="tail", daemon=True).start()

    def text(self) -> str:
        """The last lines."""
        return self._kept.decode("utf-8", "replace").strip()

    def _run(self) -> None:
        with self._fd:
            while piece := os.read(self._fd.fileno(), 1 << 16):
                self._kept = (self._kept + piece)[-TAIL_BYTES:]
                try:
                    os.write(2, piece)
                except OSError:
                    pass  # nobody reads our stderr any more; what is kept is still worth keeping
        try:
            self._loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            pass  # the loop has ended before the process's last child

    def _close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class Process:
    """A started process. Made by :meth:`start`.

    Attributes:
        how, why_so: whether a launcher forked it (``"launcher"``) or not (``"exec"``), and the reason.
        pid, born: which process, for people and for whoever must not take another for it; signals go by pidfd.
        started: when it was spawned, on the clock of :func:`time.monotonic_ns`, as all times here; ``begun``: when
            its interpreter ran, ``told``: when it was told how to start; 0 before.
        closed: when its control socket or its tie closed, which a death shows first; ``died``: when its end was seen.
            Between the two the kernel takes it apart, memory of a GPU above all. 0 before.
        obeys: done when it has heard how to start.
        ready: done when the process says so.
        closing: done when it has closed either of them; ``ended``: done when it has ended.
        broken: the error it ended with, where it could say one.
        orders: whether it takes orders.
        name: see :class:`Command`.
    """

    def __init__(
        self, child: Child, control: socket.socket, tail: Tail, started: int, stand: wire.Stand | None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.pid, self.how, self.why_so, self.started = child.pid, child.via, child.why, started
        self.born = born(self.pid)
        self.begun = self.told = self.closed = self.died = 0
        self.broken: FerError | None = None
        self.orders = False
        self.name = ""
        self._stand, self._hears = stand, False
        self._writer: asyncio.StreamWriter | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._asking = asyncio.Lock()
        self._status: asyncio.Future[int | None] | None = None
        self.obeys: asyncio.Future[None] = loop.create_future()
        self.ready: asyncio.Future[wire.Ready] = loop.create_future()
        self.closing: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self._child, self._control, self._tail, self._loop = child, control, tail, loop
        self._listener = loop.create_task(self._listen())
        self._alarm: int | None = child.alarm.fileno()
        loop.add_reader(child.pidfd.fileno(), self._see_end)
        loop.add_reader(child.alarm.fileno(), self._see_hang_up)

    @classmethod
    async def start(cls, command: Command, how: Spawn, stand: wire.Stand | None = wire.SERVE) -> Process:
        """Start a command. Raises OSError or FerError, as ``how`` does.

        Args:
            stand: what it is told at once, if it takes orders; None for a spare, which waits for :meth:`go`.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            read, write = (Fd(number) for number in os.pipe2(os.O_CLOEXEC))
            undo.callback(read.close)  # at once: whoever keeps the error keeps all that it passed
            with write:
                started = time.monotonic_ns()
                # In a thread: a launcher is another process, and may be slow to answer.
                stdio = (theirs.fileno(), write.fileno(), write.fileno())
                child = await asyncio.to_thread(how, command, stdio)
            undo.pop_all()
        return cls(child, ours, Tail(read), started, stand)

    @property
    def tail(self) -> str:
        """The last lines it wrote."""
        return self._tail.text()

    def go(self, stand: wire.Stand) -> None:
        """Tell one that was started as a spare how to start."""
        self._stand = stand
        self._tell_how()

    def _tell_how(self) -> None:
        """Once, as soon as it hears and it is known what to tell."""
        if self._hears and self._stand is not None and self._writer is not None:
            self._hears, self.told = False, time.monotonic_ns()
            self._writer.write(wire.line(self._stand))

    def signal(self, number: int) -> None:
        """Send a signal to exactly this process; nothing happens if it has ended."""
        if self.ended.done():
            return
        self._child.send_signal(number)

    async def ask(self, order: wire.Order) -> Answer | None:
        """Give an order; the answer, or None from a process that ended before it."""
        async with self._asking:  # answers do not say to which order they belong
            if self._writer is None or self.ended.done():
                return None
            self._answer = answer = self._loop.create_future()
            self._writer.write(wire.line(order))
            await asyncio.wait([answer, asyncio.shield(self.ended)], return_when=asyncio.FIRST_COMPLETED)
            return answer.result() if answer.done() else None

    async def status(self) -> int:
        """Its exit status, negative for a signal, after it has ended."""
        if self._status is None:
            # In a thread: of one that a launcher forked, the launcher is asked. Once, whoever wants to know.
            self._status = asyncio.ensure_future(asyncio.to_thread(self._child.poll))
        found = await asyncio.shield(self._status)
        return UNKNOWN if found is None else found

    async def heard(self) -> None:
        """After its end: until all that it said is read."""
        await asyncio.wait([self._listener], timeout=TAIL_S)

    async def why(self) -> str:
        """How it ended, in one line, after it has."""
        status = await self.status()
        await asyncio.wait([self._listener, self._tail.closed], timeout=TAIL_S)
        if self.broken is not None:
            return str(self.broken)
        if status < 0:
            return f"killed by {_signal_name(-status)}"
        lines = [line for line in self.tail.splitlines() if line.strip()]
        return f"exit status {status}" + (f": {lines[-1].strip()}" if lines else "")

    def stuck(self) -> str:
        """What the kernel says of a process that does not end: its state, and what it waits in."""
        folder = Path(f"/proc/{self.pid}")
        try:
            state = folder.joinpath("stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
            place = folder.joinpath("wchan").read_text("utf-8", "replace").strip("0\n")
        except (OSError, IndexError):
            return "its state cannot be read"
        names = {"D": "uninterruptible sleep", "R": "running", "S": "sleep", "T": "stopped", "t": "traced"}
        return f"{names.get(state, f'state {state}')}{f' in {place}' if place else ''}"

    async def close(self) -> None:
        """Let go of a process that has ended, or that nothing more is expected of. Twice is once."""
        if self._child.pidfd.closed:
            return
        self._loop.remove_reader(self._child.pidfd.fileno())
        self._deafen()
        if self.ended.done():
            await self.status()
            self._child.close()
        else:
            self._child.pidfd.close()  # Child.close would wait for a process that SIGKILL did not end
        self._listener.cancel()
        await asyncio.gather(self._listener, return_exceptions=True)
        if not self.ready.done():
            self.ready.cancel()

    def _see_hang_up(self) -> None:
        """Nobody has the other end of its tie any more."""
        self._deafen()
        self._loop.call_later(SAID_S, self._see_closing)

    def _deafen(self) -> None:
        if self._alarm is not None:
            self._loop.remove_reader(self._alarm)
            self._alarm = None

    def _see_closing(self) -> None:
        if not self.closing.done():
            self.closed = time.monotonic_ns()
            self.closing.set_result(None)
            if not self.ended.done():
                self._loop.call_later(CLOSED_S, self._hurry)

    def _hurry(self) -> None:
        if not self._child.pidfd.closed:
            self.signal(signal.SIGKILL)

    def _see_end(self) -> None:
        self.died = time.monotonic_ns()
        self._loop.remove_reader(self._child.pidfd.fileno())
        self.ended.set_result(None)

    async def _listen(self) -> None:
        """Hear what the process says, until it says nothing more."""
        reader, writer = await asyncio.open_connection(sock=self._control, limit=wire.LINE_LIMIT)
        self._writer = writer
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._hear(wire.control(line))
        except (ConnectionError, ValueError):  # closed in the middle of a line, or a line beyond all bounds
            pass
        except ProtocolError as error:
            self.broken = error
            self.signal(signal.SIGKILL)  # it is not what we took it for
        finally:
            writer.close()
            self._see_closing()

    def _hear(self, message: wire.Control) -> None:
        if isinstance(message, wire.Begun):
            self.begun, self.orders = message.at, message.orders
            self._hears = message.orders
            self._tell_how()
        elif isinstance(message, wire.Told):
            if not self.obeys.done():
                self.obeys.set_result(None)
        elif isinstance(message, wire.Broken):
            self.broken = from_dict(message.error)
        elif isinstance(message, wire.Promoted | wire.Unpromoted | wire.Parked):
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
        elif not self.ready.done():
            self.ready.set_result(message)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
