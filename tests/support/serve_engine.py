"""A worker of ``fer serve`` whose model is arithmetic: it starts in a moment, and its answers can be foretold.

The file named by ``TEST_FAULT`` decides how a start fails; it is read at each start:

* ``import``: an ImportError; ``usage``: an error of the user's making; ``silent``: it never becomes ready.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fer.errors import CheckpointError
from fer.report import Report
from fer.standby import worker
from fer.standby.model import Model
from fer.standby.wire import Message

CONTEXT, VOCABULARY, END = 512, 256, 0
STEP_S = 0.004
"""Seconds a step takes, so that something can happen in the middle of an answer."""


def following(ids: Sequence[int], salt: int = 0) -> int:
    """The token after these, a small letter; ``salt`` stands for a model's weights."""
    mixed = salt
    for token in ids[-8:]:
        mixed = (mixed * 31 + token + 7) % 10007
    return 97 + (mixed + len(ids)) % 26


def expected(prompt: str, count: int, salt: int = 0) -> str:
    """What a worker answers."""
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(following(ids, salt))
    return bytes(ids[len(prompt.encode()) :]).decode()


class ArithmeticRows:
    """Several answers at a time."""

    def __init__(self, count: int, salt: int = 0) -> None:
        self.count, self._salt = count, salt
        self._ids: list[list[int]] = [[] for _ in range(count)]

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        text = bytes(ids).decode("utf-8", "replace")
        if "poison" in text:
            os._exit(9)
        if "hang" in text:
            signal.pause()
        if "raise" in text:
            raise RuntimeError("the device has fallen off the bus")
        self._ids[row] = list(ids)
        return self._next(row)

    def advance(self, active: int) -> list[int]:
        time.sleep(STEP_S)
        return [self._next(row) for row in range(active)]

    def resume(self, row: int, ids: Sequence[int]) -> bool:
        return False

    def rest(self) -> None: ...

    def move(self, source: int, target: int) -> None:
        self._ids[target] = self._ids[source]

    def _next(self, row: int) -> int:
        self._ids[row].append(following(self._ids[row], self._salt))
        return self._ids[row][-1]


class ArithmeticModel:
    """Bytes are tokens."""

    context, vocabulary, ends = CONTEXT, VOCABULARY, frozenset({END})

    def __init__(self, rows: int, salt: int = 0) -> None:
        self.rows = ArithmeticRows(rows, salt)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("".join(f"{message.role}: {message.content}\n" for message in messages))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


def load(rows: int) -> tuple[Model, Report]:
    fault = Path(os.environ.get("TEST_FAULT", ""))
    kind = fault.read_text() if fault.is_file() else ""
    if kind == "import":
        raise ImportError("libmissing.so.1: cannot open shared object file")
    if kind == "usage":
        raise CheckpointError("the model folder is damaged", fix="Download it again")
    if kind == "silent":
        signal.pause()
    report = Report()
    report.stage("weights", "attached", "as every time")
    report.finish()
    return ArithmeticModel(rows), report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=4)
    arguments = parser.parse_args()
    if "torch" in sys.modules:
        raise SystemExit("the worker's own part must not need torch")
    worker.run(lambda: load(arguments.rows), arguments.socket)
