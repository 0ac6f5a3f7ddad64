"""Who keeps our descriptors when we are killed: systemd, a minder, or for the moment nobody.

A minder that dies is replaced: the keeper says that it is unprotected, starts another, and hands everything over once
that one is up. The keeper never waits for it to start.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fer.memory.fd import Fd
from fer.weights.keeper.notify import Notifier, from_environment
from fer.weights.keeper.process import environment
from fer.weights.keeper.shelf import Shelf

Watch = Callable[[int, Callable[[int], None]], None]
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 30.0


class Protection:
    """The keeper's side of its fd store.

    Attributes:
        kind: ``systemd``, ``minder`` or ``none``.
        retry_at: monotonic seconds at which :meth:`restore` is due, None for never.
    """

    def __init__(self, directory: Path, shelf: Shelf, note: Callable[[str, str], None]) -> None:
        self.kind = "none"
        self.retry_at: float | None = None
        self.watch: Watch = lambda fd, callback: None
        self.unwatch: Callable[[int], None] = lambda fd: None
        self._directory, self._shelf, self._note = directory, shelf, note
        self._systemd = False
        self._pidfd: Fd | None = None
        self._child = 0
        self._coming: socket.socket | None = None
        self._pause = _FIRST_PAUSE_S
        self._since = 0.0

    def under_systemd(self, sock: socket.socket) -> None:
        """The service manager keeps descriptors."""
        self._systemd = True
        self.kind, self._shelf.store = "systemd", Notifier(sock)

    def under_minder(self, sock: Fd, minder: Fd) -> None:
        """The minder that started us keeps them."""
        self._pidfd = minder
        self.kind, self._shelf.store = "minder", Notifier(socket.socket(fileno=sock.detach()))
        self._since = time.monotonic()

    def start(self, watch: Watch, unwatch: Callable[[int], None]) -> None:
        """Watch whoever keeps our descriptors; look for somebody where nobody does."""
        self.watch, self.unwatch = watch, unwatch
        if self._pidfd is not None:
            watch(self._pidfd.fileno(), self._died)
        elif not self._systemd:
            self.retry_at = time.monotonic()

    def lost(self, why: str) -> None:
        """The store does not take what it should, or has died."""
        if self.kind == "none":
            return
        self.kind = "none"
        if self._shelf.store is not None:
            self._shelf.store.close()
            self._shelf.store = None
        if self._pidfd is not None:
            try:  # a minder that hangs must not restart anything later with what it still has
                signal.pidfd_send_signal(self._pidfd.fileno(), signal.SIGKILL)
            except OSError:
                pass
        self._forget_minder()
        self._note("unprotected", f"{why}; a kill of the keeper would now lose the weights")
        lived = time.monotonic() - self._since
        self._pause = _FIRST_PAUSE_S if lived > 5 else min(self._pause * 2, _LONGEST_PAUSE_S)
        self.retry_at = time.monotonic() + (0 if lived > 5 and not self._systemd else self._pause)

    def restore(self) -> None:
        """Find a store again; to be called when ``retry_at`` has come."""
        self.retry_at = None
        try:
            if not self._systemd:
                self._start_minder()
            elif (sock := from_environment()) is not None:
                self._take_over(Notifier(sock), "systemd")
            else:
                self.retry_at = time.monotonic() + self._pause
        except OSError as error:
            self._note("unprotected", f"no minder could be started: {error.strerror or error}")
            self.retry_at = time.monotonic() + _LONGEST_PAUSE_S

    def close(self) -> None:
        """Let go; the store keeps what it has."""
        if self._shelf.store is not None:
            self._shelf.store.close()
        self._forget_minder()

    # --- minders ---

    def _start_minder(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with theirs, Fd(os.pidfd_open(os.getpid())) as me:
            # Numbers out of the way of 3 and 4, which dup2 is about to overwrite.
            high = [_above(fd.fileno(), 10) for fd in (theirs, me)]
            try:
                self._child = os.posix_spawn(
                    sys.executable,
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "fer.weights.keeper",
                        "--adopt",
                        "--runtime-dir",
                        str(self._directory),
                    ],
                    environment(),
                    file_actions=[(os.POSIX_SPAWN_DUP2, fd, 3 + place) for place, fd in enumerate(high)],
                    setsid=True,
                )
            finally:
                for fd in high:
                    os.close(fd)
        self._since = time.monotonic()
        self._pidfd = Fd(os.pidfd_open(self._child))
        self._coming = ours
        ours.setblocking(False)
        self.watch(self._pidfd.fileno(), self._died)
        self.watch(ours.fileno(), self._came)

    def _came(self, events: int) -> None:
        """The new minder says that it is up."""
        coming, self._coming = self._coming, None
        assert coming is not None
        self.unwatch(coming.fileno())
        self._take_over(Notifier(coming), "minder")

    def _take_over(self, store: Notifier, kind: str) -> None:
        self.kind = kind
        try:
            self._shelf.hand_over(store)
        except OSError as error:
            self.lost(f"the new store failed: {error.strerror or error}")
        else:
            self._note("protected", f"by {kind}")

    def _died(self, events: int) -> None:
        if self.kind == "minder":
            self.lost("the minder died")
            return
        self._forget_minder()  # it died before it came up
        self._pause = min(self._pause * 2, _LONGEST_PAUSE_S)
        self.retry_at = time.monotonic() + self._pause

    def _forget_minder(self) -> None:
        if self._coming is not None:
            self.unwatch(self._coming.fileno())
            self._coming.close()
            self._coming = None
        if self._pidfd is not None:
            self.unwatch(self._pidfd.fileno())
            self._pidfd.close()
            self._pidfd = None
        if self._child:
            try:
                os.waitpid(self._child, os.WNOHANG)
            except ChildProcessError:
                pass
            self._child = 0


def _above(fd: int, least: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, least)
