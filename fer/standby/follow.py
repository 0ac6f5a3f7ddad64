"""A rank of an engine other than the first: it answers nobody, and takes the steps that rank 0 takes."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fer.errors import FerBug, OptionError, OutOfMemory
from fer.standby import rank_wire, wire
from fer.standby.cohort import Link, join, meeting_place, watch
from fer.standby.supervised import Supervised, guarded, plain

if TYPE_CHECKING:
    from fer.standby.lead import Halves, Load
    from fer.standby.scheduler import RankRows


def run(load: Load, path: Path, rank: int, world: int) -> NoReturn:
    """Follow rank 0 of the engine that answers at ``path``, in this thread; ends with the process."""
    orders: queue.SimpleQueue[wire.Order] = queue.SimpleQueue()
    supervised = Supervised(orders.put)
    supervised.say(wire.Begun(time.monotonic_ns(), orders=True))
    stand = orders.get()
    assert isinstance(stand, wire.Stand), "the supervisor says first how to start"
    with guarded(supervised):
        link = join(meeting_place(path), rank, world)
        watch([link], ["rank 0"])
        model, engine = load(stand)
    rows: RankRows = model.rows  # type: ignore[assignment]  # what Load promises
    report = engine.report.to_json()
    supervised.say(wire.Ready(time.monotonic_ns(), model.context, rows.count, report))
    with guarded(supervised):
        Follower(link, rows, engine).run()
    os._exit(1)  # rank 0 has gone


class Follower:
    """Does what rank 0 says."""

    def __init__(self, link: Link, rows: RankRows, engine: Halves) -> None:
        self._link, self._rows, self._engine = link, rows, engine
        self._last = [0] * rows.count

    def run(self) -> None:
        """Until rank 0 is gone. Between orders this sleeps in the kernel, however long that is."""
        while line := self._link.receive():
            order = rank_wire.order(line)
            if isinstance(order, rank_wire.Begin | rank_wire.Advance | rank_wire.Move):
                self._step(order)
            else:
                self._link.send(self._do(order))

    def _step(self, order: rank_wire.Begin | rank_wire.Advance | rank_wire.Move) -> None:
        if isinstance(order, rank_wire.Begin):
            with contextlib.suppress(OptionError):  # rank 0 refuses it for the same reason
                self._last[order.row] = self._rows.begin(order.row, order.ids, order.limit)
        elif isinstance(order, rank_wire.Move):
            self._rows.move(order.source, order.target)
            self._last[order.target] = self._last[order.source]
        else:
            active = len(order.tokens)
            if self._last[:active] != order.tokens:
                why = f"rank 0 made {order.tokens}, and this one {self._last[:active]}"
                raise FerBug("the ranks of one engine made different tokens", why=why)
            self._last[:active] = self._rows.advance(active, order.width)

    def _do(self, order: rank_wire.Here | rank_wire.Back | rank_wire.Prove | rank_wire.Park) -> rank_wire.Answer:
        if isinstance(order, rank_wire.Back):
            try:
                self._engine.back()
            except OutOfMemory as error:
                return rank_wire.Lacking(plain(error))
        elif isinstance(order, rank_wire.Prove):
            self._engine.prove()
        elif isinstance(order, rank_wire.Park) and not self._engine.parked and not self._engine.park():
            return rank_wire.Kept()
        return rank_wire.Done()
