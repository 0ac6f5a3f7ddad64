"""Starting an engine: forked by a launcher where one fits, else as a plain program, and always with the reason.

::

    child = spawn(["python", "-m", "my_engine"], env=..., stdout=log)
    child.via, child.why        # "launcher", "launcher default, process 123"
    child.wait(1.0)             # None while it runs; else its exit status, negative for a signal
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from fer.errors import FerError
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.memory.seal import sealed_bytes
from fer.standby import inheritance, tie
from fer.standby import launcher_place as place
from fer.standby import launcher_wire as wire
from fer.standby import pidfd as processes
from fer.standby.launcher_command import which

FORK_S = 5.0
"""Seconds a launcher and its child have until the engine is there; one that hangs must not hold up a recovery."""
END_S = 5.0
"""Seconds a launcher has to say how an engine ended that the kernel tells nothing about."""
UNKNOWN = 255
"""Exit status of an engine whose launcher died before it, on a kernel (before 6.15) that tells nobody else."""


class NotForked(Exception):
    """No launcher forked it; the message says why. Nothing of it has run."""


class Child:
    """An engine that was started; it ends with this process, and when this object is closed or forgotten.

    It leads a session and a process group of its own.

    Attributes:
        pid, pidfd: the engine itself, whoever its parent is.
        via: ``launcher`` if it was forked by one, ``exec`` if it is a program of its own.
        why: for people: which launcher, or what stood in the way of one.
        alarm: the write end of the tie (:mod:`fer.standby.tie`); it hangs up when the engine ends.
        returncode: the exit status once :meth:`poll` or :meth:`wait` has seen the end, negative for a signal.
    """

    def __init__(
        self,
        pid: int,
        pidfd: Fd,
        why: str,
        alarm: Fd,
        source: subprocess.Popen[bytes] | socket.socket,
    ) -> None:
        self.pid, self.pidfd, self.why = pid, pidfd, why
        self.via: Literal["launcher", "exec"] = "launcher" if isinstance(source, socket.socket) else "exec"
        self.returncode: int | None = None
        self.alarm, self._source = alarm, source

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self.wait(0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait ``timeout`` seconds for the end (None: without limit); the exit status, or None if it still runs."""
        if self.returncode is None and processes.ended(self.pidfd.fileno(), timeout):
            self.returncode = self._status()
        return self.returncode

    def _status(self) -> int:
        """How it ended. Its parent knows; the kernel tells us too, more or less, depending on its version."""
        if isinstance(self._source, subprocess.Popen):
            return self._source.wait()
        known = processes.exit_status(self.pidfd.fileno(), self.pid)
        if known is not None:
            return known
        self._source.settimeout(END_S)
        # An engine killed before it read our last word resets the connection: that is told first, and then the answer.
        for _ in range(2):
            with contextlib.suppress(OSError, FerError):
                payload, fds, _ = fdpass.receive(self._source, wire.LIMIT)
                fdpass.close_all(fds)
                if payload and isinstance(answer := wire.unpack_answer(payload), wire.Ended):
                    return answer.status
        return UNKNOWN

    def send_signal(self, number: int) -> None:
        """Send a signal to the engine; nothing happens if it has ended."""
        processes.send(self.pidfd.fileno(), number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the engine and to those it started in its process group."""
        processes.send_to_group(self.pidfd.fileno(), self.pid, number)

    def close(self) -> None:
        """Let go of the engine, which ends it if it still runs."""
        self.alarm.close()
        if not self.pidfd.closed:
            self.wait()
            self.pidfd.close()
        if isinstance(self._source, socket.socket):
            self._source.close()

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
        OptionError: no launcher can have that name.
    """
    streams = tuple(number if given is None else given for number, given in enumerate((stdin, stdout, stderr)))
    try:
        return fork(
            argv, env=env, cwd=cwd, streams=streams, pass_fds=pass_fds, launcher=launcher, runtime_dir=runtime_dir
        )
    except NotForked as reason:
        return _plain(argv, env, cwd, streams, pass_fds, str(reason))


def fork(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    streams: Sequence[int] = (0, 1, 2),
    pass_fds: Sequence[int] = (),
    launcher: str = "auto",
    runtime_dir: Path | None = None,
    ignored: list[int] | None = None,
    blocked: list[int] | None = None,
) -> Child:
    """As :func:`spawn`, by a launcher or not at all.

    Args:
        ignored, blocked: signals that are so in the engine from its start; none if None.

    Raises:
        NotForked: and why.
        OptionError: no launcher can have that name.
    """
    if launcher == "off":
        raise NotForked("no launcher was asked for")
    name = place.DEFAULT if launcher == "auto" else place.check_name(launcher)
    environment = dict(os.environ if env is None else env)
    program = which(argv[0], environment, cwd or ".") if argv else None
    if program is None:
        raise NotForked("there is no such program")
    if len(pass_fds) > wire.MOST_PASSED:
        raise NotForked(f"{len(pass_fds)} descriptors are to be passed, and {wire.MOST_PASSED} fit into a message")
    body = wire.Body(
        argv=[os.fsencode(word) for word in argv],
        env={os.fsencode(key): os.fsencode(value) for key, value in environment.items()},
    )
    try:
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as lent:
            sock, launcher_pid = place.connect(name, runtime_dir)
            kept.enter_context(sock)
            text = lent.enter_context(sealed_bytes("fer-run", wire.pack(body)))
            folder = lent.enter_context(Fd(os.open(cwd or ".", os.O_PATH | os.O_CLOEXEC)))
            held, alarm = tie.make()
            lent.enter_context(held)
            kept.enter_context(alarm)
            request = wire.Run(
                version=wire.VERSION,
                fixed=inheritance.fixed(),
                handed=inheritance.handed(ignored=ignored, blocked=blocked),
                pid=os.getpid(),
                program=os.fsencode(program),
                numbers=list(pass_fds),
            )
            fds = [text.fileno(), folder.fileno(), held.fileno(), *streams, *pass_fds]
            pid, pidfd = _agree(sock, request, fds)
            kept.pop_all()  # the child's from here on
    except FerError as error:
        raise NotForked(f"{error.what}: {error.why}" if error.why else error.what) from error
    except (OSError, ValueError) as error:
        raise NotForked(f"the launcher {name} could not be asked: {error}") from error
    return Child(pid, pidfd, f"launcher {name}, process {launcher_pid}", alarm, sock)


def _agree(sock: socket.socket, request: wire.Run, fds: Sequence[int]) -> tuple[int, Fd]:
    """Ask for a fork and accept it. Raises NotForked, OSError, ProtocolError."""
    sock.settimeout(FORK_S)
    try:
        fdpass.send(sock, wire.pack(request), fds)
        payload, received, _ = fdpass.receive(sock, wire.LIMIT)
    except TimeoutError:
        raise NotForked(f"the launcher did not answer within {FORK_S:.0f} s") from None
    except (BrokenPipeError, ConnectionResetError):
        payload, received = b"", []
    if not payload:
        raise NotForked("the launcher died over the request")
    answer = wire.unpack_answer(payload)
    if not isinstance(answer, wire.Ready):
        fdpass.close_all(received)
        if isinstance(answer, wire.Refused | wire.Failed):
            raise NotForked(answer.why)
        raise NotForked("the forked child died before it began")
    wire.expect(received, 1)
    try:
        fdpass.send(sock, wire.pack(wire.Go()))
    except OSError:
        received[0].close()
        raise NotForked("the forked child died before it began") from None
    return answer.pid, received[0]


def _plain(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: str | Path | None,
    streams: Sequence[int],
    pass_fds: Sequence[int],
    why: str,
) -> Child:
    environment = dict(os.environ if env is None else env)
    program = which(argv[0], environment, cwd or ".") or argv[0]
    held, alarm = tie.make()
    with held:
        process = subprocess.Popen(
            list(argv),
            executable=program,
            env=environment,
            cwd=cwd,
            stdin=streams[0],
            stdout=streams[1],
            stderr=streams[2],
            pass_fds=[*pass_fds, held.fileno()],
            start_new_session=True,
        )
        tie.bind(held.fileno(), process.pid)
    return Child(process.pid, Fd(os.pidfd_open(process.pid)), why, alarm, process)


def ask(name: str, runtime_dir: Path | None = None, *, stop: bool = False) -> wire.Status:
    """What a launcher says of itself; ``stop`` ends it, and leaves its engines alone.

    Raises:
        LauncherError: none listens, or it does not answer.
        PeerRefused, ProtocolError: it is not one.
    """
    from fer.errors import LauncherError

    sock, pid = place.connect(place.check_name(name), runtime_dir)
    with sock:
        sock.settimeout(FORK_S)
        try:
            fdpass.send(sock, wire.pack(wire.Stop() if stop else wire.Ask()))
            payload, fds, _ = fdpass.receive(sock, wire.LIMIT * 16)
        except OSError as error:
            raise LauncherError(
                f"the launcher {name} does not answer", why=str(error), fix=f"Look at process {pid}."
            ) from error
        fdpass.close_all(fds)
        if not payload:
            raise LauncherError(f"the launcher {name} died over the question", fix="Start another one.")
        answer = wire.unpack_answer(payload)
        if not isinstance(answer, wire.Status):
            raise LauncherError(f"the launcher {name} says no", why=getattr(answer, "why", ""))
        if stop:
            with contextlib.suppress(OSError), Fd(os.pidfd_open(pid)) as process:
                processes.ended(process.fileno(), END_S)
        return answer
