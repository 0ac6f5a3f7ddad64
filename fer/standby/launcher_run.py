"""``fer run``: a process that stands for an engine which a launcher has forked.

To whoever started it, it behaves as the engine would: it takes its signals, stops and goes on with it, ends with its
status. Where no launcher fits it does not stand for anything: it becomes the program, by exec.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fer.errors import OptionError
from fer.standby import inheritance
from fer.standby.launcher_client import UNKNOWN, Child, NotForked, fork
from fer.standby.launcher_command import which
from fer.standby.launcher_place import check_name
from fer.standby.signalfd import SignalFd

NOT_FOUND, NOT_EXECUTABLE = 127, 126
"""Exit codes of shells."""
_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
_OWN = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ}
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}


def run(argv: Sequence[str], *, launcher: str, runtime_dir: Path | None, say: Callable[[str], None]) -> int:
    """Run a command to its end and return its exit code, 128 and the signal's number where it was killed.

    Does not return where the command becomes this process.

    Args:
        launcher: a name, ``auto`` or ``off``.
        say: takes the one line that says which way was taken, and why.

    Raises:
        OptionError: there is no command, or no launcher can have that name.
    """
    if not argv:
        raise OptionError("there is no command", fix="Give it behind --, as in: fer run -- python engine.py")
    if launcher not in ("auto", "off"):
        check_name(launcher)
    ignored = inheritance.ignored_signals()
    # From here on nothing is lost: what comes while the engine is made is forwarded once it is there.
    signals = SignalFd(signal.valid_signals() - _OWN - _FAULTS)
    try:
        _fit_for_standing()
        child = fork(
            argv,
            pass_fds=_inherited(signals),
            launcher=launcher,
            runtime_dir=runtime_dir,
            ignored=ignored,
            blocked=sorted(signals.before),
        )
    except NotForked as reason:
        say(f"plain exec: {reason}")
        signals.close()
        _exec(argv)
    say(f"forked as process {child.pid} by {child.why}")
    return _stand_for(child, signals)


def _fit_for_standing() -> None:
    """Raises NotForked: only a process of this very session could use its streams as the command might."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            raise NotForked(f"standard descriptor {number} is closed") from None
    if os.isatty(0):
        try:
            foreground = os.tcgetpgrp(0)
        except OSError:
            return  # not the terminal of this session, nothing would stop who reads it
        if foreground != os.getpgrp():
            raise NotForked("standard input is the terminal and this is a background job")


def _inherited(signals: SignalFd) -> list[int]:
    """Descriptors beside the standard ones that a program would inherit; Python opens its own as close-on-exec."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            if number > 2 and number != signals.fileno() and os.get_inheritable(number):
                found.append(number)
        except OSError:
            continue  # the one of this very listing
    return sorted(found)


def _exec(argv: Sequence[str]) -> NoReturn:
    program = which(argv[0], os.environ)
    if program is None:
        there = os.sep in argv[0] and os.path.exists(argv[0])
        _complain(argv[0], "it cannot be executed" if there else "there is no such program")
        sys.exit(NOT_EXECUTABLE if there else NOT_FOUND)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # ignored by this interpreter only
    try:
        os.execve(program, list(argv), os.environ)
    except OSError as error:
        _complain(argv[0], error.strerror or str(error))
        sys.exit(NOT_EXECUTABLE)


def _complain(program: str, why: str) -> None:
    print(f"fer run: {program}: {why}", file=sys.stderr, flush=True)  # noqa: T201 - as a shell does


def _stand_for(child: Child, signals: SignalFd) -> int:
    """Forward signals until the engine has ended."""
    poll = select.poll()
    poll.register(child.pidfd.fileno(), select.POLLIN)
    poll.register(signals.fileno(), select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if signals.fileno() in ready:
            for number, from_kernel in signals.read():
                _forward(child, number, from_kernel)
        status = child.poll()
        if status is not None:
            child.close()
            if status == UNKNOWN:
                _complain("the engine", "its launcher died before it, and this kernel tells its status to nobody else")
            return status if status >= 0 else 128 - status


def _forward(child: Child, number: int, from_kernel: bool) -> None:
    """Pass a signal on: to the engine alone, or to its whole group where the terminal meant this process's group."""
    if number in _STOPS:
        # The engine leads a session, where the kernel ignores these; and only a stop can be told from outside.
        child.signal_group(signal.SIGSTOP)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)  # stopped here, until somebody continues us
        signal.pthread_sigmask(signal.SIG_BLOCK, {number})
        child.signal_group(signal.SIGCONT)
    elif from_kernel or number == signal.SIGCONT:
        child.signal_group(number)
    else:
        child.send_signal(number)
