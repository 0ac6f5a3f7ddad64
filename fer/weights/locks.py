"""The lock of a service: a name in the kernel that one socket can have, and no path that could be deleted.

Whoever holds a service has the lock's descriptor, and so has the keeper that granted it. It lasts as long as either of
them: a keeper that knows nothing of the other, since its predecessor died with all it had or since somebody removed a
socket's path and started a second one, cannot make the lock a second time and grants nothing. To have the descriptor is
proof of holding the service.

Names are those of abstract sockets and so of one network namespace. Standard library only: the keeper uses this file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import socket
import stat
import time

from fer.memory.fd import Fd

_BACKLOG = 64
_AGAIN_S = 0.01


def name_of(service: str) -> bytes:
    """The kernel's name of a service's lock."""
    return b"\0fer-service-" + hashlib.sha256(service.encode()).hexdigest()[:32].encode()


def make(service: str) -> Fd | None:
    """The lock; None where somebody has it. Raises OSError where there can be no such socket."""
    with _socket() as sock:
        try:
            sock.bind(name_of(service))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        sock.listen(_BACKLOG)  # so that others can wait for its end
        return Fd(sock.detach())


def wait_for(service: str) -> Fd | None:
    """A descriptor that hangs up when the last one of the lock is closed; None where nobody has it just now."""
    with _socket() as sock:
        sock.setblocking(False)
        try:
            sock.connect(name_of(service))
        except OSError:
            return None
        return Fd(sock.detach())


def make_within(service: str, wait_s: float) -> Fd | None:
    """The lock, after waiting for whoever has it; None where that takes longer. Raises OSError as :func:`make` does."""
    deadline = time.monotonic() + wait_s
    while (lock := make(service)) is None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        end = wait_for(service)
        if end is None:
            time.sleep(min(_AGAIN_S, left))
            continue
        with end:
            poll = select.poll()
            poll.register(end.fileno(), select.POLLRDHUP)
            poll.poll(left * 1000)
    return lock


def fits(fd: Fd, service: str) -> bool:
    """Whether a descriptor is the lock of a service. Nobody can make such a one as long as another is open."""
    if not stat.S_ISSOCK(os.fstat(fd.fileno()).st_mode):
        return False
    with socket.socket(fileno=os.dup(fd.fileno())) as sock:
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return bool(listens) and sock.family == socket.AF_UNIX and sock.getsockname() == name_of(service)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
