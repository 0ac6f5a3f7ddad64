"""A worker of ``fer serve --tp`` over the arithmetic of :mod:`tests.support.serve_engine`, without torch.

Its ranks need each other at every token as those of a real one do: each sends the other its own and waits for the
other's, in a read that nothing interrupts.

The file named by ``TEST_FAULT`` holds a kind and a rank, such as ``die 1``, or ``die_once``, which removes the file:

* ``start``: the rank is killed while it starts, where the other waits for it; ``memory``: it lacks memory whenever it
  is promoted; ``die``: it is killed then; ``slow``: it takes until the file is gone; ``other``: its tokens are others;
  ``step``: a step of its warm-up lacks memory, which the other has begun.

A file beside it lists what each process holds, as with :mod:`tests.support.standby_engine`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fer.errors import OutOfMemory
from fer.report import Report
from fer.standby import cohort, follow, lead, wire, worker
from fer.standby.model import Model
from tests.support.serve_engine import ArithmeticModel, ArithmeticRows


def fault(rank: int, *asked: str) -> str:
    """The kind of fault that a rank is to have now, if it is one of these."""
    path = Path(os.environ["TEST_FAULT"])
    kind, _, whose = path.read_text().partition(" ") if path.is_file() else ("", "", "")
    if not kind or int(whose) != rank or kind.removesuffix("_once") not in asked:
        return ""
    if kind.endswith("_once"):
        path.unlink()
    return kind.removesuffix("_once")


class Together:
    """What two ranks exchange at every step: a collective of theirs."""

    def __init__(self, path: Path, rank: int) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            if rank == 0:
                sock.bind(str(path))
                sock.listen(1)
                self._sock, _ = sock.accept()
                return
            while sock.connect_ex(str(path)):
                time.sleep(0.002)
            self._sock = sock.dup()

    def sum(self, token: int) -> int:
        """Of both ranks."""
        self._sock.sendall(token.to_bytes(4, "little"))
        data = self._sock.recv(4, socket.MSG_WAITALL)
        if len(data) < 4:
            raise RuntimeError("connection closed by peer")
        return token + int.from_bytes(data, "little")


class Rows(ArithmeticRows):
    """Both ranks make the same token, and each needs the other's."""

    def __init__(self, count: int, together: Together, rank: int) -> None:
        super().__init__(count)
        self._together, self._rank = together, rank

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        return self._agreed([super().begin(row, ids, limit)])[0]

    def width(self, active: int) -> int:
        return active

    def advance(self, active: int, width: int | None = None) -> list[int]:
        assert width == active, "rank 0 says how wide"
        return self._agreed(super().advance(active))

    def _agreed(self, tokens: list[int]) -> list[int]:
        made = [self._together.sum(token) // 2 for token in tokens]
        return [token + 1 for token in made] if fault(self._rank, "other") else made


class Engine:
    """One rank; it pretends to have memory for answers, and says so in a file."""

    def __init__(self, parked: bool, together: Together, rank: int) -> None:
        self.parked, self._together, self._rank = parked, together, rank
        self.report = Report()
        self.report.stage("weights", "attached", "as every time")
        self.report.finish()

    def park(self) -> bool:
        self.parked = True
        self._say("parked")
        return True

    def back(self, kept: None = None) -> None:
        kind = fault(self._rank, "memory", "die")
        if kind == "memory":
            raise OutOfMemory("the cache does not fit", why="3 bytes are free", needed=8, free=3)
        if kind == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while fault(self._rank, "slow"):
            self._say("backing")
            time.sleep(0.01)
        self.parked = False
        self._say("memory")

    def prove(self) -> None:
        assert self._together.sum(1) == 2

    cache, intact = None, False

    def settle(self) -> None:
        """It waits as it was started."""

    def conclude(self) -> None:
        """Nothing was left over."""

    def keep(self) -> None:
        """There is nothing to keep."""

    def unpark(self, kept: None = None) -> dict[str, float]:
        raise AssertionError("ranks are not unparked one by one")

    def _say(self, what: str) -> None:
        with open(Path(os.environ["TEST_FAULT"]).with_name("memory"), "a", encoding="utf-8") as file:
            file.write(f"{what} {os.getpid()}\n")


def load(rows: int, parked: bool, path: Path, rank: int) -> tuple[Model, Engine]:
    kind = fault(rank, "start", "step")
    if kind == "start":
        os.kill(os.getpid(), signal.SIGKILL)
    together = Together(cohort.store(path), rank)
    if kind == "step":
        raise OutOfMemory("a step of 4 rows needs more memory than this rank has", needed=8, free=3)
    together.sum(0)  # the warm-up
    model: Any = ArithmeticModel(rows)
    model.rows = Rows(rows, together, rank)
    return model, Engine(parked, together, rank)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    chosen = parser.parse_args()
    vars(lead)["ANSWER_S"] = 0.5  # nobody here needs longer
    if "torch" in sys.modules:
        raise SystemExit("the worker's own part must not need torch")

    def made(stand: wire.Stand) -> tuple[Model, Engine]:
        return load(chosen.rows, stand.parked, chosen.socket, chosen.rank)

    if chosen.rank == 0:
        lead.run(made, chosen.socket, worker.connect, chosen.world)
    follow.run(made, chosen.socket, chosen.rank, chosen.world)


if __name__ == "__main__":
    main()
