"""Deaths at chosen moments, for tests: ``_FER_FAULT="stored:begin"`` kills the keeper at that point.

Several points separated by commas are for the first keeper, its successor, and so on; an empty one lets that keeper
live. A point is ``step:request`` with the steps of :meth:`fer.weights.keeper.server.Server.serve`: executed, stored,
journalled, replied, consumed.
"""

from __future__ import annotations

import os
import signal
import sys


class Faults:
    """Knows when to die."""

    def __init__(self, restarts: int) -> None:
        plan = os.environ.get("_FER_FAULT", "").split(",")
        self._point = plan[restarts] if restarts < len(plan) else ""

    def at(self, step: str, request: str) -> None:
        """Die here if this is the point."""
        if self._point and self._point == f"{step}:{request}":
            print(f"fault: {self._point}", file=sys.stderr, flush=True)  # noqa: T201 - the test's proof that it fired
            os.kill(os.getpid(), signal.SIGKILL)
