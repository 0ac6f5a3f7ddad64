"""A worker that takes orders: it stands by until it is promoted, serves, and may be parked again.

Promotion has an order of its own: the service is claimed, which nobody gets while a process of the engine before lives;
the cache gets its memory, that of the engine before where it fits; one token proves that the engine decodes; only then
the front is told.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from fer.errors import KeeperError, OutOfMemory, ServiceHeld
from fer.standby import wire
from fer.standby.answers import Answers, listen
from fer.standby.estate import CacheEstate
from fer.standby.scheduler import SlotRows
from fer.standby.supervised import Supervised, end_with, guarded, plain
from fer.weights.services import Tenure, hold, this_process
from fer.weights.wire import Process

if TYPE_CHECKING:
    from fer.memory.kept import KeptMemory
    from fer.report import Report
    from fer.standby.model import Model
    from fer.weights.client import KeeperClient


class Parking(Protocol):
    """An engine that stands by or serves; :class:`fer.orchestrator.Recovered` is one.

    Attributes:
        parked: it has no memory for answers.
        intact: memory that it was given to go on with holds what it held.
    """

    parked: bool
    intact: bool

    @property
    def report(self) -> Report:
        """Of the start."""

    @property
    def cache(self) -> dict[str, Any] | None:
        """What has to be the same in an engine that goes on with this one's cache; None where none can."""

    def keep(self) -> KeptMemory | None:
        """The cache's memory as descriptors, the caller's."""

    def settle(self) -> None:
        """Nobody has it serve at once: do what else a start does for an engine that waits."""

    def conclude(self) -> None:
        """It serves: do what its start has left for after the first token."""

    def park(self) -> bool:
        """Give the memory back; whether it could."""

    def unpark(self, kept: KeptMemory | None = None) -> dict[str, float]:
        """Take it, or go on with what is kept, and make one token; seconds of ``backing`` and ``self_test``.

        Raises OutOfMemory: still parked.
        """


SPARE_S = 0.2
"""Seconds after which a worker that was not told how to start takes itself for a spare."""

LOOK_S = 30.0
"""Seconds between two looks of a spare at whether it is of use."""

AT_ONCE_S = 2.0
"""Seconds after which an engine that is ready and was not told to serve settles down to wait."""

Load = Callable[[wire.Stand], "tuple[Model, Parking]"]
"""Makes the engine, parked or ready to serve."""


def run(
    load: Load,
    path: Path,
    connect: Callable[[], KeeperClient],
    cohort: Callable[[], list[Process]] = lambda: [this_process()],
    imagine: Callable[[], None] = lambda: None,
    look: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Do as the supervisor says, in this thread; ends with the process.

    Args:
        path: where requests are answered, once this worker is promoted.
        connect: makes a connection to the keeper; raises KeeperError.
        cohort: all processes of this engine, this one first: they hold the service together, and end together.
        imagine: what to do of the start by one that is not told at once how to start: it is a spare.
        look: called every :data:`LOOK_S` while it waits: whether it is still of use. Ends the process where not.
    """
    Worker(connect, cohort).run(load, path, imagine, look)


class Worker:
    """One such process."""

    def __init__(self, connect: Callable[[], KeeperClient], cohort: Callable[[], list[Process]]) -> None:
        self._connect, self._cohort = connect, cohort
        self._orders: queue.SimpleQueue[wire.Order] = queue.SimpleQueue()
        self._answers: Answers | None = None
        self._tenure: Tenure | None = None
        self._estate: CacheEstate | None = None
        self._supervised = Supervised(self._hear)

    def _hear(self, order: wire.Order) -> None:
        """In the thread of the control socket: the engine's may be decoding."""
        self._orders.put(order)
        if isinstance(order, wire.Park) and self._answers is not None:
            self._answers.scheduler.stop()

    def run(self, load: Load, path: Path, imagine: Callable[[], None], look: Callable[[], None]) -> NoReturn:
        say = self._supervised.say
        say(wire.Begun(time.monotonic_ns(), orders=True))
        try:
            stand = self._orders.get(timeout=SPARE_S)
        except queue.Empty:
            imagine()
            stand = self._wait(look)
        assert isinstance(stand, wire.Stand), "the supervisor says first how to start"
        say(wire.Told())  # by each: a spare may be told before it takes itself for one

        with guarded(self._supervised):
            model, engine = load(stand)
            if stand.keep and stand.service and isinstance(model.rows, SlotRows):
                self._estate = CacheEstate(engine, model.rows, stand.guardian)
            self._answers = answers = Answers(model, open=False)
            sock = listen(path)
        threading.Thread(target=end_with, args=(lambda: answers.run(sock),), name="answers", daemon=True).start()
        report = engine.report.to_json()
        say(wire.Ready(time.monotonic_ns(), model.context, model.rows.count, report))
        with guarded(self._supervised):
            self._obey(stand.service, engine, answers)

    def _wait(self, look: Callable[[], None]) -> wire.Order:
        """The first order of one that was told nothing for long."""
        while True:
            try:
                return self._orders.get(timeout=LOOK_S)
            except queue.Empty:
                look()

    def _obey(self, service: str, engine: Parking, answers: Answers) -> NoReturn:
        limit_s: float | None = AT_ONCE_S
        while True:
            try:
                order = self._orders.get(timeout=limit_s)
            except queue.Empty:
                engine.settle()
                continue
            finally:
                limit_s = None
            if isinstance(order, wire.Promote):
                try:
                    said: wire.Control = self._promote(service, engine, order)
                except (OutOfMemory, KeeperError) as error:  # all else ends the process: who knows what it left
                    sys.stderr.write(f"fer: cannot serve now: {error}\n")
                    said = wire.Unpromoted(plain(error))
                else:
                    answers.admit()
                self._supervised.say(said)
                if isinstance(said, wire.Unpromoted):
                    engine.settle()
                if isinstance(said, wire.Promoted):
                    later = threading.Timer(AT_ONCE_S, engine.conclude)  # requests come first
                    later.daemon = True
                    later.start()
                    answers.scheduler.run()  # until a Park, which is the next order then
            elif isinstance(order, wire.Park):
                answers.shut()
                answers.scheduler.reset()
                if self._estate is not None:
                    self._estate.forget()
                freed = engine.park()
                if self._tenure is not None:
                    self._tenure.release(pass_on=True)  # after the memory is free: the next one needs it
                    self._tenure = None
                self._supervised.say(wire.Parked(time.monotonic_ns(), freed))

    def _promote(self, service: str, engine: Parking, order: wire.Promote) -> wire.Promoted:
        """Raises ServiceHeld, OutOfMemory: it stands by as before."""
        begin = time.perf_counter()
        tenure = None
        if service:
            processes = self._cohort()
            tenure = hold(service, connect=self._connect, wait_s=order.wait_s, processes=processes, lost=_lost)
        claimed = time.perf_counter()
        kept = None
        try:
            if self._estate is not None and tenure is not None:
                kept = self._estate.take(tenure, trust=order.trust)
            elif tenure is not None:
                tenure.decline_estate()
            parts = engine.unpark(kept)
            if self._estate is not None and tenure is not None:
                self._estate.settle(tenure, kept)
        except OutOfMemory:
            if tenure is not None:
                tenure.release(pass_on=kept is None)  # what could not be gone on with may be what lacks
            raise
        finally:
            if kept is not None:
                kept.close()
        self._tenure = tenure
        return wire.Promoted(
            at=time.monotonic_ns(),
            claim_s=claimed - begin,
            fence_s=tenure.fence_s if tenure is not None else 0.0,
            backing_s=parts["backing"],
            self_test_s=parts["self_test"],
            by=tenure.by if tenure is not None else "",
            kept_rows=len(self._estate.kept) if self._estate is not None else 0,
            keeps=self._estate is not None and self._estate.left,
        )


def _lost(why: str) -> NoReturn:
    """Another serves in our place: whatever the reason, two must not."""
    sys.stderr.write(f"fer: this engine ends: {ServiceHeld('the service is no longer its own', why=why)}\n")
    sys.stderr.flush()
    os._exit(1)
