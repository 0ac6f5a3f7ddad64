"""One place in the service, and the engines that fill it one after another."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from fer.standby.rankgroup import RankGroup
from fer.standby.router import Target
from fer.standby.wire import Ready

Role = Literal["starting", "standby", "promoting", "active", "draining", "backoff", "ending", "wedged", "stopped"]
ROLES: tuple[Role, ...] = get_args(Role)

FREE_RESTARTS = 2
"""Deaths in a row that are answered at once."""
FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 30.0
STABLE_S = 10.0
"""Seconds for which an engine has to be ready, or else to answer something, for its death to count as the first."""


def delay_s(failures: int) -> float:
    """Seconds before the start after that many deaths in a row: the first are free, then twice as long each time."""
    late = failures - FREE_RESTARTS
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(late - 1, 16)) if late > 0 else 0.0


@dataclass(kw_only=True)
class Member:
    """A place for an engine.

    Attributes:
        role: what its engine is just now; ``since`` on the clock of :func:`time.monotonic`.
        starts: engines that were started here; ``restarts``: those after the first.
        failures: deaths in a row of engines that were of no use before.
        last_error: of the last death, in one line; ``tail``: the last lines of that engine's output.
        blame: why the supervisor itself ended the engine, ``""`` where it did not.
        parked: its engine has no memory for answers, or starts without.
        unfit: why it could not be promoted, ``""`` where nobody tried or it may be tried again.
    """

    name: str
    role: Role = "starting"
    since: float = field(default_factory=time.monotonic)
    starts: int = 0
    failures: int = 0
    last_error: str = ""
    tail: str = ""
    blame: str = ""
    parked: bool = False
    unfit: str = ""
    group: RankGroup | None = None
    target: Target | None = None
    ready: Ready | None = None

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def state(self) -> Role:
        """The role, or ``"wedged"`` while a process does not end."""
        return "wedged" if self.group is not None and self.group.wedged else self.role

    def become(self, role: Role) -> None:
        self.role, self.since = role, time.monotonic()

    def status(self, *, private: bool) -> dict[str, Any]:
        """For ``/status``; ``private`` adds what the engine wrote, which may tell more than its clients should see."""
        group = self.group
        processes = [
            {
                "pid": process.pid,
                "born": process.born,
                "via": process.how,
                "why": process.why_so,
                "stuck": process.stuck() if stuck else "",
            }
            for process in (group.processes if group is not None else ())
            for stuck in [group is not None and process in group.wedged]
        ]
        return {
            "name": self.name,
            "role": self.state,
            "parked": self.parked,
            "seconds": round(time.monotonic() - self.since, 3),
            "processes": processes,
            "restarts": self.restarts,
            "failures": self.failures,
            "last_error": self.last_error,
            **({"tail": self.tail} if private else {}),
            "recovery": _recovery(self.ready),
        }


def _recovery(ready: Ready | None) -> dict[str, Any] | None:
    """What of the recovery's report an operator looks at first."""
    if ready is None:
        return None
    report = ready.report
    return {
        "total_s": report.get("total_s"),
        "phase_s": report.get("phase_s"),
        "stages": {stage["name"]: {"path": stage["path"], "why": stage["why"]} for stage in report.get("stages", [])},
    }
