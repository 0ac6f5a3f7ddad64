"""The keeper's lock and its listening socket in a runtime directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from fer import paths
from fer.errors import FerError, KeeperError, KeeperUnavailable, PeerRefused
from fer.memory import fdpass
from fer.memory.fd import Fd

LOCK = "keeper.lock"
BACKLOG = 512
TAKEN = "a keeper already runs"
"""What a keeper says that came too late."""


def choose_dir(chosen: Path | None = None) -> tuple[Path, str]:
    """The directory a keeper goes to, made private, and what was wrong with the places before it (``""``: nothing).

    Args:
        chosen: the only place that counts; by default the first usable one of :func:`fer.paths.runtime_dirs`.

    Raises:
        PeerRefused: the only place there is belongs to somebody else or is open to others.
        KeeperUnavailable: none can be made or written. Field ``looked_in``.
    """
    places = [place.expanduser().absolute() for place in ([chosen] if chosen else paths.runtime_dirs())]
    wrong: list[str] = []
    for place in places:
        try:
            # One of several has to lie in a directory that is there: nobody asked for a /run/user/UID of our making.
            if len(places) > 1 and not os.path.isdir(place.parent):
                raise FileNotFoundError(errno.ENOENT, f"{place.parent} is no directory that can be reached")
            paths.ensure_private(place)
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "it cannot be written")
        except OSError as error:
            wrong.append(f"{place}: {error.strerror or error}")
        except FerError as error:
            if len(places) == 1:
                raise
            wrong.append(str(error))
        else:
            return place, "; ".join(wrong)
    raise KeeperUnavailable(
        f"no keeper can be started in {' or '.join(map(str, places))}",
        why="; ".join(wrong),
        fix="Set FER_RUNTIME_DIR to a directory that can be written.",
        looked_in=[str(place) for place in places],
    )


def lock(directory: Path) -> Fd:
    """Become the directory's only keeper. The lock belongs to the open file, so it survives us in the fd store.

    Raises:
        KeeperError: another keeper has it, or the file cannot be made.
        PeerRefused: the lock file is not our own.
    """
    path = directory / LOCK
    try:
        fd = Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PeerRefused(
                f"{path} is a symbolic link", why="a lock must be a file", fix=f"Remove {path}."
            ) from error
        fix = "Set FER_RUNTIME_DIR to a directory that can be written."
        raise KeeperError(f"{path} cannot be opened", why=error.strerror or str(error), fix=fix) from error
    try:
        fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd.fileno(), 32, 0).decode("ascii", "replace").strip()
        fd.close()
        raise KeeperError(
            f"{TAKEN} in {directory}", why=f"process {pid or 'unknown'}", fix="Use that one, or stop it."
        ) from None
    return fd


def sign(fd: Fd) -> None:
    """Write our pid into the lock file, for people and for the message above."""
    # One write of one length: whoever reads meanwhile sees the old pid or the new one.
    os.pwrite(fd.fileno(), f"{os.getpid():<10}\n".encode(), 0)


def listen(directory: Path, *, others: bool) -> socket.socket:
    """Bind and listen. To be called with the lock held: the socket of a dead keeper is then nobody's and is removed.

    Args:
        others: let other users reach the socket; who they are is checked when they connect.

    Raises:
        PeerRefused: something that is no socket of ours stands in the way.
    """
    path = directory / paths.SOCKET
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        before = os.umask(0o111 if others else 0o177)
        try:
            fdpass.bind(sock, path)
        finally:
            os.umask(before)
        os.chmod(directory, 0o711 if others else 0o700)
        sock.listen(BACKLOG)
        return sock
    except BaseException:
        sock.close()
        raise


def remove(directory: Path) -> None:
    """Remove the socket of this keeper, which holds the lock and ends."""
    try:
        os.unlink(directory / paths.SOCKET)
    except FileNotFoundError:
        pass


def _remove_stale(path: Path) -> None:
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode) or facts.st_uid != os.getuid():
        kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no socket of this user"
        raise PeerRefused(f"{path} is {kind}", why="a keeper's socket goes there", fix=f"Remove {path}.")
    os.unlink(path)
