"""A worker of ``fer serve`` that takes orders, over the arithmetic of :mod:`tests.support.serve_engine`.

The file named by ``TEST_FAULT`` decides, at each promotion, how taking memory goes wrong:

* ``memory``: OutOfMemory; ``die``: the process is killed in the middle; ``slow``: it takes until the file is gone.

A file beside it lists what each process holds: a line ``memory PID`` for a promotion that got its memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from fer.errors import OutOfMemory
from fer.report import Report
from fer.standby import duty, worker
from fer.standby.model import Model
from tests.support.serve_engine import ArithmeticModel


class Engine:
    """Pretends to have memory for answers, and says so in a file."""

    def __init__(self, parked: bool) -> None:
        self.parked = parked
        self.fault = Path(os.environ["TEST_FAULT"])
        self.report = Report()
        self.report.stage("weights", "attached", "as every time")
        self.report.finish()

    def park(self) -> bool:
        self.parked = True
        self._say("parked")
        return True

    def unpark(self) -> dict[str, float]:
        begin = time.perf_counter()
        if self.parked:
            kind = self.fault.read_text() if self.fault.is_file() else ""
            if kind == "memory":
                raise OutOfMemory("the cache does not fit", why="3 bytes are free", needed=8, free=3)
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            while kind == "slow" and self.fault.is_file():
                self._say("backing")
                time.sleep(0.01)
            self.parked = False
        self._say("memory")
        return {"backing": time.perf_counter() - begin, "self_test": 0.0}

    def _say(self, what: str) -> None:
        with open(self.fault.with_name("memory"), "a", encoding="utf-8") as file:
            file.write(f"{what} {os.getpid()}\n")


def load(rows: int, parked: bool) -> tuple[Model, Engine]:
    return ArithmeticModel(rows), Engine(parked)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    arguments = parser.parse_args()
    duty.run(lambda parked: load(arguments.rows, parked), arguments.socket, worker.connect)
