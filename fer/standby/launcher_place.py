"""A launcher's socket and lock in a runtime directory, for those who serve there and those who ask."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import struct
from pathlib import Path

from fer import paths
from fer.errors import FerError, KeeperUnavailable, LauncherError, OptionError, PeerRefused
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.weights.keeper.process import born
from fer.weights.keeper.sockets import choose_dir

DEFAULT = "default"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_CONNECT_S = 1.0


def check_name(name: str) -> str:
    """The name, if a launcher may have it. Raises OptionError."""
    if not _NAME.fullmatch(name) or name in ("auto", "off"):
        raise OptionError(
            f"{name!r} is no name for a launcher",
            why="auto and off mean something else" if name in ("auto", "off") else "it becomes part of a file name",
            fix="Use up to 64 letters, digits, dots, dashes and underscores.",
        )
    return name


def directory(chosen: Path | None) -> Path:
    """The directory a launcher goes to, made private.

    Raises:
        LauncherError: there is none.
        PeerRefused: the only one there is belongs to somebody else or is open to others.
    """
    try:
        return choose_dir(chosen)[0]
    except KeeperUnavailable as error:
        raise LauncherError("there is no place for a launcher's socket", why=error.why, fix=error.fix) from error


def socket_of(place: Path, name: str) -> Path:
    return place / f"launcher-{name}.sock"


def _lock_of(place: Path, name: str) -> Path:
    return place / f"launcher-{name}.lock"


def lock(place: Path, name: str) -> Fd:
    """Become the directory's only launcher of that name; the lock belongs to the open file.

    Raises:
        LauncherError: another one has it, or the file cannot be made.
    """
    path = _lock_of(place, name)
    try:
        fd = Fd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        raise LauncherError(
            f"{path} cannot be opened", why=error.strerror or str(error), fix=f"Remove {path}."
        ) from error
    try:
        fcntl.flock(fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fd.close()
        raise LauncherError(
            f"a launcher {name} already runs in {place}",
            why=f"process {holder(place, name) or 'unknown'}",
            fix="Use that one, stop it, or give this one another --name.",
        ) from None
    os.pwrite(fd.fileno(), f"{os.getpid()} {born(os.getpid())}\n".encode().ljust(40), 0)
    return fd


def holder(place: Path, name: str) -> int:
    """The process that runs, or is about to run, the launcher of that name; 0 where there is none."""
    try:
        pid, start = map(int, _lock_of(place, name).read_text("ascii").split())
    except (OSError, ValueError):
        return 0
    return pid if start and born(pid) == start else 0


def listen(place: Path, name: str) -> socket.socket:
    """Bind and listen. With the lock held, a socket that is there is a dead launcher's and is removed.

    Raises:
        PeerRefused: something that is no socket of ours stands in the way.
    """
    path = socket_of(place, name)
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(facts.st_mode) or facts.st_uid != os.getuid():
            raise PeerRefused(f"{path} is no socket of this user", why="a launcher's goes there", fix=f"Remove {path}.")
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        before = os.umask(0o177)
        try:
            fdpass.bind(sock, path)
        finally:
            os.umask(before)
        sock.listen(64)
        sock.setblocking(False)
        return sock
    except BaseException:
        sock.close()
        raise


def remove(place: Path, name: str) -> None:
    """Remove the socket of this launcher, which holds the lock."""
    try:
        os.unlink(socket_of(place, name))
    except FileNotFoundError:
        pass


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process (0 in another PID namespace) and user at the other end, as the kernel knows them."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def connect(name: str, chosen: Path | None = None) -> tuple[socket.socket, int]:
    """A connection to the launcher of that name, and its process.

    Raises:
        LauncherError: none listens; the message says how that was found.
        PeerRefused: what listens there, or where, is not this user's own.
    """
    places = [chosen] if chosen is not None else paths.runtime_dirs()
    why: list[str] = []
    for place in places:
        try:
            paths.check_private(place)
            return _connect(place, name)
        except FileNotFoundError:
            pid = holder(place, name)
            why.append(f"process {pid} is getting one ready" if pid else f"no socket in {place}")
        except ConnectionRefusedError:
            why.append(f"the one in {place} has died")
        except OSError as error:
            why.append(f"{place}: {error.strerror or error}")
        except FerError:
            if len(places) == 1:
                raise
    raise LauncherError(f"no launcher {name} listens", why="; ".join(why), fix="Start one with `fer launcher run`.")


def _connect(place: Path, name: str) -> tuple[socket.socket, int]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_CONNECT_S)
        fdpass.connect(sock, socket_of(place, name))
        pid, uid = peer(sock)
        if uid != os.getuid():
            raise PeerRefused(
                f"the launcher in {place} is user {uid}'s",
                why=f"this process is user {os.getuid()}",
                fix="Run a launcher of your own.",
            )
        return sock, pid
    except BaseException:
        sock.close()
        raise
