"""From a fork of the template to the process that was asked for, in everything but its imports."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import io
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from fer.memory.fd import Fd
from fer.standby import inheritance, tie
from fer.standby.launcher_command import Program
from fer.standby.launcher_wire import Handed

_ABOVE = 600
"""What was received is moved up here, out of the way of the numbers that the program knows its descriptors by."""
_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_STAT_FIELDS = {"start_code": 23, "end_code": 24, "start_stack": 25, "start_data": 42, "end_data": 43, "start_brk": 44}
"""Places in ``/proc/self/stat``, counted behind the name."""


def above(fd: Fd) -> Fd:
    """The same descriptor under a number that no program asks for."""
    with fd:
        return Fd(fcntl.fcntl(fd.fileno(), fcntl.F_DUPFD_CLOEXEC, _ABOVE))


def streams(received: Sequence[Fd], numbers: Sequence[int]) -> list[int]:
    """Put descriptors under the numbers that the program knows them by; the first three are its standard streams.

    Returns:
        the numbers, which are inheritable now.

    Raises:
        OSError: a number is taken by a library of the template.
    """
    high = [above(fd) for fd in received]
    targets = [0, 1, 2, *numbers]
    for number in numbers:
        try:
            fcntl.fcntl(number, fcntl.F_GETFD)
        except OSError:
            continue
        raise OSError(f"its descriptor {number} has the number of one that the template has open")
    for source, number in zip(high, targets, strict=True):
        os.dup2(source.fileno(), number)
        source.close()
    return targets


def become(
    program: Program, handed: Handed, environment: Mapping[str, str], *, held: Fd, folder: Fd, asker: int
) -> None:
    """Take over everything that an exec would have brought.

    Args:
        held: the tie to the requester; stays open under a number of its own, also over an exec.
        folder: the working directory.
        asker: the requester's pid, for variables that name the process they are for.

    Raises:
        OSError: something cannot be given to this process; the message says what.
    """
    os.setsid()
    if not tie.bind_myself(held.fileno()):
        os._exit(1)  # nobody waits for us any more
    os.set_inheritable(held.detach(), True)
    inheritance.take(handed)
    os.fchdir(folder.fileno())
    folder.close()
    _environment(environment, asker)
    _signals(handed)
    _open_streams(program.unbuffered)
    _reopen_logs()
    _reseed()
    _multiprocessing()
    _name(program.original)
    gc.unfreeze()


def _environment(environment: Mapping[str, str], asker: int) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for name in ("LISTEN_PID", "WATCHDOG_PID"):  # service managers say with these whom they mean
        if os.environ.get(name) == str(asker):
            os.environ[name] = str(os.getpid())
    time.tzset()


def _signals(handed: Handed) -> None:
    for number in signal.valid_signals():
        if number in (signal.SIGKILL, signal.SIGSTOP):
            continue
        ignored = number in handed.ignored or number in (signal.SIGPIPE, signal.SIGXFSZ)
        try:
            signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        except OSError:
            continue  # two are the C library's own
    if signal.SIGINT not in handed.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, handed.blocked)


def _open_streams(unbuffered: bool) -> None:
    """New stream objects, as an interpreter makes them: what is a terminal here was none in the template."""
    unbuffered = unbuffered or bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        mode = "r" if number == 0 else "w"
        raw: Any = io.FileIO(number, mode, closefd=False)
        raw.name = f"<{name}>"
        bare = unbuffered and number > 0
        buffer: Any = io.BufferedReader(raw) if number == 0 else raw if bare else io.BufferedWriter(raw)
        new: Any = io.TextIOWrapper(
            buffer,
            encoding=old.encoding,
            errors=old.errors,
            newline="\n",
            line_buffering=number == 2 or raw.isatty(),
            write_through=bare,
        )
        new.mode = mode
        for handler in _handlers():
            if isinstance(handler, logging.StreamHandler) and vars(handler).get("stream") is getattr(sys, name):
                handler.stream = new
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _reopen_logs() -> None:
    """Log files that imports have opened: one open file shared by template and engines would share its position."""
    for handler in _handlers():
        if isinstance(handler, logging.FileHandler) and handler.stream is not None:
            handler.close()  # opens its file again with the next line


def _handlers() -> list[logging.Handler]:
    known: Any = logging
    return [handler for reference in list(known._handlerList) if (handler := reference()) is not None]


def _reseed() -> None:
    """New random numbers where an interpreter's start, or an import, draws a seed from the system.

    Hashes of texts keep the template's seed: it is fixed when an interpreter starts.
    """
    random.seed()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def _multiprocessing() -> None:
    """What that module takes note of when it is imported: the folder of relative paths, and a secret."""
    known: Any = sys.modules.get("multiprocessing.process")
    if known is not None:
        known.ORIGINAL_DIR = os.getcwd()
        known.current_process().authkey = os.urandom(32)


class _Map(ctypes.Structure):
    """``struct prctl_mm_map``."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_shown: list[ctypes.Array[ctypes.c_char]] = []
"""Memory that the kernel shows as this process's command line and environment."""


def _name(command: Sequence[str]) -> None:
    """What ps and others show. Where the kernel does not allow all of it, the short name is all there is."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, os.fsencode(os.path.basename(command[0]))[:15], 0, 0, 0)
    arguments = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    _shown[:] = [ctypes.create_string_buffer(text, len(text)) for text in (arguments, variables)]
    begin = [ctypes.addressof(text) for text in _shown]
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    libc.sbrk.restype = ctypes.c_void_p
    table = _Map(**{name: int(fields[place]) for name, place in _STAT_FIELDS.items()}, brk=libc.sbrk(0))
    table.arg_start, table.arg_end = begin[0], begin[0] + len(arguments)
    table.env_start, table.env_end = begin[1], begin[1] + len(variables)
    table.exe_fd = 0xFFFFFFFF
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(table), ctypes.c_ulong(ctypes.sizeof(table)), 0)
