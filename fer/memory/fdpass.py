"""Descriptors over unix sockets: one message in, one message out, nothing leaked.

Works on connected ``SOCK_SEQPACKET`` sockets, where a message arrives whole or not at all. The keeper uses this file:
standard library only.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fer.errors import OptionError, ProtocolError
from fer.memory.fd import Fd

MAX_FDS = 253
"""Descriptors in one message (``SCM_MAX_FD`` of Linux); callers with more send several messages."""

_LONGEST_PATH = 107
"""Bytes of ``sun_path`` without its closing zero."""


def send(sock: socket.socket, payload: bytes, fds: Sequence[Fd | int] = (), *, flags: int = 0) -> None:
    """Send one message with its descriptors; the caller keeps owning them.

    Raises:
        ValueError: the payload is empty (a receiver could not tell it from the end of the connection), or there are
            more than ``MAX_FDS`` descriptors.
        ProtocolError: the message did not go out whole.
        OSError: as ``sendmsg``; ``BlockingIOError`` where ``flags`` or the socket forbid waiting.
    """
    if not payload:
        raise ValueError("an empty message reads as end of file on the other side")
    if len(fds) > MAX_FDS:
        raise ValueError(f"{len(fds)} descriptors in one message; at most {MAX_FDS} fit")
    numbers = array.array("i", [fd if isinstance(fd, int) else fd.fileno() for fd in fds])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if numbers else []
    sent = sock.sendmsg([payload], ancillary, flags | socket.MSG_NOSIGNAL)
    if sent != len(payload):
        raise ProtocolError(
            f"only {sent} of {len(payload)} bytes were sent", why="the socket does not keep messages whole"
        )


def receive(sock: socket.socket, limit: int, *, flags: int = 0) -> tuple[bytes, list[Fd], bool]:
    """Receive one message of at most ``limit`` bytes.

    Returns:
        payload, descriptors (close-on-exec, owned by the caller) and whether the message was truncated, in payload or
        in descriptors. A truncated message is of no use, so its descriptors are closed already and the list is empty.
        An empty payload is the end of the connection.

    Raises:
        OSError: as ``recvmsg``; ``BlockingIOError`` or ``TimeoutError`` where nothing came in time. (``MSG_DONTWAIT``
            on a socket with a timeout waits for that timeout all the same: Python tries again.)
    """
    space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    payload, ancillary, seen, _ = sock.recvmsg(limit, space, flags | socket.MSG_CMSG_CLOEXEC)
    fds: list[Fd] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            # A cut control message may end inside a number; what is whole was installed in this process and is ours.
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            fds.extend(Fd(number) for number in numbers)
    truncated = bool(seen & (socket.MSG_TRUNC | socket.MSG_CTRUNC))
    if truncated or not payload:
        close_all(fds)
        return payload, [], truncated
    return payload, fds, False


def close_all(fds: Sequence[Fd]) -> None:
    """Close every descriptor of a list."""
    for fd in fds:
        fd.close()


def bind(sock: socket.socket, path: Path) -> None:
    """Bind to a path of any length.

    Raises:
        OptionError: the path is too long for a socket address and cannot be shortened.
        OSError: as ``bind``.
    """
    with _address(path) as address:
        sock.bind(address)


def connect(sock: socket.socket, path: Path) -> None:
    """Connect to a path of any length.

    Raises:
        OptionError: the path is too long for a socket address and cannot be shortened.
        OSError: as ``connect``.
    """
    with _address(path) as address:
        sock.connect(address)


@contextmanager
def _address(path: Path) -> Iterator[bytes]:
    """A socket address for ``path``: itself where it fits, else its name under the opened directory's descriptor."""
    plain = os.fsencode(path)
    if len(plain) <= _LONGEST_PATH:
        yield plain
        return
    with Fd(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as directory:
        through = f"/proc/self/fd/{directory.fileno()}"
        if not os.path.isdir(through):
            raise _too_long(path, "no /proc is mounted to shorten it through")
        short = os.fsencode(f"{through}/{path.name}")
        if len(short) > _LONGEST_PATH:
            raise _too_long(path, f"its last part alone has {len(os.fsencode(path.name))} bytes")
        yield short


def _too_long(path: Path, why: str) -> OptionError:
    length = len(os.fsencode(path))
    return OptionError(
        f"the socket path {path} has {length} bytes and {_LONGEST_PATH} fit",
        why=why,
        fix="Set FER_RUNTIME_DIR to a shorter directory.",
    )
