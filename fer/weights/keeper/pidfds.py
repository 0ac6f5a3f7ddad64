"""Processes for certain: by pid and time of start, watched by pidfd."""

from __future__ import annotations

import os
import select
from pathlib import Path

from fer.memory.fd import Fd
from fer.weights.wire import Process


def open_exactly(process: Process) -> Fd | None:
    """The pidfd of exactly this process, None where it is gone."""
    try:
        fd = Fd(os.pidfd_open(process.pid))
    except OSError:
        return None
    if started(process.pid) == process.born:  # read with the pidfd open: what it names is what was read
        return fd
    fd.close()
    return None


def is_over(fd: Fd) -> bool:
    """Whether every thread of a process has ended; what it had open is closed by then."""
    poll = select.poll()
    poll.register(fd.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def started(pid: int) -> int:
    """When a process was started, in ticks since boot, 0 where there is none; also of one that nobody has reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[19])
