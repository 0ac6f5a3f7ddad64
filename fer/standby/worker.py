"""The engine's process under ``fer serve``: recovers, then answers on a private socket until it is ended.

Run as ``python -m fer.standby.worker --socket PATH --model PATH``. Descriptor 0 is the control socket to the
supervisor; when that closes, the supervisor has gone, and the worker ends wherever it is.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fer.errors import FerError, UsageError
from fer.standby import wire
from fer.standby.answers import Answers, listen

if TYPE_CHECKING:
    from fer.report import Report
    from fer.standby.model import Model


class Supervised:
    """The control socket. A thread waits for its end from the beginning: imports and loads take long."""

    def __init__(self) -> None:
        self._sock = socket.socket(fileno=os.dup(0))
        self._sock.setblocking(True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        threading.Thread(target=self._watch, name="supervised", daemon=True).start()

    def say(self, message: wire.Control) -> None:
        """Tell the supervisor. It may have gone: then the watch ends this process."""
        try:
            self._sock.sendall(wire.line(message))
        except OSError:
            pass

    def _watch(self) -> NoReturn:
        try:
            while self._sock.recv(1 << 10):
                pass
        except OSError:
            pass
        os._exit(1)


def run(load: Callable[[], tuple[Model, Report]], path: Path) -> NoReturn:
    """Serve what ``load`` makes at the socket ``path``, in this thread; ends with the process."""
    supervised = Supervised()
    supervised.say(wire.Begun(time.monotonic_ns()))
    try:
        model, report = load()
        answers = Answers(model)
        sock = listen(path)
    except FerError as error:
        supervised.say(wire.Broken(_plain(error)))
        sys.stderr.write(f"fer: {error}\n")
        sys.stderr.flush()
        os._exit(2 if isinstance(error, UsageError) else 1)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    # The engine stays in the thread that recovered it, which is the main one; the loop takes another.
    threading.Thread(target=_end_with, args=(lambda: answers.run(sock),), name="answers", daemon=True).start()
    supervised.say(wire.Ready(time.monotonic_ns(), model.context, model.rows.count, report.to_json()))
    _end_with(answers.scheduler.run)


def _end_with(work: Callable[[], None]) -> NoReturn:
    """Do one of the two things this process is for; without either it is of no use."""
    status = 0
    try:
        work()
    except BaseException:
        traceback.print_exc()
        status = 1
    # Not through the interpreter's end: after an error of a GPU the tidying up of libraries may wait for ever.
    sys.stderr.flush()
    os._exit(status)


def _plain(error: FerError) -> dict[str, object]:
    import json

    return dict(json.loads(json.dumps(error.to_dict(), default=str)))


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fer.standby.worker")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--batch-sizes", default="", help="separated by commas")
    return parser.parse_args(arguments)


def load(arguments: argparse.Namespace) -> tuple[Model, Report]:
    """The engine that the arguments name, recovered. Raises what :func:`fer.recover` raises."""
    import gc

    import fer
    from fer.engines.devices import resolve
    from fer.engines.transformers import TransformersEngine
    from fer.standby.model import TransformersModel

    engine = TransformersEngine(
        arguments.model,
        device=resolve(arguments.device),
        dtype=arguments.dtype,
        max_length=arguments.max_length,
        batch_sizes=[int(size) for size in arguments.batch_sizes.split(",") if size],
    )
    engine.import_code()
    gc.freeze()  # modules live as long as the process: the collector need not visit them again
    report = fer.recover(engine)
    return TransformersModel(engine), report


def _log() -> None:
    """FER's log goes to stderr, which the supervisor shows. Libraries that complain on import do not."""
    import logging

    logging.basicConfig(format="fer: %(message)s", level=logging.WARNING)
    logging.getLogger("fer").setLevel(logging.INFO)
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    chosen = _arguments(arguments)
    _log()
    run(lambda: load(chosen), chosen.socket)


if __name__ == "__main__":
    main()
