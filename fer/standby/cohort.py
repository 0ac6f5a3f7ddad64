"""The other ranks of an engine, as its rank 0 sees them: gathered at the start, told what to do, watched for their end.

All waits are bounded here, since a rank that stands still says nothing and keeps its socket open.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fer.errors import PeerRankFailed, PeerRefused, ProtocolError
from fer.memory import fdpass
from fer.standby import rank_wire
from fer.standby.answers import listen
from fer.standby.wire import LINE_LIMIT
from fer.weights.keeper.pidfds import started
from fer.weights.services import this_process
from fer.weights.wire import Process

GATHER_S = 120.0
"""Seconds from the start of one rank until every other one has started too."""
ANSWER_S = 5.0
"""Seconds that an idle rank has to say that it is there."""
WORK_S = 120.0
"""Seconds that a rank has for its memory, or all together for their first token: captures are among that."""
NOTICE_S = 0.5
"""Seconds after the end of a rank in which the supervisor, who can say what it died of, ends the others."""
_AGAIN_S = 0.005
"""Seconds between attempts of a rank to reach rank 0, which may not listen yet."""


def meeting_place(path: Path) -> Path:
    """Where rank 0 of the engine that answers at ``path`` listens for the others."""
    return path.with_name(f"{path.name}.ranks")


def store(path: Path) -> Path:
    """The file in which the ranks of the engine that answers at ``path`` form their process group.

    Like the path it is of one start: keys that an earlier one left would let some ranks go on and others wait.
    """
    return path.with_name(f"{path.name}.store")


@dataclass(frozen=True)
class _Peer:
    rank: int
    process: Process
    link: Link


class Link:
    """One side of the connection between two ranks: lines out, lines in."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self._begun = sock, bytearray()

    def send(self, message: rank_wire.Order | rank_wire.Answer) -> None:
        """Raises OSError: the other side has gone."""
        self.sock.settimeout(None)
        self.sock.sendall(rank_wire.line(message))

    def receive(self, limit_s: float | None = None) -> bytes:
        """The next line, ``b""`` where the other side has gone. Raises TimeoutError, OSError, ProtocolError."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while (end := self._begun.find(b"\n")) < 0:
            if len(self._begun) > LINE_LIMIT:
                raise ProtocolError("a line between ranks does not end", why=f"it has more than {LINE_LIMIT} bytes")
            self.sock.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            try:
                piece = self.sock.recv(1 << 16)
            except ConnectionResetError:  # it ended before it read our last word
                piece = b""
            if not piece:
                return b""
            self._begun += piece
        line = bytes(self._begun[: end + 1])
        del self._begun[: end + 1]
        return line


def join(path: Path, rank: int, world: int) -> Link:
    """Reach rank 0 from another rank.

    Raises:
        PeerRankFailed: rank 0 did not listen within :data:`GATHER_S`.
        PeerRefused: another user listens there.
    """
    deadline = time.monotonic() + GATHER_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            fdpass.connect(sock, path)
            _check(sock)
            link = Link(sock)
            link.send(rank_wire.Hello(rank, world))
            return link
        except (FileNotFoundError, ConnectionError) as error:
            sock.close()
            if time.monotonic() >= deadline:
                raise PeerRankFailed(
                    "rank 0 cannot be reached", why=f"{path}: {error}", fix="See its log; it may not have started"
                ) from error
            time.sleep(_AGAIN_S)
        except BaseException:
            sock.close()
            raise


class Cohort:
    """All ranks of an engine, in the process of rank 0. To be used from its main thread.

    Args:
        path: where the others come to.
        world: ranks, this one included.
    """

    def __init__(self, path: Path, world: int) -> None:
        self._path, self._world = path, world
        self._peers: list[_Peer] = []

    @property
    def processes(self) -> list[Process]:
        """Every process that serves, this one first."""
        return [this_process(), *(peer.process for peer in self._peers)]

    def gather(self) -> None:
        """Wait until every other rank has come; from then on the end of one of them ends this process.

        Raises:
            PeerRankFailed: one did not come within :data:`GATHER_S`.
            PeerRefused, ProtocolError: something else came.
        """
        found: dict[int, _Peer] = {}
        deadline = time.monotonic() + GATHER_S
        with contextlib.closing(listen(self._path)) as sock:
            while len(found) < self._world - 1:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    connection, _ = sock.accept()
                    peer = self._greet(connection, max(deadline - time.monotonic(), 0.001))
                except TimeoutError as error:
                    missing = sorted({*range(1, self._world)} - {*found})
                    raise PeerRankFailed(
                        f"ranks {', '.join(map(str, missing))} have not come",
                        why=f"{GATHER_S:g} s have passed",
                        fix="See their log",
                    ) from error
                if peer.rank in found:
                    raise ProtocolError(f"rank {peer.rank} has come twice", why=f"process {peer.process.pid} is new")
                found[peer.rank] = peer
        self._path.unlink(missing_ok=True)
        self._peers = [found[rank] for rank in sorted(found)]
        watch([peer.link for peer in self._peers], [f"rank {p.rank}, process {p.process.pid}" for p in self._peers])

    def _greet(self, connection: socket.socket, limit_s: float) -> _Peer:
        pid = _check(connection)
        link = Link(connection)
        hello = rank_wire.answer(link.receive(limit_s))
        if not isinstance(hello, rank_wire.Hello) or hello.world != self._world or hello.rank >= self._world:
            raise ProtocolError("a rank of another engine has come", why=repr(hello))
        return _Peer(hello.rank, Process(pid, started(pid)), link)

    def tell(self, order: rank_wire.Order) -> None:
        """Send an order to every other rank. Raises PeerRankFailed: one has gone."""
        for peer in self._peers:
            try:
                peer.link.send(order)
            except OSError as error:
                raise _failed(peer, "has ended", str(error)) from error

    def hear(self, limit_s: float) -> list[tuple[int, rank_wire.Answer]]:
        """One answer of every other rank, with the rank. Raises PeerRankFailed: one has gone, or takes too long."""
        deadline = time.monotonic() + limit_s
        return [(peer.rank, self._hear(peer, max(deadline - time.monotonic(), 0.001), limit_s)) for peer in self._peers]

    def _hear(self, peer: _Peer, left_s: float, limit_s: float) -> rank_wire.Answer:
        try:
            line = peer.link.receive(left_s)
        except TimeoutError as error:
            raise _failed(peer, "does not answer", f"{limit_s:g} s have passed") from error
        except OSError as error:
            raise _failed(peer, "has ended", str(error)) from error
        if not line:
            raise _failed(peer, "has ended", "its connection is closed")
        return rank_wire.answer(line)


def watch(links: Sequence[Link], names: Sequence[str]) -> None:
    """End this process when one of these connections does: without each of its ranks an engine is of no use.

    The rest of this process may be waiting for the one that has gone, in a collective that no signal interrupts.
    """
    fds = [os.dup(link.sock.fileno()) for link in links]  # a number that is closed meanwhile may be another's
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLRDHUP)

    def wait() -> NoReturn:
        ended = {fd for fd, _ in poll.poll()}
        time.sleep(NOTICE_S)
        gone = ", ".join(name for fd, name in zip(fds, names, strict=True) if fd in ended)
        give_up(f"{gone} has ended, and this rank ends with it")

    threading.Thread(target=wait, name="ranks", daemon=True).start()


@contextlib.contextmanager
def bounded(limit_s: float, what: str) -> Iterator[None]:
    """End this process where the block, which may wait in a collective, takes too long: nothing else would."""
    timer = threading.Timer(limit_s, give_up, (f"{what} took more than {limit_s:g} s; another rank may stand still",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def give_up(why: str) -> NoReturn:
    """End this rank, and so the engine."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"fer: {why}\n")
        sys.stderr.flush()
    os._exit(1)


def _failed(peer: _Peer, what: str, why: str) -> PeerRankFailed:
    return PeerRankFailed(
        f"rank {peer.rank}, process {peer.process.pid}, {what}",
        why=why,
        fix="See its log; the ranks are started again together",
        rank=peer.rank,
    )


def _check(sock: socket.socket) -> int:
    """The pid of the other side, which must be this user's. Raises PeerRefused."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid != os.getuid():
        raise PeerRefused(f"process {pid} is no rank of this engine", why=f"it is user {uid}'s")
    return int(pid)
