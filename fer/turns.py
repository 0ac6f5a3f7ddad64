"""Short turns at Python's lock, while a thread of FER's computes beside the engine's.

A thread that calls into torch gives the lock up and wants it back with every operation, and whoever computes in Python
meanwhile keeps it for a whole turn: 800 small operations that take 8 ms alone take seconds beside such a thread at
Python's own 5 ms, and some 15 ms at half a millisecond.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

TURN_S: Final = 0.0005

_lock = threading.Lock()
_within = 0
_before = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """Within, turns of the whole process are :data:`TURN_S` long at most; the last one out restores what was before."""
    global _within, _before
    with _lock:
        if not _within:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, TURN_S))
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within:
                sys.setswitchinterval(_before)
