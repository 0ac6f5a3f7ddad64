"""Starting a keeper from an engine, so that it outlives the engine wherever that is possible."""

from __future__ import annotations

import hashlib
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from fer import paths
from fer.errors import KeeperUnavailable
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.weights.keeper import sockets
from fer.weights.keeper.process import LOG, apart, environment, settings_file

UNIT_PROPERTIES = (
    "Type=notify",
    "NotifyAccess=main",
    "FileDescriptorStoreMax=8192",
    "Restart=on-failure",
    "RestartForceExitStatus=75",
    "RestartSec=0",
    "StartLimitIntervalSec=0",
    "LimitNOFILE=524288",
    "NoNewPrivileges=yes",
)
"""What ``packaging/systemd/fer-keeper.service`` says too; a test compares the two."""

_UNIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Started:
    """A keeper that listens.

    Attributes:
        how: ``running`` already, in a unit of its own by ``systemd-run``, or ``detached`` from this process.
        pid: the keeper's process.
        runtime_dir: where it listens.
        shares_cgroup: it is in this process's cgroup, and so ends with its unit or container.
        passed_over: preferred directories that cannot be used, with the reason; ``""`` where there were none.
    """

    how: Literal["running", "systemd-run", "detached"]
    pid: int
    runtime_dir: Path
    shares_cgroup: bool
    passed_over: str = ""


def start_keeper(runtime_dir: Path | None = None, *, unit: bool = True, timeout: float = 15.0) -> Started:
    """Have a keeper listen in a runtime directory, by default the first that can be used; callers at once get one.

    Args:
        unit: try a transient unit of the user's service manager first.
        timeout: seconds it has to listen.

    Raises:
        KeeperUnavailable: it did not come up, the message quotes its log; or it has no directory to go to.
        PeerRefused: the directory is not this user's own.
    """
    directory, passed_over = sockets.choose_dir(runtime_dir)
    if listens(directory):
        return _started("running", directory, passed_over)
    deadline = time.monotonic() + timeout
    if unit and _run_unit(directory):
        _await(directory, deadline, None)
        return _started("systemd-run", directory, passed_over)
    with _run_detached(directory, timeout) as process:
        _await(directory, deadline, process)
    return _started("detached", directory, passed_over)


def _await(directory: Path, deadline: float, process: _Detached | None) -> None:
    """Wait until a keeper listens. Raises KeeperUnavailable: not in time, or its process has ended."""
    start = time.monotonic()
    while not listens(directory):
        if process is not None and process.ended() and not process.came_too_late():
            if listens(directory):  # another caller's keeper, since the last look
                return
            raise _not_up(directory, "ended before it listened", process.said())
        if time.monotonic() >= deadline:
            said = process.said() if process is not None else []
            raise _not_up(directory, f"did not listen within {deadline - start:.0f} s", said)
        time.sleep(0.005)


def listens(directory: Path) -> bool:
    """Whether somebody accepts connections in a runtime directory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        try:
            fdpass.connect(sock, directory / paths.SOCKET)
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
    return True


def _run_unit(directory: Path) -> bool:
    """Start the keeper as a transient unit; False where no user manager does that."""
    program = shutil.which("systemd-run")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if program is None or not (runtime and Path(runtime, "systemd", "private").exists()):
        return False
    name = "fer-keeper-" + hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    ours = {k: v for k, v in environment().items() if k.startswith(("FER_", "_FER_", "XDG_")) or k == "PYTHONPATH"}
    ours |= settings_file()
    command = [program, "--user", "--collect", "--quiet", f"--unit={name}"]
    command += [f"--property={line}" for line in UNIT_PROPERTIES]
    command += [f"--setenv={key}={value}" for key, value in ours.items()]
    command += [sys.executable, "-P", "-m", "fer.weights.keeper", "--store", "systemd", "--runtime-dir", str(directory)]
    try:
        # With Type=notify it returns when the keeper has said READY=1. A unit that exists already is another
        # caller's keeper on its way: the caller then waits for that one.
        done = _run(command, _UNIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 or "already" in done.stderr


class _Detached:
    """A keeper (or its minder) that has left us, and the part of its log since we started it."""

    def __init__(self, directory: Path, pid: str, begin: int) -> None:
        self._log, self._begin = directory / LOG, begin
        self._process: Fd | None = None
        try:
            self._process = Fd(os.pidfd_open(int(pid)))
        except (OSError, ValueError):
            pass  # it has ended already

    def ended(self) -> bool:
        """Whether the process has ended."""
        if self._process is None:
            return True
        poll = select.poll()
        poll.register(self._process.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def said(self) -> list[str]:
        """The last lines of its log."""
        try:
            content = self._log.read_bytes()
        except OSError:
            return []
        # A log that was begun anew is shorter than it was.
        new = content[self._begin :] if len(content) >= self._begin else content
        return new.decode("utf-8", "replace").splitlines()[-5:]

    def came_too_late(self) -> bool:
        """Whether it ended because another keeper, about to listen, was quicker."""
        return any(sockets.TAKEN in line for line in self.said())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()


def _run_detached(directory: Path, timeout: float) -> _Detached:
    command = [sys.executable, "-P", "-m", "fer.weights.keeper", "--detach", "--store", "minder"]
    command += ["--runtime-dir", str(directory)]
    try:
        begin = (directory / LOG).stat().st_size
    except OSError:
        begin = 0
    try:
        done = _run(command, timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KeeperUnavailable("the keeper did not start", why=str(error)) from error
    if done.returncode:
        raise KeeperUnavailable("the keeper did not start", why=done.stderr.strip())
    return _Detached(directory, done.stdout.strip(), begin)


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        env=apart(environment()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def _started(how: Literal["running", "systemd-run", "detached"], directory: Path, passed_over: str) -> Started:
    pid = keeper_pid(directory)
    return Started(how=how, pid=pid, runtime_dir=directory, shares_cgroup=shares_cgroup(pid), passed_over=passed_over)


def keeper_pid(directory: Path) -> int:
    """The process that last became the keeper of a directory, 0 where there was none."""
    try:
        return int((directory / sockets.LOCK).read_text("ascii"))
    except (OSError, ValueError):
        return 0


def shares_cgroup(pid: int) -> bool:
    """Whether a process is in this one's cgroup: what ends the one, a unit or a container, ends the other."""
    return _cgroup("self") == _cgroup(str(pid))


def _cgroup(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text("utf-8")
    except OSError:
        return f"unknown to {pid}"  # never equal to a known one


def _not_up(directory: Path, what: str, said: list[str]) -> KeeperUnavailable:
    return KeeperUnavailable(
        f"the keeper in {directory} {what}",
        why="; ".join(said),
        fix="Run `fer keeper run` in a terminal to see why.",
        looked_in=[str(directory)],
    )
