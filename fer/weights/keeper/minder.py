"""The keeper's minimal parent: an fd store like systemd's, for machines and containers without one.

It keeps the descriptors the keeper hands over, starts the keeper, and starts it again with them when it was killed.
Killed itself, it is replaced by the keeper (``--adopt``), which then hands everything over again. It knows nothing
of what the descriptors are.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.weights.keeper.notify import FIRST_INHERITED, Notifier, from_environment
from fer.weights.keeper.process import environment, raise_limits

DEATHS, DEATHS_S = 16, 10.0
"""So many deaths in so many seconds are followed by a start at once; after more there is a pause, longer each time."""
LONGEST_PAUSE_S = 5.0
STOP_S = 10.0
"""Seconds a keeper has to stop after SIGTERM."""


class Minder:
    """One keeper and its descriptors."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store: dict[str, Fd] = {}
        self._sock: socket.socket | None = None
        self._keeper: Fd | None = None  # pidfd
        self._child = 0
        self._ready = False
        self._stopping = False
        self._started = 0.0
        self._deaths: list[float] = []
        self._start_at: float | None = None
        self._kill_at: float | None = None
        self._signals, self._wakeup = socket.socketpair()

    def run(self) -> int:
        """Start a keeper and mind it until it stops; the exit code."""
        self._start()
        return self._loop()

    def adopt(self, sock: Fd, keeper: Fd) -> int:
        """Mind a keeper that runs already and has lost its minder; the exit code."""
        self._sock, self._keeper, self._ready = socket.socket(fileno=sock.detach()), keeper, True
        self._started = time.monotonic()
        self._sock.send(b"READY=1")
        return self._loop()

    # --- the loop ---

    def _loop(self) -> int:
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        code: int | None = None
        while code is None:
            code = self._turn()
        for fd in self.store.values():
            fd.close()
        return code

    def _turn(self) -> int | None:
        poll = select.poll()
        poll.register(self._signals.fileno(), select.POLLIN)
        for source in (self._sock, self._keeper):
            if source is not None:
                poll.register(source.fileno(), select.POLLIN)
        ready = {fd for fd, _ in poll.poll(self._timeout())}
        if self._signals.fileno() in ready:
            self._on_signals(self._signals.recv(64))
        if self._sock is not None and self._sock.fileno() in ready:
            self._listen()
        if self._keeper is not None and self._keeper.fileno() in ready:
            return self._on_death()
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at and self._keeper is not None:
            self._kill_at = None
            signal.pidfd_send_signal(self._keeper.fileno(), signal.SIGKILL)
        if self._start_at is not None and now >= self._start_at:
            self._start_at = None
            self._start()
        return 0 if self._keeper is None and self._stopping else None

    def _timeout(self) -> float | None:
        times = [at for at in (self._start_at, self._kill_at) if at is not None]
        return max(min(times) - time.monotonic(), 0) * 1000 if times else None

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if self._keeper is not None:  # SIGHUP restarts it in place, the others stop it
                signal.pidfd_send_signal(self._keeper.fileno(), number)
            if number != signal.SIGHUP:
                self._stopping, self._start_at = True, None
                self._kill_at = time.monotonic() + STOP_S

    def _on_death(self) -> int | None:
        self._listen()  # what it had sent before it died counts
        assert self._keeper is not None and self._sock is not None
        self._keeper.close()
        self._sock.close()
        self._keeper = self._sock = None
        code = self._reap()
        if self._stopping:
            return 0
        if not self._ready or "journal" not in self.store:
            return code or 1
        now = time.monotonic()
        lived = now - self._started
        self._deaths = [at for at in self._deaths if at > now - DEATHS_S] + [now]
        excess = len(self._deaths) - DEATHS
        pause = min(0.1 * 2**excess, LONGEST_PAUSE_S) if excess > 0 else 0.0
        _say(f"the keeper died after {lived:.1f} s; its {len(self.store)} descriptors are safe, it starts again")
        self._start_at = now + pause
        return None

    def _reap(self) -> int:
        """The exit code of our child, 1 for a signal or for a keeper that is no child of ours."""
        child, self._child = self._child, 0
        if not child:
            return 1
        _, status = os.waitpid(child, 0)
        return max(os.waitstatus_to_exitcode(status), 0) or (1 if os.WIFSIGNALED(status) else 0)

    # --- notifications ---

    def _listen(self) -> None:
        """Act upon everything the keeper has sent."""
        while self._sock is not None:
            try:
                payload, fds, _ = fdpass.receive(self._sock, 4096, flags=socket.MSG_DONTWAIT)
            except OSError:
                return
            if not payload:
                return
            fields = dict(line.split("=", 1) for line in payload.decode("utf-8", "replace").splitlines() if "=" in line)
            name = fields.get("FDNAME", "")
            if "FDSTORE" in fields and name and len(fds) == 1:
                if name in self.store:
                    self.store[name].close()
                self.store[name] = fds.pop()
            elif "FDSTOREREMOVE" in fields and name in self.store:
                self.store.pop(name).close()
            if "READY" in fields and not self._ready:
                self._ready = True
                self._tell("READY=1")
            self._stopping = self._stopping or "STOPPING" in fields
            fdpass.close_all(fds)  # of a barrier, this is the answer

    def _tell(self, text: str) -> None:
        """Pass on to the supervisor of this process, if it asked, what concerns it."""
        sock = from_environment()
        if sock is None:
            return
        try:
            Notifier(sock).send(text)
        except OSError:
            pass  # it asked and does not listen
        finally:
            sock.close()

    # --- starting ---

    def _start(self) -> None:
        """Start a keeper with all it left behind."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        me = Fd(os.pidfd_open(os.getpid()))
        names = ["notify", "minder", *self.store]
        numbers = [theirs.fileno(), me.fileno(), *(fd.fileno() for fd in self.store.values())]
        child = os.fork()
        if child == 0:
            _become_keeper(self.directory, names, numbers)
        theirs.close()
        me.close()
        self._child, self._keeper, self._sock = child, Fd(os.pidfd_open(child)), ours
        self._started = time.monotonic()


def _become_keeper(directory: Path, names: list[str], numbers: list[int]) -> None:
    """In the child: put the descriptors where a service manager would, and execute the keeper."""
    try:
        free = FIRST_INHERITED + len(numbers)
        # First out of the way of the places they go to, or one would overwrite another that still has to move.
        high = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, free) for number in numbers]
        for place, number in enumerate(high):
            os.dup2(number, FIRST_INHERITED + place, inheritable=True)
        listen = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(names)), "LISTEN_FDNAMES": ":".join(names)}
        command = [sys.executable, "-P", "-m", "fer.weights.keeper", "--serve", "--runtime-dir", str(directory)]
        os.execve(sys.executable, command, environment() | listen)
    except BaseException as error:
        _say(f"the keeper cannot be started: {error!r}")
    finally:
        os._exit(127)


def _say(text: str) -> None:
    try:
        print(f"fer-minder[{os.getpid()}] {text}", file=sys.stderr, flush=True)  # noqa: T201 - its log
    except OSError:
        pass  # nobody reads it


def mind(directory: Path) -> int:
    """Run a keeper under a minder; the exit code."""
    raise_limits()
    return Minder(directory).run()


def adopt(directory: Path) -> int:
    """Take over a keeper whose minder died: it passed its socket as 3 and itself (a pidfd) as 4."""
    raise_limits()
    sock, keeper = Fd(FIRST_INHERITED), Fd(FIRST_INHERITED + 1)
    for fd in (sock, keeper):
        os.set_inheritable(fd.fileno(), False)
    return Minder(directory).adopt(sock, keeper)
