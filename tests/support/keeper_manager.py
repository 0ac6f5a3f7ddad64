"""A service manager with an fd store, as far as systemd's protocol goes: what the keeper meets under systemd."""

from __future__ import annotations

import os
import socket
import stat
import sys
import threading
from pathlib import Path

from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.weights.client import KeeperClient
from tests.support.keeper import wait_until
from tests.support.processes import WAIT_S, Children

TRAMPOLINE = """
import fcntl, os, sys
numbers = [int(n) for n in sys.argv[1].split(",") if n]
high = [fcntl.fcntl(n, fcntl.F_DUPFD_CLOEXEC, 500) for n in numbers]
for number in numbers:
    os.close(number)
for place, number in enumerate(high):
    os.dup2(number, 3 + place, inheritable=True)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(numbers)), "LISTEN_FDNAMES": sys.argv[2]}
os.execv(sys.argv[3], sys.argv[3:])
"""


class Manager:
    """Starts a keeper with NOTIFY_SOCKET and keeps what it stores; it never restarts anything by itself."""

    def __init__(self, children: Children, directory: Path) -> None:
        self.directory = directory
        self.store: dict[str, Fd] = {}
        self.lines: list[str] = []
        self._children = children
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = directory.with_name(directory.name + ".notify")
        self._sock.bind(str(self.address))
        self._thread = threading.Thread(target=self._pump, daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Start a keeper with everything in the store, and wait for READY=1."""
        self.lines.clear()
        numbers = [fd.fileno() for fd in self.store.values()]
        keeper = [sys.executable, "-P", "-m", "fer.weights.keeper", "--store", "systemd", "--runtime-dir"]
        arguments = [",".join(map(str, numbers)), ":".join(self.store), *keeper, str(self.directory)]
        self.process = self._children.python(
            TRAMPOLINE,
            *arguments,
            pass_fds=numbers,
            stdout=None,
            stderr=None,
            env={**os.environ, "NOTIFY_SOCKET": str(self.address)},
        )
        wait_until(lambda: "READY=1" in self.lines or self.process.poll() is not None, "READY=1")
        assert self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL the keeper."""
        self._children.kill(self.process)

    def client(self) -> KeeperClient:
        """A connection."""
        return KeeperClient.connect(self.directory, label="test", timeout=WAIT_S)

    def close(self) -> None:
        """Free the store, as a stopped unit does."""
        self._sock.shutdown(socket.SHUT_RD)
        self._thread.join(WAIT_S)
        self._sock.close()
        fdpass.close_all(list(self.store.values()))
        self.address.unlink()

    def _pump(self) -> None:
        while True:
            payload, fds, _ = fdpass.receive(self._sock, 4096)
            if not payload:
                return
            lines = payload.decode().splitlines()
            fields = dict(line.split("=", 1) for line in lines)
            if fields.get("FDSTORE") == "1":
                assert fields["FDPOLL"] == "0", "a connection at its end would be dropped by systemd"
                assert len(fds) == 1
                assert fields["FDNAME"] not in self.store, "systemd keeps both under one name"
                assert not any(same_file(fd, fds[0]) for fd in self.store.values()), "systemd would keep only one"
                self.store[fields["FDNAME"]] = fds.pop()
            elif fields.get("FDSTOREREMOVE") == "1" and fields["FDNAME"] in self.store:
                self.store.pop(fields["FDNAME"]).close()
            self.lines += lines
            fdpass.close_all(fds)


def same_file(one: Fd, other: Fd) -> bool:
    """As systemd decides it without kcmp()."""
    a, b = os.fstat(one.fileno()), os.fstat(other.fileno())
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino) and not stat.S_ISCHR(a.st_mode)
