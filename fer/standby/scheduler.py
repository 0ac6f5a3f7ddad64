"""Who decodes next: the engine's thread, with as many answers at once as the engine has rows.

Requests wait in the order in which they came, after answers that an engine before this one began. A free row takes the
next one, its prompt is read between two steps, and every step gives each running answer one token. Answers that the
cache holds are all taken up before the next step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from fer.errors import OptionError
from fer.memory.patience import lacks_memory
from fer.standby.text import TextStream
from fer.standby.wire import Differed, Ended, Event, Failed, Piece

if TYPE_CHECKING:
    from fer.engines.decode import TransformersGraphs
    from fer.engines.transformers import TransformersEngine
    from fer.standby.ledger import Ledger


class Rows(Protocol):
    """An engine that decodes a number of rows at once.

    Attributes:
        count: how many.
    """

    count: int

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        """Read a prompt into a row, for at most ``limit`` new tokens; the first of them."""

    def advance(self, active: int) -> list[int]:
        """The next token of each of the first ``active`` rows."""

    def move(self, source: int, target: int) -> None:
        """Let row ``target`` be what ``source`` was."""

    def resume(self, row: int, ids: Sequence[int]) -> bool:
        """Let a row go on after these tokens, if the cache holds all of them but the last: the next step takes that in.

        Returns:
            False where it does not hold them; the row is as before.
        """

    def rest(self) -> float | None:
        """No answer is under way, and none was for a while: do some of what the next ones would wait for.

        Returns:
            seconds after which there is more to do, if none comes; None for nothing more.
        """


class RankRows(Rows, Protocol):
    """Rows of one rank of an engine. All ranks take the same steps, of the same width."""

    def width(self, active: int) -> int:
        """Rows that a step of the first ``active`` ones computes."""

    def advance(self, active: int, width: int | None = None) -> list[int]:
        """As for :class:`Rows`; ``width`` is what another rank has chosen."""


class OneRow:
    """An engine without decode graphs: one answer at a time."""

    count = 1

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self._stream: Iterator[int] = iter(())

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        self._stream = self._engine.stream(ids, max_new_tokens=limit, stop=False)
        return next(self._stream)

    def width(self, active: int) -> int:
        return 1

    def advance(self, active: int, width: int | None = None) -> list[int]:
        return [next(self._stream)]

    def move(self, source: int, target: int) -> None:
        """There is only one."""

    def resume(self, row: int, ids: Sequence[int]) -> bool:
        """Its cache ends with the process."""
        return False

    def rest(self) -> None:
        """Its start has done everything."""


class SlotRows:
    """The slots of an engine that decodes a list of batch sizes.

    Attributes:
        ledger: what the rows hold is written down here, if it is to outlive the process.
        kept: rows that hold what an engine before this one left, until they are used.
    """

    def __init__(self, decode: TransformersGraphs) -> None:
        self.count, self._decode = decode.rows, decode
        self.length = decode.length
        self.ledger: Ledger | None = None
        self.kept: set[int] = set()

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        if self.ledger is None:
            return self._decode.prompt(row, ids)
        self._make_way(row)
        self.ledger.empty(row)
        token = self._decode.prompt(row, ids)
        self.ledger.fill(row, ids, token)
        return token

    def width(self, active: int) -> int:
        return self._decode.step_size(active)

    def advance(self, active: int, width: int | None = None) -> list[int]:
        made = self._decode.advance(active, width)
        if self.ledger is not None:
            self.ledger.step(made)
        return made

    def move(self, source: int, target: int) -> None:
        with self.ledger.moving(source, target) if self.ledger is not None else contextlib.nullcontext():
            self._decode.move(source, target)
        self.kept.discard(target)

    def resume(self, row: int, ids: Sequence[int]) -> bool:
        # Rows before this one are at work; those behind it hold what they held, but for the last position.
        found = self.ledger.find(ids, sorted(self.kept)) if self.ledger is not None else None
        if found is None or self.ledger is None:
            return False
        if found != row:
            with self.ledger.swapping(row, found):
                self._decode.swap(row, found)
            self.kept = {found if each == row else each for each in self.kept if each != found}
        self.kept.discard(row)
        self._decode.resume(row, ids[-1], len(ids) - 1)
        self.ledger.fill(row, ids[:-1], ids[-1])
        return True

    def _make_way(self, row: int) -> None:
        """A row that somebody may still come for goes to where nobody does, if there is such a place."""
        free = next((other for other in range(row + 1, self.count) if other not in self.kept), None)
        if row in self.kept and free is not None and self.ledger is not None:
            with self.ledger.swapping(row, free):
                self._decode.swap(row, free)
            self.kept.add(free)
        self.kept.discard(row)

    def rest(self) -> float | None:
        # A start at once takes no prompt: what that loads, answers that are under way would wait for.
        if not self._decode.prompted:
            try:
                with self.ledger.aside(0) if self.ledger is not None else contextlib.nullcontext():
                    self._decode.first_prompt(0)
            except Exception as error:
                if not lacks_memory(error):
                    raise
                log.warning("a first prompt has no memory, and is taken by the next request: %s", error)
                return None
        if self._decode.restoring:
            return REST_S
        if not self._decode.lacking:
            return None
        # To capture takes steps of as many rows, which write to them.
        if self.ledger is not None:
            for row in self.ledger.held():
                self.ledger.empty(row)
        self.kept.clear()
        self._decode.settle(most=1)
        return 0.0 if self._decode.lacking else None


def rows_of(engine: TransformersEngine) -> RankRows:
    """The engine's rows, after it was recovered."""
    decode = engine.graphs()
    return OneRow(engine) if decode is None else SlotRows(decode)


class Job:
    """One answer in the making.

    Args:
        ids: the prompt.
        limit: most tokens of the whole answer, those of ``known`` among them.
        text: the answer's text so far, that of ``known`` included.
        known: tokens that an earlier worker made.
        replay: make the known ones again and compare, rather than read them with the prompt.

    Attributes:
        prompt: what is read next: the prompt, or the prompt and the known tokens.
        made: tokens of the answer that are there when that has been read.
    """

    def __init__(
        self, ids: Sequence[int], limit: int, text: TextStream, *, known: Sequence[int] = (), replay: bool = False
    ) -> None:
        self.prompt = [*ids] if replay else [*ids, *known]
        self.limit, self.text = limit, text
        self.made = 0 if replay else len(known)
        self.cancelled = False
        self._ids, self._known = ids, [*known]
        self._again = len(known) if replay else 0  # of the known ones, how many are still to be made again

    def held(self) -> list[int]:
        """All tokens of an answer that an earlier worker began, which its cache may hold; none for a new one."""
        return [*self._ids, *self._known] if self._known else []

    def resumed(self) -> None:
        """The cache holds all of it: nothing is read or made again."""
        self.made, self._again = len(self._known), 0

    def take(self, token: int, ends: frozenset[int]) -> tuple[list[Event], bool]:
        """What one more token means: events for the client, and whether it was the last."""
        if self._again:
            place = len(self._known) - self._again
            if token != self._known[place]:
                self.prompt, self.made, self._again = [*self.prompt, *self._known], len(self._known), 0
                return [Differed(place)], False
            self.made, self._again = self.made + 1, self._again - 1
            return [], False
        if token in ends:
            return self._last([], self.text.end(), "stop"), True
        self.made += 1
        shown = self.text.add(token)
        if self.text.stopped:
            return self._last([token], shown, "stop"), True
        if self.made >= self.limit:
            return self._last([token], shown + self.text.end(), "stop" if self.text.stopped else "length"), True
        return [Piece([token], shown)], False

    @staticmethod
    def _last(ids: list[int], text: str, reason: Any) -> list[Event]:
        piece: list[Event] = [Piece(ids, text)] if ids or text else []
        return [*piece, Ended(reason)]


log = logging.getLogger("fer.standby")

REST_S: Final = 1.0
"""Seconds without an answer after which rows do what there was no time for."""

Deliver = Callable[[list[tuple[Job, list[Event]]]], None]
"""Takes the events of one step. Called from the engine's thread."""


class Scheduler:
    """Runs the engine for all jobs, in the thread that calls :meth:`run`.

    An error of the engine ends :meth:`run`: what a failed step left behind, on a GPU above all, is not to be trusted,
    and a worker that ends is started again.

    Args:
        ends: tokens that end an answer.
        deliver: where events go.
    """

    def __init__(self, rows: Rows, ends: frozenset[int], deliver: Deliver) -> None:
        self._rows, self._ends, self._deliver = rows, ends, deliver
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []  # by row
        self._change = threading.Condition()
        self._stopped = False
        self._rest_s: float | None = REST_S

    def submit(self, job: Job) -> None:
        """Queue a job. From any thread."""
        with self._change:
            self._waiting.append(job)
            self._change.notify()

    def stop(self) -> None:
        """Have :meth:`run` return after the step it is in. From any thread."""
        with self._change:
            self._stopped = True
            self._change.notify()

    def reset(self) -> None:
        """Forget a stop that came while nothing ran. From the thread that calls :meth:`run`."""
        with self._change:
            self._stopped = False

    def run(self) -> None:
        """Decode until stopped; may be run again. Jobs that are left then are forgotten."""
        while True:
            with self._change:
                idle = not self._change.wait_for(lambda: self._stopped or self._waiting or self._running, self._rest_s)
                if self._stopped:
                    self._stopped = False
                    self._waiting.clear()
                    self._running.clear()
                    return
            self._rest_s = self._rows.rest() if idle else REST_S
            # One prompt a step: running answers go on while others come in. What the cache holds needs no prompt.
            while (job := self._next()) is not None and not self._begin(job):
                pass
            self._drop(lambda job: job.cancelled)
            if self._running:
                self._step()

    def _next(self) -> Job | None:
        """The next job for a free row, which nobody has cancelled: first of those that another engine began."""
        with self._change:
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
            if not self._waiting or len(self._running) == self._rows.count:
                return None
            job = next((job for job in self._waiting if job.held()), self._waiting[0])
            self._waiting.remove(job)
            return job

    def _begin(self, job: Job) -> bool:
        """Give a job the next row; whether a prompt was read for that."""
        row = len(self._running)
        self._running.append(job)
        held = job.held()
        if held and self._rows.resume(row, held):
            job.resumed()
            return False
        try:
            token = self._rows.begin(row, job.prompt, job.limit - job.made)
        except OptionError as error:
            self._running.pop()
            self._deliver([(job, [Failed(400, str(error))])])
            return True
        self._hand_out([token], row)
        return True

    def _step(self) -> None:
        self._hand_out(self._rows.advance(len(self._running)), 0)

    def _hand_out(self, tokens: Sequence[int], first: int) -> None:
        done, events = set(), []
        for row, token in enumerate(tokens, first):
            job = self._running[row]
            made, last = job.take(token, self._ends)
            if made and isinstance(made[0], Differed):
                more, last = job.take(self._rows.begin(row, job.prompt, job.limit - job.made), self._ends)
                made += more
            if made:
                events.append((job, made))
            if last:
                done.add(job)
        if events:
            self._deliver(events)
        self._drop(done.__contains__)

    def _drop(self, ended: Callable[[Job], bool]) -> None:
        """Free the rows of jobs; the last running ones move into the gaps."""
        for row in range(len(self._running) - 1, -1, -1):
            if ended(self._running[row]):
                last = len(self._running) - 1
                if row != last:
                    self._rows.move(last, row)
                    self._running[row] = self._running[last]
                self._running.pop()
