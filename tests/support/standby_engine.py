"""A worker of ``fer serve`` that takes orders, over the arithmetic of :mod:`tests.support.serve_engine`.

The file named by ``TEST_FAULT`` decides, at each promotion, how taking memory goes wrong:

* ``memory``: OutOfMemory; ``die``: the process is killed in the middle; ``slow``: it takes until the file is gone.

A file beside it lists what each process holds: a line ``memory PID`` for a promotion that got its memory.

``TEST_MODEL`` is the model's folder; ``salt`` in its configuration makes its answers other ones. A file ``NAME.fault``
beside the folder decides how engines of this model go wrong: ``usage``, ``library`` (a MemoryError) and ``die`` at the
start, ``slow`` a start that lasts until the file is gone, ``publish`` one that needs a piece more to publish,
``die-promote``, ``memory-promote``, and ``die-token`` with the first request.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from fer.errors import CheckpointError, OutOfMemory
from fer.report import Report
from fer.standby import duty, worker
from fer.standby.model import Model
from tests.support.pretended_room import Room
from tests.support.serve_engine import ArithmeticModel, ArithmeticRows


class Engine:
    """Pretends to have memory for answers, and says so in a file."""

    def __init__(self, parked: bool, room: Room, edition: str) -> None:
        published = fault_of_model() != "publish" or room.could("slab")
        self.parked, self._room = parked, room
        self.fault = Path(os.environ["TEST_FAULT"])
        self.report = Report()
        if published:
            self.report.stage("weights", "attached", "as every time", edition=edition)
        else:
            self.report.stage("weights", "loaded", "not published: no room for a slab", published=False)
        self.report.finish()
        if not parked:
            room.take("cache")

    def park(self) -> bool:
        self.parked = True
        self._room.give("cache")
        self._say("parked")
        return True

    cache, intact = None, False

    def settle(self) -> None:
        """It waits as it was started."""

    def conclude(self) -> None:
        """Nothing was left over."""

    def keep(self) -> None:
        """There is nothing to keep."""

    def unpark(self, kept: None = None) -> dict[str, float]:
        begin = time.perf_counter()
        if self.parked:
            kind = self.fault.read_text() if self.fault.is_file() else ""
            if kind == "memory" or fault_of_model() == "memory-promote":
                raise OutOfMemory("the cache does not fit", why="3 bytes are free", needed=8, free=3)
            if kind == "die" or fault_of_model() == "die-promote":
                os.kill(os.getpid(), signal.SIGKILL)
            while kind == "slow" and self.fault.is_file():
                self._say("backing")
                time.sleep(0.01)
            self._room.take("cache")
            self.parked = False
        self._say("memory")
        return {"backing": time.perf_counter() - begin, "self_test": 0.0}

    def _say(self, what: str) -> None:
        with open(self.fault.with_name("memory"), "a", encoding="utf-8") as file:
            file.write(f"{what} {os.getpid()}\n")


class Rows(ArithmeticRows):
    """Those of a model that may die of its first request."""

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        if fault_of_model() == "die-token":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().begin(row, ids, limit)


def model_folder() -> Path:
    return Path(os.environ["TEST_MODEL"])


def fault_of_model() -> str:
    try:
        return model_folder().with_suffix(".fault").read_text()
    except OSError:
        return ""


def load(rows: int, parked: bool) -> tuple[Model, Engine]:
    kind = fault_of_model()
    if kind == "usage":
        raise CheckpointError("the model folder is damaged", fix="Download it again")
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "library":
        raise MemoryError("an array of 1 TiB")
    while fault_of_model() == "slow":
        time.sleep(0.01)
    salt = int(json.loads((model_folder() / "config.json").read_text()).get("salt", 0))
    room = Room(Path(os.environ["TEST_FAULT"]).with_name("room"))
    room.take(f"weights-{model_folder().name}-{salt}")
    model = ArithmeticModel(rows, salt)
    model.rows = Rows(rows, salt)
    return model, Engine(parked, room, f"{model_folder().name}-{salt}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    arguments = parser.parse_args()
    duty.run(lambda stand: load(arguments.rows, stand.parked), arguments.socket, worker.connect)
