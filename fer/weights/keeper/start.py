"""Starting a keeper from an engine, so that it outlives the engine wherever that is possible."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fer import paths
from fer.errors import KeeperUnavailable
from fer.memory import fdpass
from fer.weights.keeper import sockets
from fer.weights.keeper.process import apart, environment, settings_file

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
    how: Literal["systemd-run", "detached"] = "systemd-run"
    if not (unit and _run_unit(directory)):
        how = "detached"
        _run_detached(directory, timeout)
    while not listens(directory):
        if time.monotonic() >= deadline:
            raise _not_up(directory, timeout)
        time.sleep(0.005)
    return _started(how, directory, passed_over)


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


def _run_detached(directory: Path, timeout: float) -> None:
    command = [sys.executable, "-P", "-m", "fer.weights.keeper", "--detach", "--store", "minder"]
    command += ["--runtime-dir", str(directory)]
    try:
        done = _run(command, timeout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KeeperUnavailable("the keeper did not start", why=str(error)) from error
    if done.returncode:
        raise KeeperUnavailable("the keeper did not start", why=done.stderr.strip())


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


def _not_up(directory: Path, timeout: float) -> KeeperUnavailable:
    try:
        tail = (directory / "keeper.log").read_text("utf-8", "replace").splitlines()[-5:]
    except OSError:
        tail = []
    return KeeperUnavailable(
        f"the keeper in {directory} did not listen within {timeout:g} s",
        why="; ".join(tail),
        fix="Run `fer keeper run` in a terminal to see why.",
        looked_in=[str(directory)],
    )
