"""One accepted connection: look at a request, answer it, and only then take it off the socket.

A request stays in the kernel's queue until its answer is out. A keeper killed before that point leaves it to its
successor, which gets the very same socket from the fd store.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from fer.errors import FerError
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.weights import wire
from fer.weights.keeper.records import Peer

HELLO_S = 5.0
"""Seconds a new connection has to say hello."""
BLOCKED_S = 5.0
"""Seconds a peer has to make room for an answer."""


@dataclass
class Outgoing:
    """An answer on its way. ``body`` is the memfd of a long one; ``stop`` and ``close`` say what follows it."""

    frame: bytes
    request: str
    fds: Sequence[Fd] = ()
    body: Fd | None = None
    stop: bool = False
    close: bool = False


@dataclass(eq=False)
class Connection:
    """A socket and where its conversation stands.

    Attributes:
        id: its name on the shelf.
        pid, uid: of the process that connected; pid 0 where it is in another PID namespace.
        peer: what is remembered of it, once it said hello.
        deadline: monotonic seconds at which it is dropped, None for never.
        waiting: its request, as long as that waits.
        out: its answer, as long as that does not go out.
        refusal: why it gets no answer but this.
    """

    sock: socket.socket
    id: str
    pid: int
    uid: int
    deadline: float | None = None
    peer: Peer | None = None
    waiting: wire.Request | None = None
    out: Outgoing | None = None
    refusal: FerError | None = None
    dead: bool = field(default=False)

    @classmethod
    def over(cls, sock: socket.socket, name: str) -> Connection:
        """A connection over an accepted socket."""
        sock.setblocking(False)
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _ = struct.unpack("3i", raw)
        return cls(sock, name, pid, uid)

    def peek(self) -> tuple[bytes, list[Fd], bool]:
        """The waiting request: frame, its descriptors (ours from now on), and whether it was cut.

        Raises:
            BlockingIOError: there is none.
            OSError: the connection broke.
        """
        return fdpass.receive(self.sock, wire.FRAME_LIMIT, flags=socket.MSG_PEEK | socket.MSG_DONTWAIT)

    def consume(self) -> None:
        """Take the answered request off the socket; the kernel closes the descriptors in it."""
        self.sock.recv(1, socket.MSG_DONTWAIT)

    def send(self) -> None:
        """Send :attr:`out`.

        Raises:
            BlockingIOError: there is no room; it is still :attr:`out`.
            OSError, ValueError: the connection broke, or what it was to carry is gone.
        """
        assert self.out is not None
        fdpass.send(self.sock, self.out.frame, self.out.fds, flags=socket.MSG_DONTWAIT)

    def finish(self) -> Outgoing:
        """Forget the answer that went out."""
        assert self.out is not None
        out, self.out = self.out, None
        if out.body is not None:
            out.body.close()
        return out
