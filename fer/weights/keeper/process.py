"""What keeper and minder do to their own process."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import fer
from fer.errors import KeeperError

LEAST_FILES = 256
"""Open files without which a keeper does not start: enough for itself and a small model or two."""


def raise_limits() -> None:
    """As many open files as the kernel lets this user have: each slab is one.

    Raises:
        KeeperError: they are too few to keep anything.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_FILES:
        raise KeeperError(
            f"a keeper cannot keep anything with {hard} open files",
            why=f"each slab is one, and {LEAST_FILES} are the least",
            fix="Raise the hard limit (ulimit -Hn, or LimitNOFILE= of the unit).",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


_OF_A_UNIT = ("NOTIFY_SOCKET", "FDSTORE", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
LOG = "keeper.log"
"""Log of a detached keeper, in its runtime directory."""
LOG_LIMIT = 4 << 20
"""Bytes of a log that is begun anew at the next start."""


def apart(variables: dict[str, str]) -> dict[str, str]:
    """The environment without what concerns the unit of the process that starts us: it must not take us for its own."""
    return {name: value for name, value in variables.items() if name not in _OF_A_UNIT}


def environment() -> dict[str, str]:
    """The environment for our own processes: they find this very package, wherever they are started."""
    root = str(Path(fer.__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH", "")
    parts = [part for part in inherited.split(os.pathsep) if part and part != root]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *parts])}


def settings_file() -> dict[str, str]:
    """``FER_CONFIG`` for our own processes: they run in other folders and have to read this process's ``fer.toml``."""
    from fer.options import config_path

    found = config_path(os.environ)
    return {} if found is None else {"FER_CONFIG": str(found.absolute())}


def born(pid: int) -> int:
    """When a process was started, in the kernel's ticks since boot; 0 for one that has ended or cannot be seen."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0
    return 0 if state in "ZX" else int(fields[18])


def detach(log: Path) -> bool:
    """Leave the terminal, the session and the parent; output goes to ``log``. True in the process that goes on.

    That process first says its pid on the standard output, for whoever waits to know when it ends.

    Raises:
        OSError: the log cannot be written; nothing was started.
    """
    if log.is_file() and log.stat().st_size > LOG_LIMIT:
        log.replace(log.with_suffix(".log.old"))
    # Before anything is started: whoever asked for a keeper need not wait for one that could not even complain.
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    os.write(out, f"a keeper is started by process {os.getppid()}\n".encode())  # a full file system tells now
    if os.fork():
        os.close(out)
        return False
    os.setsid()
    if os.fork():  # not a session leader, so no terminal can become ours
        os._exit(0)
    os.chdir("/")
    os.write(1, f"{os.getpid()}\n".encode())
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    return True
