"""The template's loop: who asks, whether a fork fits, the fork, and how each engine ended.

One thread, one poll, nothing that waits for a requester: a slow one is dropped, a slow child speaks to its requester
itself. ``serve`` returns in a child with the program to run, and in the template when it is to end or to be replaced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from fer import warm
from fer.errors import FerError
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.memory.seal import read_sealed
from fer.standby import inheritance
from fer.standby import launcher_fit as fit
from fer.standby import launcher_place as place
from fer.standby import launcher_wire as wire
from fer.standby.launcher_become import above, become, streams
from fer.standby.launcher_command import Program, Unfit, program_of
from fer.standby.launcher_environment import Reads
from fer.standby.launcher_files import Files
from fer.standby.launcher_program import prepare
from fer.standby.signalfd import SignalFd

log = logging.getLogger("fer.launcher")

ASK_S = 5.0
"""Seconds a new connection has to send its request."""
GO_S = 10.0
"""Seconds a requester has to take its child."""
LOOK_S = 30.0
"""Seconds between two looks at the files, beside those before each fork."""


@dataclass(frozen=True)
class Chosen:
    """In a child: what it is to run."""

    program: Program
    code: CodeType | None


@dataclass(frozen=True)
class Replace:
    """In the template: a fresh one is to take its place, with these variables changed (None: removed)."""

    why: str
    variables: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Fork:
    """A request whose parts were checked."""

    program: Program
    environment: dict[str, str]
    request: wire.Run
    fds: list[Fd]


class _No(Exception):
    """A request that gets no fork; says why."""


@dataclass
class Running:
    """An engine and the connection that its end is told on."""

    sock: socket.socket
    command: str
    since: float


class Server:
    """A template that is ready, or spoiled and says so.

    Args:
        lock: proves that this is the only launcher of its name.
        before: the environment before anything was imported. What imports set in it since, engines get as well.
        spoiled: why it cannot fork, ``""`` if it can.
        engines: those of the template before this one, in the same process.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        lock: Fd,
        *,
        before: Mapping[str, str],
        reads: Reads,
        imported: Sequence[str],
        spoiled: str,
        engines: dict[int, Running],
        generation: int,
        fresh_why: str,
    ) -> None:
        self.folder, self.name, self.lock, self.reads, self.spoiled = folder, name, lock, reads, spoiled
        self.engines, self.before = engines, dict(before)
        self._signals = SignalFd({signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        self._listener = place.listen(folder, name)
        self._files = Files(warm.files())
        warm.watch(self._files.changed)
        self._fixed = inheritance.fixed()
        self._waiting: dict[int, tuple[socket.socket, float]] = {}
        self._wanted: dict[str, str | None] = {}
        self._imported, self._generation, self._fresh_why = list(imported), generation, fresh_why
        self._since, self._forked, self._refused, self._last = time.time(), 0, 0, ""
        self._outcome: Chosen | Replace | None = None
        self._ends = False

    # --- the loop ---

    def serve(self) -> Chosen | Replace | None:
        """Serve until told to end (None), until a fresh template is needed, or until this is a child."""
        self._bury()  # what ended before its SIGCHLD could be read
        look_at = time.monotonic() + LOOK_S
        while True:
            poll = select.poll()
            for fd in (self._listener.fileno(), self._signals.fileno(), *self._waiting):
                poll.register(fd, select.POLLIN)
            until = min([look_at, *(deadline for _, deadline in self._waiting.values())])
            for fd, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1):
                self._ready(fd)
                if isinstance(self._outcome, Chosen):
                    return self._outcome
            self._drop_slow()
            if time.monotonic() >= look_at and self._outcome is None:
                look_at = time.monotonic() + LOOK_S
                self._outlook()
            if self._ends or self._outcome is not None:
                self._close()
                return self._outcome

    def _ready(self, fd: int) -> None:
        if fd == self._signals.fileno():
            for number, _ in self._signals.read():
                self._ends |= number != signal.SIGCHLD
            self._bury()
        elif fd == self._listener.fileno():
            self._accept()
        elif fd in self._waiting:
            sock, _ = self._waiting.pop(fd)
            self._serve_one(sock)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it has gone again
        sock.setblocking(False)
        _, uid = place.peer(sock)
        if uid != os.getuid():
            log.warning("refused user %d", uid)
            sock.close()
            return
        self._waiting[sock.fileno()] = (sock, time.monotonic() + ASK_S)

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, (_, deadline) in self._waiting.items() if deadline <= now]:
            self._waiting.pop(fd)[0].close()

    def _bury(self) -> None:
        for pid in list(self.engines):
            try:
                found, how = os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                found, how = pid, 0
            if found:
                engine = self.engines.pop(pid)
                status = os.waitstatus_to_exitcode(how)
                log.info("engine %d ended with %d", pid, status)
                self._answer(engine.sock, wire.Ended(status=status))
                engine.sock.close()

    def _outlook(self) -> None:
        changed = self._files.changed()
        if changed:
            self._outcome = Replace(f"{changed} changed")

    def _close(self) -> None:
        self._listener.close()
        place.remove(self.folder, self.name)
        for sock, _ in self._waiting.values():
            sock.close()
        self._signals.close()

    # --- one request ---

    def _serve_one(self, sock: socket.socket) -> None:
        fds: list[Fd] = []
        try:
            payload, fds, cut = fdpass.receive(sock, wire.LIMIT)
            if not payload or cut:
                sock.close()
                return
            request = wire.unpack_request(payload)
            if isinstance(request, wire.Run):
                self._run(sock, request, fds)
                return
            self._ends |= isinstance(request, wire.Stop)
            self._answer(sock, self.status())
        except (FerError, OSError) as error:
            log.warning("a request failed: %s", error)
            self._answer(sock, wire.Refused(why=str(error)))
        fdpass.close_all(fds)
        sock.close()

    def _run(self, sock: socket.socket, request: wire.Run, fds: list[Fd]) -> None:
        try:
            wanted = self._check(request, fds)
            self._fork(sock, wanted)
        except (_No, FerError, OSError) as error:
            self._refused += 1
            self._last = str(error)
            log.info("refused: %s", error)
            fdpass.close_all(fds)
            self._answer(sock, wire.Refused(why=str(error)))
            sock.close()

    def _check(self, request: wire.Run, fds: list[Fd]) -> _Fork:
        """Raises _No, ProtocolError: this request does not fit this template."""
        wire.expect(fds, 6 + len(request.numbers))
        if request.version != wire.VERSION:
            raise _No(f"the launcher speaks version {wire.VERSION}, this command {request.version}")
        if self.spoiled:
            raise _No(f"the template is spoiled: {self.spoiled}")
        strange = inheritance.differences(self._fixed, request.fixed)
        if strange:
            raise _No(f"the launcher has another {' and another '.join(strange)}")
        body = wire.unpack_body(read_sealed(fds[0], wire.BODY_LIMIT))
        environment = {os.fsdecode(name): os.fsdecode(value) for name, value in body.env.items()}
        argv = [os.fsdecode(word) for word in body.argv]
        try:
            program = program_of(argv, os.fsdecode(request.program), environment)
        except Unfit as error:
            raise _No(str(error)) from error
        self._agree(environment)
        changed = self._files.changed()
        if changed:
            self._outcome = Replace(f"{changed} changed")
            raise _No(f"the template is stale and being replaced: {changed} changed")
        self.spoiled = fit.faults()
        if self.spoiled:
            raise _No(f"the template is spoiled: {self.spoiled}")
        return _Fork(program, environment, request, fds)

    def _agree(self, environment: dict[str, str]) -> None:
        """Refuse other values of variables that imports have read; replaced when the same are wanted twice in a row."""
        read = self.reads.differences(self.before, environment)
        if not read:
            self._wanted = {}
            return
        wanted = {name: environment.get(name) for name in read}
        named = ", ".join(f"{name} (read by {by})" for name, by in list(read.items())[:3])
        more = f" and {len(read) - 3} more" if len(read) > 3 else ""
        why = f"the template was made with another value of {named}{more}"
        if wanted == self._wanted:
            self._outcome = Replace(why, wanted)
            raise _No(f"{why}; it is being replaced")
        self._wanted = wanted
        raise _No(why)

    def _fork(self, sock: socket.socket, wanted: _Fork) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            raise _No(f"the fork failed: {error.strerror}") from error
        if pid == 0:
            self._outcome = self._child(sock, wanted)
            return
        fdpass.close_all(wanted.fds)
        self._forked += 1
        command = " ".join(wanted.program.original)
        self.engines[pid] = Running(sock, command, time.time())
        log.info("engine %d: %s", pid, command)

    def _answer(self, sock: socket.socket, message: wire.Message) -> None:
        with contextlib.suppress(OSError):  # nobody wants to know, or takes it in time
            fdpass.send(sock, wire.pack(message), flags=socket.MSG_DONTWAIT)

    def status(self) -> wire.Status:
        """What this launcher is."""
        return wire.Status(
            name=self.name,
            pid=os.getpid(),
            state="spoiled" if self.spoiled else "ready",
            why=self.spoiled,
            since=self._since,
            imported=self._imported,
            warm=warm.folders(),
            modules=len(sys.modules),
            forked=self._forked,
            refused=self._refused,
            last_refusal=self._last,
            generation=self._generation,
            fresh_why=self._fresh_why,
            engines=[wire.Engine(pid=pid, command=e.command, since=e.since) for pid, e in self.engines.items()],
        )

    # --- in a child ---

    def _child(self, sock: socket.socket, wanted: _Fork) -> Chosen:
        """Become the engine, up to the moment at which its program begins."""
        try:
            self._leave()
            body, *rest = wanted.fds
            body.close()
            sock = socket.socket(fileno=above(Fd(sock.detach())).detach())
            folder, held, *rest = [above(rest[0]), above(rest[1]), *rest[2:]]
            streams(rest, wanted.request.numbers)
            become(
                wanted.program,
                wanted.request.handed,
                self._with_imports(wanted.environment),
                held=held,
                folder=folder,
                asker=wanted.request.pid,
            )
            chosen = Chosen(wanted.program, prepare(wanted.program))
            sock.settimeout(GO_S)
            with Fd(os.pidfd_open(os.getpid())) as me:
                fdpass.send(sock, wire.pack(wire.Ready(pid=os.getpid())), [me])
            if not wire.is_go(fdpass.receive(sock, wire.LIMIT)[0]):
                os._exit(1)
        except BaseException as error:
            self._answer(sock, wire.Failed(why=f"the forked child could not become it: {error}"))
            os._exit(1)
        sock.close()
        return chosen

    def _with_imports(self, environment: dict[str, str]) -> dict[str, str]:
        """A requester's environment as the imports would have left it: some set variables, such as places of caches."""
        now = dict(os.environ)
        set_ = {name: value for name, value in now.items() if self.before.get(name) != value}
        return {name: value for name, value in environment.items() if name in now or name not in self.before} | set_

    def _leave(self) -> None:
        """Close what is the template's."""
        self._listener.close()
        self._signals.close()
        self.lock.close()
        for sock in [*(sock for sock, _ in self._waiting.values()), *(e.sock for e in self.engines.values())]:
            sock.close()
        self._waiting.clear()
        self.engines.clear()
