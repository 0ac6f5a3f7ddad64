"""Engines of ``fer serve`` forked from a process of the tests that has imported what they import."""

from __future__ import annotations

import os

from fer.memory.fd import Fd
from fer.standby import tie
from fer.standby.process import Command
from tests.support import zygote

LIMIT_S = 90.0


class ForkedEngine:
    """A forked child, as much of a launcher's child as a supervisor needs."""

    via, why = "launcher", "the tests' own"

    def __init__(self, command: Command, stdio: tuple[int, int, int]) -> None:
        module = command.arguments[2]
        names = dict(zip(("stdin", "stdout", "stderr"), stdio, strict=True))
        self._forked = zygote.shared.fork(
            module, *command.arguments[3:], env=command.environment, preload=zygote.WITH_TRANSFORMERS, **names
        )
        self.pid, self.pidfd = self._forked.pid, Fd(os.pidfd_open(self._forked.pid))
        self._held, self.alarm = tie.make()  # it is not tied: this end is held here as long

    def poll(self) -> int | None:
        return self._forked.wait(LIMIT_S)

    def send_signal(self, number: int) -> None:
        self._forked.send_signal(number)

    def close(self) -> None:
        self.pidfd.close()
        self.alarm.close()
        self._held.close()
