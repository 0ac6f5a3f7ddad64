"""Lack of memory: who means it by what they raise, and waiting for what a driver has not given back yet."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from fer.errors import DriverError, OutOfMemory
from fer.memory import driver

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


def lacks_memory(error: BaseException | None) -> bool:
    """Whether this, or what it came from, is for want of memory: the device's, or the host's."""
    while error is not None:
        if isinstance(error, (OutOfMemory, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and "out of memory" in str(error):  # torch's word for it
            return True
        if isinstance(error, DriverError) and driver.code_of(error) == driver.OUT_OF_MEMORY:
            return True
        error = error.__cause__
    return False
