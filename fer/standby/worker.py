"""The engine's process under ``fer serve``: recovers, then answers on a private socket until it is ended.

Run as ``python -m fer.standby.worker --socket PATH --model PATH``, or several times with ``--rank N --world N``: then
rank 0 answers, and the others follow it (:mod:`fer.standby.lead`, :mod:`fer.standby.follow`). Descriptor 0 is the
control socket to the supervisor; when that closes, the supervisor has gone, and the worker ends wherever it is.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fer import warm
from fer.hush import hush
from fer.standby import tie, wire
from fer.standby.answers import Answers, listen
from fer.standby.supervised import Supervised, end_with, guarded
from fer.turns import short_turns

if TYPE_CHECKING:
    from fer.engines.transformers import TransformersEngine
    from fer.orchestrator import Imagined, Recovered
    from fer.report import Report
    from fer.standby.model import Model
    from fer.weights.client import KeeperClient


def run(load: Callable[[], tuple[Model, Report]], path: Path) -> NoReturn:
    """Serve what ``load`` makes at the socket ``path``, in this thread; ends with the process."""
    supervised = Supervised()
    supervised.say(wire.Begun(time.monotonic_ns()))
    with guarded(supervised):
        model, report = load()
        answers = Answers(model)
        sock = listen(path)
    # The engine stays in the thread that recovered it, which is the main one; the loop takes another.
    threading.Thread(target=end_with, args=(lambda: answers.run(sock),), name="answers", daemon=True).start()
    supervised.say(wire.Ready(time.monotonic_ns(), model.context, model.rows.count, report.to_json()))
    end_with(answers.scheduler.run)


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fer.standby.worker")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="auto", help="of several ranks one for all, or separated by commas")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--batch-sizes", default="", help="separated by commas")
    return parser.parse_args(arguments)


class Loader:
    """Makes the engine that a worker's arguments name; a spare makes some of it before it is told to start."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._device = arguments.device
        self._engine: TransformersEngine | None = None
        self._imagined: Imagined | None = None

    def imagine(self) -> None:
        """What a spare makes while it waits. It opens no device. What is wrong is told by the start."""
        from fer.engines.devices import foreseen
        from fer.memory import driver
        from fer.orchestrator import imagine

        if self._arguments.world > 1:
            return
        # The driver may have to say which device "auto" is, and says how a device multiplies quantised weights: who has
        # asked it has it in this process for good.
        self._imagined = imagine(None)
        with contextlib.suppress(Exception):
            config = json.loads((self._arguments.model / "config.json").read_text())
            device = foreseen(self._device)
            if device is not None and device.startswith("cuda"):
                driver.load()
            if device is not None and not config.get("quantization_config"):
                self._device = device
                engine = self._make()
                self._imagined, self._engine = imagine(engine), engine
        gc.freeze()

    def __call__(self, stand: wire.Stand) -> tuple[Model, Recovered]:
        """The engine, recovered. Raises what :func:`fer.recover` raises."""
        with short_turns():  # from its first thread on
            return self._start(stand)

    def _start(self, stand: wire.Stand) -> tuple[Model, Recovered]:
        from fer.memory.open import open_ahead
        from fer.options import Options
        from fer.orchestrator import recover_for_duty
        from fer.standby.model import TransformersModel

        options, alone = Options.load(), self._arguments.world == 1
        if options.mode != "off" and alone and self._device.startswith("cuda:"):
            open_ahead(self._device, options.transport)
        if self._imagined is not None:
            threading.Thread(target=_end_if_stale, name="stale", daemon=True).start()
        engine = self._engine or self._make()
        engine.keep_cache = alone and stand.keep
        engine.import_code()
        gc.freeze()  # modules live as long as the process: the collector need not visit them again
        with _few_threads() if stand.beside else contextlib.nullcontext():
            at_once = alone and not stand.beside
            recovered = recover_for_duty(engine, options, parked=stand.parked, at_once=at_once, imagined=self._imagined)
        return TransformersModel(engine), recovered

    def _make(self) -> TransformersEngine:
        from fer.engines.devices import of_rank
        from fer.engines.ranks import Launch
        from fer.engines.transformers import TransformersEngine
        from fer.standby.cohort import store

        arguments = self._arguments
        rank, world = arguments.rank, arguments.world
        device = of_rank(self._device, rank, world)
        launch = None
        if world > 1:
            launch = Launch(rank=rank, world=world, store=store(arguments.socket))
            os.environ.update(launch.variables(device))
            if device == "cpu":
                _share_processors(world)
        return TransformersEngine(
            arguments.model,
            device=device,
            tensor_parallel=world > 1,
            launch=launch,
            dtype=arguments.dtype,
            max_length=arguments.max_length,
            batch_sizes=[int(size) for size in arguments.batch_sizes.split(",") if size],
        )


def _end_if_stale() -> None:
    """A spare may have waited for long: of a template that has become another, its launcher would fork no engine."""
    if why := warm.stale():
        sys.stderr.write(f"fer: this spare engine ends: {why} changed since its launcher imported it\n")
        sys.stderr.flush()
        os._exit(1)


def _share_processors(world: int) -> None:
    """Ranks that compute at the same time with as many threads as there are processors wait for each other's."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))


@contextlib.contextmanager
def _few_threads() -> Iterator[None]:
    """While an engine that is to stand by warms up, another one answers: it needs the processors more."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def connect() -> KeeperClient:
    """A connection to the keeper, as the settings have it. Raises KeeperError."""
    from fer.errors import KeeperUnavailable
    from fer.options import Options
    from fer.weights import connect as way

    options = Options.load()
    if options.mode == "off":
        raise KeeperUnavailable("no keeper is asked", why="mode=off")
    client, why = way.connect(options, label="fer serve")
    if client is None:
        raise KeeperUnavailable("no keeper could be had", why=why)
    return client


def _log() -> None:
    """FER's log goes to stderr, which the supervisor shows. Libraries that complain on import do not."""
    logging.basicConfig(format="fer: %(message)s", level=logging.WARNING)
    logging.getLogger("fer").setLevel(logging.INFO)
    hush()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    chosen = _arguments(arguments)
    _log()
    if not tie.show_end_at_once():
        logging.getLogger("fer").info("the end of this process will show late: no descriptor can be held apart")

    made = Loader(chosen)
    if chosen.world == 1:
        from fer.standby import duty

        duty.run(made, chosen.socket, connect, imagine=made.imagine, look=_end_if_stale)
    from fer.standby import follow, lead

    if chosen.rank == 0:
        lead.run(made, chosen.socket, connect, chosen.world)
    follow.run(made, chosen.socket, chosen.rank, chosen.world)


if __name__ == "__main__":
    main()
