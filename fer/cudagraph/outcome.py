"""What became of an archive's graphs in one start: used, known to be bad, moved, wrong, or not restored at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fer.cudagraph.capture import Baseline, Captured
    from fer.cudagraph.plan import Plan
    from fer.cudagraph.session import Session
    from fer.stages import Start


@dataclass
class Outcome:
    """Graphs that are not used, with the reason.

    Attributes:
        known: refused when the archive was saved, or failed in an earlier start.
        gone: they use memory that moved, or did not come in time.
        failed: their outputs were wrong.
        patient: the start waits for all graphs.
        checked: how many were replayed against their outputs.
        lost: they failed in the restore; ``passing`` are those of them that did so for no fault of their own.
        troubles: why a batch size could not be captured in their place.
    """

    known: Mapping[str, str]
    gone: Mapping[str, str]
    failed: dict[str, str]
    patient: bool = False
    checked: int = 0
    lost: dict[str, str] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)
    troubles: Mapping[int, str] = field(default_factory=dict)

    def take(self, plan: Plan, session: Session) -> None:
        """The restore has ended: what it lost."""
        assert plan.restorer is not None
        progress, silent = plan.restorer.progress, left(plan)
        self.lost = {**dict.fromkeys(silent, "it was not restored"), **progress.failed, **session.failed}
        self.passing = {*silent, *progress.passing}

    @property
    def news(self) -> dict[str, str]:
        """What speaks against a graph itself and was not known."""
        known = {*self.known, *self.gone, *(self.passing - set(self.failed))}
        return {name: why for name, why in {**self.lost, **self.failed}.items() if name not in known}

    @property
    def all(self) -> dict[str, str]:
        """Every graph that is not used, with one reason."""
        return {**self.lost, **self.failed, **self.known, **self.gone}


def usable(plan: Plan, gone: Mapping[str, str]) -> list[str]:
    """Graphs that are ready now and use nothing that moved."""
    return [name for name in list(plan.ready.graphs) if name not in gone]  # another thread adds to it


def left(plan: Plan, but: Sequence[str] | None = None) -> list[str]:
    """Graphs that are neither ready (or among these) nor failed yet."""
    assert plan.archive is not None and plan.restorer is not None and plan.state is not None
    ready = plan.ready.graphs if but is None else but
    done = {*ready, *plan.restorer.progress.failed, *plan.state.quarantined}
    return [name for name in plan.archive.facts["order"] if name not in done | set(plan.archive.facts["refused"])]


def say(start: Start, plan: Plan, session: Session, outcome: Outcome, *, captured: int = 0, under_way: int = 0) -> None:
    """Write the stage's line of the report."""
    assert plan.archive is not None and plan.restorer is not None
    captured_then = plan.archive.facts.get("captured", {})
    progress = plan.restorer.progress
    times = sorted(progress.ready.values())
    start.report.stage(
        "cudagraph",
        path="restored" if session.used or under_way else "refused",
        why=first_reasons(outcome.all),
        graphs=len(session.used),
        captured=captured,
        checked=outcome.checked,
        **({"troubles": first_troubles(outcome.troubles)} if outcome.troubles else {}),
        **({"under_way": under_way} if under_way else {}),
        first_s=round(times[0], 6) if times else 0.0,
        **({"first_four_s": round(times[3], 6)} if len(times) > 3 else {}),
        all_s=round(times[-1], 6) if times else 0.0,
        steps={name: round(seconds, 6) for name, seconds in dict(progress.seconds).items()},
        **{name: seconds for name, seconds in captured_then.items() if name.startswith("native_")},
    )


def first_troubles(found: Mapping[int, str]) -> str:
    """Batch sizes without a graph, for one line."""
    return "; ".join(f"{size}: {why}" for size, why in list(found.items())[:3])


def first_reasons(failed: Mapping[str, str]) -> str:
    """Reasons for one line, equal ones counted."""
    reasons: dict[str, int] = {}
    for why in failed.values():
        reasons[why] = reasons.get(why, 0) + 1
    return "; ".join(f"{count} x {why}" if count > 1 else why for why, count in list(reasons.items())[:3])


def seconds(captured: Captured, base: Baseline | None) -> dict[str, float]:
    """What captures took, and what one takes with and without the garbage collector."""
    found = {"warm_up_s": captured.warm_up_s, "capture_s": captured.capture_s + captured.instantiate_s}
    if base is not None:
        found |= {"one_default_gc_s": base.default_gc, "one_frozen_gc_s": base.frozen_gc}
    return {name: round(value, 6) for name, value in found.items()}


def figures(captured: Captured, base: Baseline | None) -> dict[str, Any]:
    """What was captured, for the report."""
    return {
        "captured": len(captured.graphs),
        **seconds(captured, base),
        "gc": "frozen",
        "troubles": first_troubles(captured.troubles),
    }


def bug(error: Exception) -> str:
    """A reason that names what should not have happened."""
    return f"bug in FER, please report: {type(error).__name__}: {error}"


def first_line(error: Exception) -> str:
    """As much of an error as fits into a line."""
    return (str(error).splitlines() or [repr(error)])[0]
