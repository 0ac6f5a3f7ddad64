"""sd_notify and descriptors from the service manager, or from the minder, which speaks the same."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence

from fer.memory import fdpass
from fer.memory.fd import Fd

FIRST_INHERITED = 3
"""Number of the first descriptor the manager passes (SD_LISTEN_FDS_START)."""
BARRIER_S = 3.0
"""Seconds the manager has to catch up."""


def inherited() -> dict[str, Fd]:
    """Descriptors passed to this very process by name, taken out of the environment.

    Names are unique by the way the keeper makes them; a second descriptor of a name is closed.
    """
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit():
        return {}
    found: dict[str, Fd] = {}
    for place in range(int(count)):
        fd = Fd(FIRST_INHERITED + place)
        os.set_inheritable(fd.fileno(), False)
        name = names[place] if place < len(names) else ""
        if name in found or not name:
            fd.close()
        else:
            found[name] = fd
    return found


def from_environment() -> socket.socket | None:
    """A connected socket to the manager's ``NOTIFY_SOCKET``, None where there is none."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address[:1] not in ("/", "@"):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        sock.connect("\0" + address[1:] if address[0] == "@" else address)
    except OSError:
        sock.close()
        return None
    return sock


class Notifier:
    """Speaks to whoever keeps our descriptors.

    Every method raises OSError (TimeoutError) when the other side is gone or does not take messages any more.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(BARRIER_S)

    def send(self, text: str, fds: Sequence[Fd | int] = ()) -> None:
        """One notification."""
        fdpass.send(self.sock, text.encode(), fds)

    def store(self, name: str, fd: Fd | socket.socket) -> None:
        """Have a descriptor kept. FDPOLL=0: a connection at its end is kept as well, for the next keeper to see."""
        self.send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", [fd.fileno()])

    def remove(self, name: str) -> None:
        """Have a descriptor closed."""
        self.send(f"FDSTOREREMOVE=1\nFDNAME={name}")

    def barrier(self) -> None:
        """Wait until everything sent so far has been acted upon: the manager then closes the pipe it is given."""
        ours, theirs = (Fd(number) for number in os.pipe2(os.O_CLOEXEC))
        with ours:
            with theirs:
                self.send("BARRIER=1", [theirs])
            poll = select.poll()
            poll.register(ours.fileno(), 0)  # POLLHUP always counts
            if not poll.poll(BARRIER_S * 1000):
                raise TimeoutError("the service manager does not keep up")

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
