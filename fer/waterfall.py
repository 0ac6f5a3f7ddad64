"""The timeline as a picture: one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fer.report import Report, Span


def lanes(spans: Sequence[Span]) -> list[int]:
    """The first free lane of each span, so that within a lane spans only nest or follow one another."""
    taken: list[list[Span]] = []
    result = []
    for span in spans:
        lane = next((n for n, others in enumerate(taken) if all(_fit(span, o) for o in others)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append(span)
        result.append(lane)
    return result


def _fit(span: Span, other: Span) -> bool:
    apart = span.end <= other.start or other.end <= span.start
    # Only steps nest: two phases of equal times are still two things that overlap.
    return apart or (bool(span.parent) and other.start <= span.start and span.end <= other.end)


def render(reports: Sequence[Report]) -> str:
    """A page with one waterfall a report, all on one time axis, and the same figures as tables."""
    raise NotImplementedError
