"""What a pidfd tells about a process that is no child of ours."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
from pathlib import Path

_INFO = struct.Struct("<QQ11Ii")  # mask, cgroup, eleven ids, exit code: the first version of struct pidfd_info
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_WITH_EXIT = 1 << 3
_TO_GROUP = 1 << 2
_EXIT_CODE = 49
"""Place of the exit code in ``/proc/PID/stat``, counted behind the name."""


def ended(pidfd: int, timeout: float | None = 0.0) -> bool:
    """Whether the process has ended, within ``timeout`` seconds (None: however long that takes)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(0.0, timeout) * 1000))


def exit_status(pidfd: int, pid: int) -> int | None:
    """How a process ended, as ``subprocess`` counts (negative for a signal); None where the kernel does not say.

    Asks the descriptor first, which Linux tells from 6.15 on once the process was reaped, then looks at it as long as
    it was not.
    """
    answer = bytearray(_INFO.size)
    struct.pack_into("<Q", answer, 0, _WITH_EXIT)
    with contextlib.suppress(OSError):
        fcntl.ioctl(pidfd, _GET_INFO, answer)
        mask, *_, code = _INFO.unpack(answer)
        if mask & _WITH_EXIT:
            return os.waitstatus_to_exitcode(code)
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        signal.pidfd_send_signal(pidfd, 0)  # not reaped to this moment, so the number was still that process's own
    except (OSError, ValueError):
        return None
    return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE - 1])) if state == "Z" else None


def send(pidfd: int, number: int) -> None:
    """Send a signal; nothing happens where the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


def send_to_group(pidfd: int, pid: int, number: int) -> None:
    """Send a signal to the process group that a process leads; nothing happens where it has ended."""
    with contextlib.suppress(ProcessLookupError):
        try:
            signal.pidfd_send_signal(pidfd, number, None, _TO_GROUP)
        except OSError as error:  # Linux before 6.9
            if isinstance(error, ProcessLookupError) or ended(pidfd):
                return
            os.killpg(pid, number)
