"""Signals read from a descriptor, with who sent them: what neither handlers nor Python's ``signal`` tell."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable, Iterator

from fer.memory.fd import Fd

_SIZE = 128
_HEAD = struct.Struct("<IiiI")  # signal, errno, code, pid of the beginning of struct signalfd_siginfo
_SI_KERNEL = 0x80


class SignalFd:
    """Signals that are blocked from now on and come through a descriptor instead. For a process with one thread."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = set(numbers)
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        mask = (ctypes.c_ulong * 16)()  # sigset_t
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        for number in self.numbers:
            mask[(number - 1) // bits] |= 1 << (number - 1) % bits
        made = ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        if made < 0:
            raise OSError(ctypes.get_errno(), "signalfd")
        self._fd = Fd(made)

    def fileno(self) -> int:
        return self._fd.fileno()

    def read(self) -> Iterator[tuple[int, bool]]:
        """Signals that have come: number, and whether the kernel sent it, as for a key at the terminal."""
        try:
            data = os.read(self._fd.fileno(), _SIZE * 32)
        except BlockingIOError:
            return
        for place in range(0, len(data), _SIZE):
            number, _, code, _ = _HEAD.unpack_from(data, place)
            yield number, code == _SI_KERNEL

    def close(self, *, restore: bool = True) -> None:
        """Close the descriptor; ``restore`` the signal mask of before."""
        self._fd.close()
        if restore:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
