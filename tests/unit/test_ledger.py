"""What is written of a cache's rows is true at whatever moment its process is killed."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest
import torch

from fer.errors import MappingError
from fer.memory.seal import fixed_memfd, memfd
from fer.standby import scheduler
from fer.standby.ledger import Ledger, bytes_for
from fer.standby.scheduler import SlotRows

ROWS, LENGTH = 4, 12


class Killed(Exception):
    """The process ended here."""


class Cache:
    """A cache that is killed in the middle of things: positions hold the tokens they were computed for."""

    rows, length = ROWS, LENGTH

    def __init__(self, fate: random.Random) -> None:
        self.fate = fate
        self.memory = [[-1] * LENGTH for _ in range(ROWS)]
        self.token, self.position = [0] * ROWS, [0] * ROWS
        self.prompted = self.lacking = self.restoring = False

    def _moment(self) -> None:
        if self.fate.random() < 0.02:
            raise Killed

    def prompt(self, row: int, ids: list[int]) -> int:
        self.prompted = True
        for place, token in enumerate(ids):
            self._moment()
            self.memory[row][place] = token
        self.token[row], self.position[row] = self.fate.randrange(100), len(ids)
        return self.token[row]

    def advance(self, active: int, width: int | None = None) -> list[int]:
        for row in range(ROWS):  # a step computes padding rows as well
            self._moment()
            self.memory[row][self.position[row] if row < active else LENGTH - 1] = (
                self.token[row] if row < active else 0
            )
        for row in range(active):
            self.token[row], self.position[row] = self.fate.randrange(100), self.position[row] + 1
        return self.token[:active]

    def first_prompt(self, token: int) -> None:
        held = self.memory[0][0]
        self.prompt(0, [token])
        self._moment()
        self.memory[0][0] = held

    def settle(self, most: int) -> None:
        """Graphs are captured: each size takes steps."""
        self.position[:] = self.fate.choices(range(LENGTH), k=ROWS)
        self.advance(self.fate.randint(1, ROWS))
        self.lacking = False

    def resume(self, row: int, token: int, position: int) -> None:
        self.token[row], self.position[row] = token, position

    def move(self, source: int, target: int) -> None:
        for place in range(LENGTH):
            self._moment()
            self.memory[target][place] = self.memory[source][place]
        self.token[target], self.position[target] = self.token[source], self.position[source]

    def swap(self, one: int, other: int) -> None:
        for place in range(LENGTH):
            self._moment()
            here, there = self.memory[one][place], self.memory[other][place]
            self.memory[one][place] = there
            self._moment()
            self.memory[other][place] = here


def life(cache: Cache, ledger: Ledger, texts: list[list[int]], kept: set[int]) -> int:
    """One engine: answers begin, go on, end, until it is killed; how many it went on with that were not its own."""
    rows = SlotRows(cache)  # type: ignore[arg-type]
    rows.ledger, rows.kept = ledger, kept
    fate, running, resumed = cache.fate, [], 0
    waiting = [text for text in texts if len(text) <= LENGTH]
    del texts[:]
    try:
        for _ in range(60):
            cache.lacking |= fate.random() < 0.1
            if not running and fate.random() < 0.5:
                rows.rest()
            elif len(running) < ROWS and (waiting or fate.random() < 0.5):
                row = len(running)
                if waiting and rows.resume(row, waiting[0]):
                    assert cache.memory[row][: len(waiting[0]) - 1] == waiting[0][:-1], "the cache does not hold it"
                    running.append(waiting.pop(0))
                    resumed += 1
                else:
                    ids = waiting.pop(0) if waiting else [fate.randrange(100) for _ in range(fate.randint(1, 5))]
                    running.append([*ids, rows.begin(row, ids, 5)])
            elif running and fate.random() < 0.2:
                _end(rows, running, fate.randrange(len(running)))
            while full := [row for row, text in enumerate(running) if len(text) > LENGTH]:
                _end(rows, running, full[0])
            if running:
                for text, token in zip(running, rows.advance(len(running)), strict=True):
                    text.append(token)
    except Killed:
        pass
    texts += running
    return resumed


def _end(rows: SlotRows, running: list[list[int]], row: int) -> None:
    """An answer ends; the last one moves into its row."""
    if row != len(running) - 1:
        rows.move(len(running) - 1, row)
        running[row] = running[-1]
    running.pop()


@pytest.mark.parametrize("seed", range(60))
def test_whoever_comes_after_finds_what_is_there(seed: int) -> None:
    fate = random.Random(seed)
    ledger = Ledger.create(ROWS, LENGTH)
    cache, texts, resumed = Cache(fate), [], 0
    for _ in range(12):
        again = Ledger(ledger.fd, ROWS, LENGTH)
        resumed += life(cache, again, texts, set(again.held()))
        cache.token, cache.position = [0] * ROWS, [0] * ROWS  # these end with the process
        cache.prompted = False
    assert resumed or seed


def test_most_answers_are_found_again() -> None:
    found = 0
    for seed in range(30):
        fate = random.Random(1000 + seed)
        ledger, texts = Ledger.create(ROWS, LENGTH), []
        cache = Cache(fate)
        life(cache, ledger, texts, set())
        found += sum(ledger.find(text, range(ROWS)) is not None for text in texts)
    assert found > 30


@pytest.mark.parametrize("seed", range(5))
def test_answers_to_one_prompt_find_a_row_each(seed: int) -> None:
    ledger, fate = Ledger.create(ROWS, LENGTH), random.Random(seed)
    text = list(range(LENGTH))
    lengths = fate.sample(range(4, LENGTH), ROWS)
    for row, length in enumerate(lengths):
        ledger.fill(row, text[:length], text[length])
    free, waiting = set(range(ROWS)), fate.sample(lengths, ROWS)
    for length in waiting:
        # What the client knows may be a token behind.
        found = ledger.find(text[: length + 1 - fate.randint(0, 1)], sorted(free))
        assert found is not None
        free.remove(found)


def test_a_full_row_may_have_lost_its_last_position() -> None:
    ledger = Ledger.create(1, 4)
    ledger.fill(0, [1, 2, 3], 4)
    assert ledger.find([1, 2, 3, 9], [0]) == 0
    ledger.step([5])
    assert ledger.find([1, 2, 3, 9], [0]) is None and ledger.find([1, 2, 3, 4, 5], [0]) is None


def test_a_row_set_aside_is_not_found() -> None:
    ledger = Ledger.create(2, 8)
    ledger.fill(0, [1, 2], 3)
    ledger.fill(1, [1, 2], 3)
    filled = ledger.set_aside(0)
    assert ledger.held() == [1]
    ledger.put_back(0, filled)
    assert ledger.held() == [0, 1]
    for row in range(2):
        ledger.empty(row)
    assert ledger.find([1, 2, 3], range(2)) is None


def test_what_is_no_ledger_of_this_cache_is_refused() -> None:
    ledger = Ledger.create(2, 8)
    for rows, length in ((2, 9), (4, 3)):
        with pytest.raises(MappingError):
            Ledger(ledger.fd, rows, length)
    made: Any = (memfd("x"), fixed_memfd("x", bytes_for(2, 8) + 1))
    for fd in made:
        with fd, pytest.raises(MappingError):
            Ledger(fd, 2, 8)
    with fixed_memfd("x", bytes_for(2, 8)) as fd, suppress(OSError):
        import os

        os.pwrite(fd.fileno(), b"another", 0)
        with pytest.raises(MappingError):
            Ledger(fd, 2, 8)


def test_rows_at_rest_do_what_the_start_left_out() -> None:
    cache, ledger = Cache(random.Random(1)), Ledger.create(ROWS, LENGTH)
    cache.fate.random = lambda: 0.5  # type: ignore[method-assign]
    rows = SlotRows(cache)  # type: ignore[arg-type]
    rows.ledger = ledger
    rows.begin(0, [1, 2, 3], 5)
    assert cache.prompted
    held, rows.kept, cache.prompted = [*cache.memory[0]], {0}, False
    rows.rest()
    assert cache.prompted and cache.memory[0] == held and ledger.held() == [0] and rows.kept == {0}
    cache.lacking = True
    cache.restoring = True
    assert rows.rest() == scheduler.REST_S and cache.lacking, "there will be more to capture, or less"
    cache.restoring = False
    assert rows.rest() is None
    assert not cache.lacking and ledger.held() == [] and rows.kept == set(), "steps ran over what rows held"


def test_a_first_prompt_without_memory_is_left_to_the_next_request(caplog: pytest.LogCaptureFixture) -> None:
    cache, ledger = Cache(random.Random(1)), Ledger.create(ROWS, LENGTH)
    rows = SlotRows(cache)  # type: ignore[arg-type]
    rows.ledger = ledger

    def fail(error: Exception) -> None:
        def prompt(token: int) -> None:
            raise error

        cache.first_prompt = prompt  # type: ignore[method-assign]

    fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert rows.rest() is None and "no memory" in caplog.text
    fail(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal"):
        rows.rest()


def test_a_new_prompt_leaves_the_rows_that_somebody_may_come_for() -> None:
    cache, ledger = Cache(random.Random(1)), Ledger.create(ROWS, LENGTH)
    cache.fate.random = lambda: 0.5  # type: ignore[method-assign]
    rows = SlotRows(cache)  # type: ignore[arg-type]
    rows.ledger = ledger
    texts = [[*range(5 * row, 5 * row + 5)] for row in range(ROWS - 1)]
    for row, text in enumerate(texts):
        text.append(rows.begin(row, text, 5))
    rows.kept = set(range(ROWS - 1))
    rows.begin(0, [99], 5)
    assert rows.kept == {1, 2, 3}
    for number, text in enumerate(texts, 1):
        assert rows.resume(number, text)
        assert cache.memory[number][:5] == text[:-1]
