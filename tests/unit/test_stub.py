"""The allocator's machine code, called the way torch calls it."""

from __future__ import annotations

import ctypes
import platform
import threading

import pytest

from fer.memory.stub import ROUND, BumpAllocator

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the machine code is for x86_64")

BASE = 0x3A7B_0000_0000


def test_addresses_follow_each_other_in_whole_units() -> None:
    made = BumpAllocator(BASE, BASE + 8 * ROUND)
    assert [made.take(size) for size in (1, ROUND, ROUND + 1)] == [BASE, BASE + ROUND, BASE + 2 * ROUND]
    assert made.cursor == BASE + 4 * ROUND


def test_what_does_not_fit_is_refused_and_takes_nothing() -> None:
    made = BumpAllocator(BASE, BASE + 2 * ROUND)
    assert made.take(3 * ROUND) == 0
    assert made.take(2 * ROUND) == BASE
    assert made.take(1) == 0
    made.limit = BASE + 3 * ROUND
    assert made.take(1) == BASE + 2 * ROUND


def test_freeing_does_nothing() -> None:
    made = BumpAllocator(BASE, BASE + 4 * ROUND)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(made.free)
    free(made.take(1), ROUND, 0, None)
    assert made.take(1) == BASE + ROUND


def test_threads_never_get_the_same_address() -> None:
    count, each = 8, 2000
    made = BumpAllocator(BASE, BASE + count * each * ROUND)
    got: list[list[int]] = [[] for _ in range(count)]

    def work(mine: list[int]) -> None:
        mine.extend(made.take(100) for _ in range(each))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    addresses = [address for mine in got for address in mine]
    assert sorted(addresses) == [BASE + number * ROUND for number in range(count * each)]
