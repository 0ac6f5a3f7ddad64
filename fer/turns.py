"""Short turns at Python's lock, while a thread of FER's computes beside the engine's.

A thread that calls into torch gives the lock up and wants it back with every operation, and whoever computes in Python
meanwhile keeps it for a whole turn: 800 small operations of 6 ms together took up to 4.8 s beside such a thread at
Python's own 5 ms, and 10 to 140 ms at a tenth of a millisecond (``python -m bench.turns``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

TURN_S: Final = 0.0001

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
