"""A client's tokens on one time axis, as text and as a page: marks where they came, and the gap that a death made."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fer.cli.demo_failover import Seen

_COLUMNS = 72
_WIDTH, _LEFT, _ROW = 900, 16, 64


def strip(seen: Sequence[Seen]) -> str:
    """One line a way: ``|`` where tokens came, ``x`` the kill, ``.`` nothing."""
    first, last = _ends(seen)
    step = (last - first) / _COLUMNS
    lines = ["", f"one column is {step * 1e3:.0f} ms; | tokens, x SIGKILL, . nothing came"]
    for each in seen:
        cells = ["."] * (_COLUMNS + 1)
        for at in each.tokens:
            cells[int((at - first) / step)] = "|"
        end = int((each.tokens[-1] - first) / step) + 1
        cells[end:] = [" "] * (len(cells) - end)
        cells[int(-first / step)] = "x"
        lines.append(f"{each.way.name:9}{''.join(cells)} {each.gap_s:7.3f} s")
    return "\n".join([*lines, ""])


def page(seen: Sequence[Seen]) -> str:
    """A page that needs nothing beside itself and holds no script."""
    first, last = _ends(seen)
    scale = _WIDTH / (last - first)
    rows = "".join(_row(each, number, first, scale) for number, each in enumerate(seen))
    kill = _LEFT - first * scale
    height = _ROW * len(seen) + 24
    table = "".join(
        f"<tr><td>{escape(each.way.title)}</td><td>{each.gap_s:.3f} s</td><td>{escape(_parts(each))}</td></tr>"
        for each in seen
    )
    picture = (
        f'<svg viewBox="0 0 {_WIDTH + 2 * _LEFT} {height}" role="img" aria-label="tokens over time">{rows}'
        f'<line x1="{kill:.1f}" x2="{kill:.1f}" y1="0" y2="{height - 20}" class="kill"/>'
        f'<text x="{kill + 4:.1f}" y="{height - 6}">SIGKILL</text></svg>'
    )
    head = "<th>way back</th><th>gap between two tokens</th><th>the service's account</th>"
    return _PAGE.format(picture=picture, table=f"<table><tr>{head}</tr>{table}</table>")


def _ends(seen: Sequence[Seen]) -> tuple[float, float]:
    first, last = min(each.tokens[0] for each in seen), max(each.tokens[-1] for each in seen)
    return min(first, 0.0), max(last, 1e-3)


def _row(each: Seen, number: int, first: float, scale: float) -> str:
    top = number * _ROW + 22
    places = [_LEFT + (at - first) * scale for at in each.tokens]
    wide = max(range(len(places) - 1), key=lambda place: places[place + 1] - places[place])
    left, right = places[wide], places[wide + 1]
    marks = "".join(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + 26}" class="token"/>' for x in places)
    return (
        f'<text x="{_LEFT}" y="{top - 6}">{escape(each.way.title)}: {each.gap_s:.3f} s</text>'
        f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="26" class="gap"/>{marks}'
    )


def _parts(each: Seen) -> str:
    outage = each.outage
    moments = {name: outage[name] for name in ("spawned", "ready", "active", "token") if name in outage}
    if outage.get("path") == "standby":
        moments = {**outage.get("promotion", {}), "active": outage.get("active"), "token": outage.get("token")}
    return ", ".join(f"{name} {seconds} s" for name, seconds in moments.items() if seconds is not None)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>FER: what a client sees of a death</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2em auto; padding: 0 1em; color: #222; }}
svg {{ width: 100%; }} svg text {{ font-size: 13px; fill: #333; }}
.token {{ stroke: #1a7f5a; stroke-width: 2; }} .gap {{ fill: #f6d5d0; }}
.kill {{ stroke: #c0392b; stroke-dasharray: 4 3; }}
table {{ border-collapse: collapse; }} td, th {{ text-align: left; padding: .3em 1em .3em 0; vertical-align: top; }}
</style></head><body><h1>What a client sees when its engine is killed</h1>
<p>Each mark is a token at the client, in the middle of one streamed answer.
The text was the undisturbed one each time.</p>
{picture}{table}</body></html>
"""
