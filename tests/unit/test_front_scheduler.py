"""Rows are shared by answers of any length, in the order in which they came, and what nobody waits for ends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from fer.standby import scheduler
from fer.standby.scheduler import Job, Scheduler
from fer.standby.text import TextStream
from fer.standby.wire import Differed, Ended, Event, Failed, Piece
from tests.support.keeper import wait_until
from tests.support.serve_engine import following

END = 122
"""``z``, which ends an answer in some tests."""


class Rows:
    """Arithmetic, which notes what was asked of it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.ids: dict[int, list[int]] = {}
        self.most = self.steps = 0
        self.order: list[str] = []
        self.rests: list[float] = []

    def begin(self, row: int, ids: Sequence[int], limit: int) -> int:
        self.order.append(bytes(ids).decode())
        self.ids[row] = list(ids)
        return self._next(row)

    def advance(self, active: int) -> list[int]:
        self.steps += 1
        self.most = max(self.most, active)
        return [self._next(row) for row in range(active)]

    def resume(self, row: int, ids: Sequence[int]) -> bool:
        return False

    def rest(self) -> float | None:
        self.order.append("rest")
        return self.rests.pop() if self.rests else None

    def move(self, source: int, target: int) -> None:
        assert target < source
        self.ids[target] = list(self.ids[source])

    def _next(self, row: int) -> int:
        self.ids[row].append(following(self.ids[row]))
        return self.ids[row][-1]


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode()


def answer(prompt: str, limit: int, ends: frozenset[int] = frozenset()) -> tuple[list[int], str]:
    ids = list(prompt.encode())
    made: list[int] = []
    while len(made) < limit:
        token = following([*ids, *made])
        if token in ends:
            return made, "stop"
        made.append(token)
    return made, "length"


class Played:
    """A scheduler that runs until every job has ended."""

    def __init__(self, rows: Rows, jobs: Sequence[Job], ends: frozenset[int] = frozenset()) -> None:
        self.events: dict[Job, list[Event]] = {job: [] for job in jobs}
        self.scheduler = Scheduler(rows, ends, self.deliver)
        for job in jobs:
            self.scheduler.submit(job)
        thread = threading.Thread(target=self.scheduler.run, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    def deliver(self, events: list[tuple[Job, list[Event]]]) -> None:
        for job, made in events:
            self.events[job] += made
        if all(found and isinstance(found[-1], Ended | Failed) for found in self.events.values()):
            self.scheduler.stop()

    def of(self, job: Job) -> tuple[list[int], str]:
        *pieces, last = self.events[job]
        assert isinstance(last, Ended), last
        return [token for piece in pieces if isinstance(piece, Piece) for token in piece.ids], last.reason


def job(prompt: str, limit: int, *, known: Sequence[int] = (), replay: bool = False) -> Job:
    text = TextStream(decode)
    for token in known:
        text.add(token)
    return Job(list(prompt.encode()), limit, text, known=known, replay=replay)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("ends", [frozenset[int](), frozenset({END, 101})])
def test_answers_of_different_lengths_share_the_rows(count: int, ends: frozenset[int]) -> None:
    prompts = {f"prompt {number}": 1 + (number * 13) % 40 for number in range(12)}
    jobs = {prompt: job(prompt, limit) for prompt, limit in prompts.items()}
    rows = Rows(count)
    played = Played(rows, list(jobs.values()), ends)
    for prompt, limit in prompts.items():
        assert played.of(jobs[prompt]) == answer(prompt, limit, ends)
    assert rows.order == list(prompts)
    assert rows.most == count


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("place", [1, 7, 29])
def test_an_answer_goes_on_after_its_known_tokens(replay: bool, place: int) -> None:
    whole, reason = answer("once", 30)
    resumed = job("once", 30, known=whole[:place], replay=replay)
    rows = Rows(2)
    played = Played(rows, [resumed, job("other", 5)])
    assert played.of(resumed) == (whole[place:], reason)
    # Read with the prompt, or made again.
    assert len(rows.order[0]) == 4 + (0 if replay else place)


@pytest.mark.parametrize("place", [0, 3, 9])
def test_known_tokens_stand_also_where_they_come_out_otherwise(place: int) -> None:
    known = answer("once", 10)[0]
    known[place] = 97 if known[place] != 97 else 98
    other = job("other", 12)
    resumed = job("once", 15, known=known, replay=True)
    rows = Rows(2)
    played = Played(rows, [other, resumed])
    differed, *_ = played.events[resumed]
    assert differed == Differed(place)
    assert played.of(resumed)[0] == answer(f"once{decode(known)}", 5)[0]  # as if it had been read at once
    assert played.of(other) == answer("other", 12)
    again = f"once{decode(known)}"
    assert rows.order == (["once", "other", again] if place else ["once", again, "other"])


def test_a_cancelled_answer_frees_its_row_and_others_go_on() -> None:
    rows = Rows(2)
    long, short = job("long", 10_000), job("short", 30)
    waiting = job("waiting", 10)
    cancelled = job("never begun", 10)
    cancelled.cancelled = True

    class Watching(Played):
        def deliver(self, events: list[tuple[Job, list[Event]]]) -> None:
            for of, made in events:
                self.events[of] += made
            if len(self.events[long]) == 5:
                long.cancelled = True
            if all(self.events[of] and isinstance(self.events[of][-1], Ended) for of in (short, waiting)):
                self.scheduler.stop()

    played = Watching(rows, [long, short, cancelled, waiting])
    assert played.of(short) == answer("short", 30) and played.of(waiting) == answer("waiting", 10)
    assert len(played.events[long]) == 5 and not played.events[cancelled]
    assert rows.order == ["long", "short", "waiting"]


def test_rows_rest_once_when_nothing_was_asked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "REST_S", 0.02)
    rows, ended = Rows(1), threading.Semaphore(0)

    def deliver(events: list[tuple[Job, list[Event]]]) -> None:
        for _ in (made for _, all_made in events for made in all_made if isinstance(made, Ended)):
            ended.release()

    made = Scheduler(rows, frozenset(), deliver)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    for number in (1, 2):
        wait_until(lambda number=number: rows.order.count("rest") == number, "rows that rest")  # type: ignore[misc]
        made.submit(job("other", 10_000))
        assert ended.acquire(timeout=20)
    wait_until(lambda: rows.order.count("rest") == 3, "rows that rest")
    rows.rests = [0.0, 0.01]
    made.submit(job("other", 1))
    wait_until(lambda: rows.order.count("rest") == 6, "rows that rest")
    threading.Event().wait(0.2)
    made.stop()
    thread.join(20)
    assert rows.order == [*["rest", "other"] * 3, *["rest"] * 3], "as often as it wants, and beside no answer"


def test_all_that_the_cache_holds_is_taken_up_before_a_step() -> None:
    class Held(Rows):
        def resume(self, row: int, ids: Sequence[int]) -> bool:
            self.order.append(f"resumed {row}")
            self.ids[row] = list(ids)
            return True

        def advance(self, active: int) -> list[int]:
            self.order.append(f"step of {active}")
            return super().advance(active)

    whole, _ = answer("once", 12)
    resumed = [job("once", 12, known=whole[:10]) for _ in range(3)]
    rows = Held(4)
    played = Played(rows, [job("new", 3), *resumed, job("newer", 3)])
    assert rows.order[:6] == ["resumed 0", "resumed 1", "resumed 2", "new", "step of 4", "step of 4"]
    assert all(played.of(each)[0] == whole[10:] for each in resumed)
