"""What happened between the death of one active engine and the first token of the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fer.standby import wire


@dataclass
class Outage:
    """The time between two active engines, in the clock of :func:`time.monotonic_ns`; 0: not yet.

    Attributes:
        noticed: the first sign of the death; ``died``: it was seen.
        spawned: the next engine's process was started (before ``died`` for a standby, or between the two), ``begun``:
            its interpreter ran, ``told``: it was told to start.
        ready: it had recovered, ``active``: requests went there.
        token: its first token passed here; only where a request waited for it.
        path: how it came up: ``"standby"``, or how its process was started.
        promotion: what its promotion took, None where it takes no orders.
        failed: standbys that were tried before it, and why they could not be promoted.
    """

    died: int
    noticed: int = 0
    spawned: int = 0
    begun: int = 0
    told: int = 0
    ready: int = 0
    active: int = 0
    token: int = 0
    path: str = ""
    promotion: wire.Promoted | None = None
    failed: dict[str, str] = field(default_factory=dict)

    def parts(self) -> dict[str, float]:
        """Seconds of the promotion, by part."""
        promoted = self.promotion
        if promoted is None:
            return {}
        parts = {"claim": promoted.claim_s, "fence": promoted.fence_s, "backing": promoted.backing_s}
        return {**parts, "self_test": promoted.self_test_s}

    def seconds(self) -> dict[str, Any]:
        """Each moment as seconds after the death was seen, ``died_ns``; negative: it had happened before."""
        moments = ("noticed", "spawned", "begun", "told", "ready", "active", "token")
        found = {name: getattr(self, name) for name in moments}
        return {
            "died_ns": self.died,
            "path": self.path,
            **{name: round((at - self.died) / 1e9, 4) for name, at in found.items() if at},
            "promotion": {name: round(seconds, 6) for name, seconds in self.parts().items()},
            "kept_rows": self.promotion.kept_rows if self.promotion is not None else 0,
            "failed": self.failed,
        }
