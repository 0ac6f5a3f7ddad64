"""Short turns at Python's lock last as long as somebody is within, and leave what was there before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from fer.turns import TURN_S, short_turns

BEFORE_S = 0.004


@pytest.fixture(autouse=True)
def _before() -> Iterator[None]:
    given = sys.getswitchinterval()
    sys.setswitchinterval(BEFORE_S)
    yield
    sys.setswitchinterval(given)


def short() -> bool:
    """The interpreter counts in whole microseconds."""
    return sys.getswitchinterval() == pytest.approx(TURN_S, abs=1e-6)


def restored() -> bool:
    return sys.getswitchinterval() == pytest.approx(BEFORE_S, abs=1e-6)


def test_they_nest() -> None:
    with short_turns():
        assert short()
        with short_turns():
            assert short()
        assert short(), "the inner one was not the last one out"
    assert restored()


def test_an_exception_ends_them_too() -> None:
    with pytest.raises(KeyError), short_turns(), short_turns():
        raise KeyError
    assert restored()
    with short_turns():
        assert short(), "nothing was left counted"
    assert restored()


def test_turns_that_were_shorter_stay() -> None:
    sys.setswitchinterval(TURN_S / 10)
    with short_turns():
        assert sys.getswitchinterval() == pytest.approx(TURN_S / 10, abs=1e-6)
    assert sys.getswitchinterval() == pytest.approx(TURN_S / 10, abs=1e-6)


def test_the_last_of_several_threads_restores() -> None:
    within, first_out, leave = threading.Barrier(3), threading.Event(), threading.Event()
    seen: list[bool] = []

    def first() -> None:
        with short_turns():
            within.wait(10)
        first_out.set()

    def last() -> None:
        with short_turns():
            within.wait(10)
            assert leave.wait(10)
            seen.append(short())

    threads = [threading.Thread(target=each) for each in (first, last)]
    for thread in threads:
        thread.start()
    within.wait(10)
    assert first_out.wait(10) and short()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert seen == [True] and restored()


def test_many_threads_in_and_out_lose_nothing() -> None:
    def work() -> None:
        for _ in range(200):
            with short_turns():
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    with short_turns():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert short()
    assert restored()
