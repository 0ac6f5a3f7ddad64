"""Starting an engine: forked by a launcher where one fits, else as a plain program, and always with the reason.

::

    child = spawn(["python", "-m", "my_engine"], env=..., stdout=log)
    child.via, child.why        # "launcher", "launcher default, process 123"
    child.wait(1.0)             # None while it runs; else its exit status, negative for a signal
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from fer.memory.fd import Fd
from fer.standby import pidfd as processes
from fer.standby import tie

UNKNOWN = 255
"""Exit status of an engine whose launcher died before it, on a kernel (before 6.15) that tells nobody else."""


class Child:
    """An engine that was started; it ends with this process, and when this object is closed or forgotten.

    It leads a session and a process group of its own.

    Attributes:
        pid, pidfd: the engine itself, whoever its parent is.
        via: ``launcher`` if it was forked by one, ``exec`` if it is a program of its own.
        why: for people: which launcher, or what stood in the way of one.
        returncode: the exit status once :meth:`poll` or :meth:`wait` has seen the end, negative for a signal.
    """

    def __init__(self, pid: int, pidfd: Fd, via: Literal["launcher", "exec"], why: str, alarm: Fd) -> None:
        self.pid, self.pidfd, self.via, self.why = pid, pidfd, via, why
        self.returncode: int | None = None
        self._alarm = alarm
        self._process: subprocess.Popen[bytes] | None = None

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait ``timeout`` seconds for the end (None: without limit); the exit status, or None if it still runs."""
        if self.returncode is None and processes.ended(self.pidfd.fileno(), timeout):
            self.returncode = self._status()
        return self.returncode

    def _status(self) -> int:
        assert self._process is not None
        return self._process.wait()

    def send_signal(self, number: int) -> None:
        """Send a signal to the engine; nothing happens if it has ended."""
        processes.send(self.pidfd.fileno(), number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the engine and to those it started in its process group."""
        processes.send_to_group(self.pidfd.fileno(), self.pid, number)

    def close(self) -> None:
        """Let go of the engine, which ends it if it still runs."""
        self._alarm.close()
        if self._process is not None and self.returncode is None:
            self.returncode = self._process.wait()
        self.pidfd.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
    launcher: str = "auto",
    runtime_dir: Path | None = None,
) -> Child:
    """Start a program in a session of its own, tied to this process: it is killed when this process ends, however.

    Args:
        argv: the command; the program is looked for in the ``PATH`` of ``env``.
        env: its whole environment; this process's own if None.
        cwd: its working directory; this process's own if None.
        stdin, stdout, stderr: descriptors for its standard streams; this process's own if None.
        pass_fds: further descriptors it gets, under the same numbers.
        launcher: the name of a launcher, ``auto`` for ``default``, or ``off``. Where it does not fit, the program is
            started plainly and :attr:`Child.why` says why.
        runtime_dir: where the launcher's socket is; by default the usual places.

    Raises:
        OSError: the program cannot be started at all.
    """
    return _plain(argv, env, cwd, (stdin, stdout, stderr), pass_fds, "no launcher was asked for")


def _plain(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    streams: tuple[int | None, int | None, int | None],
    pass_fds: Sequence[int],
    why: str,
) -> Child:
    held, alarm = tie.make()
    with held:
        process = subprocess.Popen(
            list(argv),
            env=None if env is None else dict(env),
            cwd=cwd,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=[*pass_fds, held.fileno()],
            start_new_session=True,
        )
        tie.bind(held.fileno(), process.pid)
    child = Child(process.pid, Fd(os.pidfd_open(process.pid)), "exec", why, alarm)
    child._process = process
    return child
