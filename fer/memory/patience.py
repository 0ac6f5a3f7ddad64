"""Waiting for memory that a driver has not given back yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from fer.errors import OutOfMemory

FREED_S: Final = 2.0
"""Seconds in which a driver may still be giving back the memory of a process that is dying, or dead."""


Taken = TypeVar("Taken")


def patiently(take: Callable[[], Taken]) -> Taken:
    """Take memory, again and again for :data:`FREED_S` where it lacks. Raises OutOfMemory: it still does."""
    deadline = time.monotonic() + FREED_S
    while True:
        try:
            return take()
        except OutOfMemory:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.005)
