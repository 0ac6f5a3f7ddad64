"""Decisions that all ranks of a launch take together.

A rank that raises, or goes another way, while the others wait in a collective, leaves them waiting until it times out.
So what may fail on one rank alone is tried first and voted on second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fer.engines.base import Engine
from fer.errors import FerError, PeerRankFailed

T = TypeVar("T")


def together(engine: Engine, work: Callable[[], T], what: str) -> T:
    """The result of ``work``, where it succeeded on every rank.

    Args:
        what: what is being done, for the error of ranks that did succeed.

    Raises:
        FerError: of this rank's own work, or PeerRankFailed where only another rank failed.
    """
    trouble: FerError | None = None
    result: T | None = None
    try:
        result = work()
    except FerError as error:
        trouble = error
    if engine.agree(trouble is None):
        assert trouble is None
        return result  # type: ignore[return-value]  # None only where T is
    raise trouble or PeerRankFailed(f"another rank of this launch failed: {what}", fix="See that rank's error")
