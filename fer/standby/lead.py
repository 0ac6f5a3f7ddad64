"""Rank 0 of an engine of several processes: it answers, and has the others do as it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

from fer.errors import OutOfMemory, from_dict
from fer.standby import duty, rank_wire, wire
from fer.standby.cohort import ANSWER_S, WORK_S, Cohort, bounded, meeting_place
from fer.standby.scheduler import RankRows

if TYPE_CHECKING:
    from fer.memory.kept import KeptMemory
    from fer.report import Report
    from fer.standby.model import Model
    from fer.weights.client import KeeperClient


class Halves(duty.Parking, Protocol):
    """An engine of one rank; its promotion has two halves, as :class:`fer.orchestrator.Recovered` has them."""

    def back(self, kept: KeptMemory | None = None) -> None:
        """Take memory, without any other rank. Raises OutOfMemory: it is parked as before."""

    def prove(self) -> None:
        """Make one token, all ranks together."""


Load = Callable[[wire.Stand], "tuple[Model, Halves]"]
"""Makes one rank of the engine, parked or ready to serve; its rows are :class:`~fer.standby.scheduler.RankRows`."""


def run(load: Load, path: Path, connect: Callable[[], KeeperClient], world: int) -> NoReturn:
    """Do as the supervisor says, as :func:`fer.standby.duty.run`, with all ranks.

    Args:
        path: where requests are answered; the other ranks come to a path beside it.
    """
    cohort = Cohort(meeting_place(path), world)

    def led(stand: wire.Stand) -> tuple[Model, duty.Parking]:
        cohort.gather()
        model, engine = load(stand)
        rows: RankRows = model.rows  # type: ignore[assignment]  # what Load promises
        model.rows = LedRows(rows, cohort)
        return model, LedEngine(engine, cohort)

    duty.run(led, path, connect, lambda: cohort.processes)


class LedRows:
    """Rows that are decoded by all ranks: each is told of a step before this one takes it."""

    def __init__(self, rows: RankRows, cohort: Cohort) -> None:
        self.count, self._rows, self._cohort = rows.count, rows, cohort
        self._last = [0] * rows.count

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        self._cohort.tell(rank_wire.Begin(row, list(ids), limit))
        self._last[row] = token = self._rows.begin(row, ids, limit)
        return token

    def advance(self, active: int) -> list[int]:
        width = self._rows.width(active)
        self._cohort.tell(rank_wire.Advance(self._last[:active], width))
        self._last[:active] = made = self._rows.advance(active, width)
        return list(made)

    def move(self, source: int, target: int) -> None:
        self._cohort.tell(rank_wire.Move(source, target))
        self._rows.move(source, target)
        self._last[target] = self._last[source]

    def resume(self, row: int, ids: Sequence[int]) -> bool:
        """Each rank's cache ends with its process."""
        return False

    def rest(self) -> None:
        """Ranks have done everything in their start."""


class LedEngine:
    """An engine that stands by or serves with all its ranks, or with none."""

    def __init__(self, engine: Halves, cohort: Cohort) -> None:
        self._engine, self._cohort = engine, cohort
        self.parked, self.intact = engine.parked, False

    @property
    def report(self) -> Report:
        return self._engine.report

    @property
    def cache(self) -> None:
        """No engine after this one goes on with the caches of all ranks."""

    def keep(self) -> None:
        """They end with their processes."""

    def settle(self) -> None:
        """Ranks warm up in their start."""

    def conclude(self) -> None:
        """And have taken their first token in it."""

    def park(self) -> bool:
        self._call_the_roll()
        self._cohort.tell(rank_wire.Park())
        freed = [self._engine.park() if not self._engine.parked else True]
        freed += [isinstance(answer, rank_wire.Done) for _, answer in self._cohort.hear(WORK_S)]
        self.parked = all(freed)
        return self.parked

    def unpark(self, kept: KeptMemory | None = None) -> dict[str, float]:
        """Take memory on every rank, and make one token together; seconds of ``backing`` and ``self_test``.

        Raises:
            OutOfMemory: of this or another rank, which its field ``rank`` names; all ranks are parked as before.
            PeerRankFailed: a rank has gone or stands still. This process is to end then.
        """
        begin = time.perf_counter()
        self._call_the_roll()
        self._back()
        backed = time.perf_counter()
        self._cohort.tell(rank_wire.Prove())
        with bounded(WORK_S, "the first token of all ranks together"):
            self._engine.prove()
        self._cohort.hear(WORK_S)
        return {"backing": backed - begin, "self_test": time.perf_counter() - backed}

    def _call_the_roll(self) -> None:
        """A rank that stands still is found out now, and not after the time that work may take."""
        self._cohort.tell(rank_wire.Here())
        self._cohort.hear(ANSWER_S)

    def _back(self) -> None:
        self._cohort.tell(rank_wire.Back())
        short: list[tuple[int, OutOfMemory]] = []
        try:
            self._engine.back()
        except OutOfMemory as error:
            short.append((0, error))
        for rank, answer in self._cohort.hear(WORK_S):
            if isinstance(answer, rank_wire.Lacking):
                found = from_dict(answer.error)
                short.append((rank, OutOfMemory(found.what, why=found.why, fix=found.fix, **found.fields)))
        if not short:
            self.parked = False
            return
        self.park()
        rank, lack = short[0]
        raise OutOfMemory(
            f"rank {rank}: {lack.what}", why=lack.why, fix=lack.fix, **{**lack.fields, "rank": rank}
        ) from lack
