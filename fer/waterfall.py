"""The timeline as a picture: one HTML page that needs nothing beside itself.

Several reports stand below one another on one time axis, so that a recovered start is seen against the cold one. The
same figures follow as a table, which is also what screen readers and text browsers get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fer.report import Report, Span, StagePath

_LABELS, _PLOT, _RIGHT = 168, 760, 96  # widths in units of the picture, which scales to the page
_ROW, _STEP, _AXIS = 26, 17, 30  # heights of a phase's row, of a step's row, and of the axis
_MAX_STEPS = 24  # steps drawn a phase; the rest is counted, and whole in the JSON


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


def render(reports: Sequence[Report]) -> str:
    """A page with one waterfall a report, all on one time axis, and the same figures as a table.

    Everything a report says is escaped; the page holds no script and loads nothing.
    """
    longest = max((report.total_s for report in reports), default=0.0) or 1e-3
    title = "One engine start" if len(reports) < 2 else f"{len(reports)} engine starts compared"
    sections = [_section(report, number, longest) for number, report in enumerate(reports, 1)]
    return _PAGE.format(
        title=title,
        style=_STYLE,
        lead=_lead(reports),
        sections="\n".join(sections),
        table=_table(reports),
    )


def _fit(span: Span, other: Span) -> bool:
    apart = span.end <= other.start or other.end <= span.start
    # Only steps nest: two phases of equal times are still two things that overlap.
    return apart or (bool(span.parent) and other.start <= span.start and span.end <= other.end)


def _lead(reports: Sequence[Report]) -> str:
    if not reports:
        return "<p>No report was given.</p>"
    first, last = reports[0], reports[-1]
    cards = [_card(_time(report.total_s), _title(report, n)) for n, report in enumerate(reports, 1)]
    if len(reports) > 1 and last.total_s > 0:
        cards.append(_card(f"{first.total_s / last.total_s:.1f}×", "faster to the first token", "gain"))
        if last.phase_s("weights") > 0:
            cards.append(_card(f"{first.phase_s('weights') / last.phase_s('weights'):,.0f}×", "faster weights", "gain"))
    else:
        cards.append(_card(_time(first.phase_s("weights")), "of it weights", "gain"))
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(figure: str, caption: str, kind: str = "") -> str:
    return f'<div class="card {kind}"><b>{escape(figure)}</b><span>{escape(caption)}</span></div>'


def _section(report: Report, number: int, longest: float) -> str:
    stages = "".join(_badge(stage) for stage in report.stages.values())
    failed = f'<p class="failed">{escape(report.failed)}</p>' if report.failed else ""
    head = f"<h2>{escape(_title(report, number))} <small>{_time(report.total_s)} to first token</small></h2>"
    return f'<section>{head}{failed}{_picture(report, longest)}<ul class="stages">{stages}</ul></section>'


def _badge(stage: StagePath) -> str:
    why = f"<span>{escape(stage.why)}</span>" if stage.why else ""
    details = ", ".join(f"{key} {value}" for key, value in stage.details.items())
    hint = f' title="{escape(details)}"' if details else ""
    return f'<li{hint}><b>{escape(stage.name)}</b> <i class="{escape(stage.path)}">{escape(stage.path)}</i> {why}</li>'


def _picture(report: Report, longest: float) -> str:
    scale, parts, y = _PLOT / longest, [], _AXIS
    for span in report.phases:
        parts.append(_row(span, y, scale))
        y += _ROW
        steps = sorted(
            (s for s in report.spans if s.parent.split("/")[0] == span.name and span.start <= s.start <= span.end),
            key=lambda step: (step.start, -step.end),
        )
        for step in steps[:_MAX_STEPS]:
            parts.append(_step(step, y, scale))
            y += _STEP
        if len(steps) > _MAX_STEPS:
            parts.append(f'<text class="more" x="{_LABELS - 12}" y="{y + 12}">{len(steps) - _MAX_STEPS} more</text>')
            y += _STEP
    end = _LABELS + report.total_s * scale
    # Below the rows, so that their figures stay legible.
    parts.insert(0, f'<line class="end" x1="{end:.2f}" x2="{end:.2f}" y1="{_AXIS - 6}" y2="{y + 4}"/>')
    width, height = _LABELS + _PLOT + _RIGHT, y + 10
    label = (
        f"Waterfall of {report.label or 'the start'}, {_time(report.total_s)} in all; the table below has the figures"
    )
    return (
        f'<div class="picture"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
        f"{_axis(longest, scale, height)}{''.join(parts)}</svg></div>"
    )


def _axis(longest: float, scale: float, height: int) -> str:
    step = _tick(longest)
    parts = []
    for number in range(int(longest / step + 1e-9) + 1):
        x = _LABELS + number * step * scale
        parts.append(f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{_AXIS - 8}" y2="{height - 4}"/>')
        parts.append(f'<text class="tick" x="{x:.2f}" y="14">{_number(number * step)} s</text>')
    return "".join(parts)


def _row(span: Span, y: int, scale: float) -> str:
    x, width = _LABELS + span.start / 1e9 * scale, max(2.0, span.seconds * scale)
    kind = f"bar {span.name}" + (" broken" if span.error else "")
    hint = f"{span.path}: {_time(span.seconds)}, from {_time(span.start / 1e9)}" + (
        f". {span.error}" if span.error else ""
    )
    return (
        f"<g><title>{escape(hint)}</title>"
        f'<rect class="band" x="0" y="{y}" width="{_LABELS + _PLOT + _RIGHT}" height="{_ROW}"/>'
        f'<text class="name" x="{_LABELS - 12}" y="{y + 17}">{escape(span.name)}</text>'
        f'<rect class="{escape(kind)}" x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="{_ROW - 8}" rx="4"/>'
        f'<text class="time" x="{x + width + 7:.2f}" y="{y + 17}">{_time(span.seconds)}</text></g>'
    )


def _step(span: Span, y: int, scale: float) -> str:
    x, width = _LABELS + span.start / 1e9 * scale, max(1.5, span.seconds * scale)
    details = "".join(f", {key} {value}" for key, value in span.details.items())
    hint = f"{span.path}: {_time(span.seconds)}{details}" + (f". {span.error}" if span.error else "")
    name = span.name if len(span.name) <= 26 else span.name[:25] + "…"
    depth, middle = span.parent.count("/"), y + 12
    indent = "· " * depth
    kind = f"sub {span.parent.split('/')[0]}" + (" deep" if depth else "") + (" broken" if span.error else "")
    return (
        f"<g><title>{escape(hint)}</title>"
        f'<text class="subname" x="{_LABELS - 12}" y="{middle}">{indent}{escape(name)}</text>'
        f'<rect class="{escape(kind)}" x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="{_STEP - 8}" rx="3"/>'
        f'<text class="subtime" x="{x + width + 6:.2f}" y="{middle}">{_time(span.seconds)}</text></g>'
    )


def _table(reports: Sequence[Report]) -> str:
    from fer.report import PHASES

    heads = "".join(f'<th scope="col">{escape(_title(report, n))}</th>' for n, report in enumerate(reports, 1))
    names = [name for name in PHASES if any(report.phase_s(name) for report in reports)]
    rows = [(name, [report.phase_s(name) for report in reports]) for name in names]
    if any(report.unaccounted_s >= 0.001 for report in reports):
        rows.append(("between phases", [report.unaccounted_s for report in reports]))
    sums = [("total", [r.total_s for r in reports]), ("all but weights", [r.the_26s for r in reports])]
    body = "".join(_table_row(name, seconds, reports) for name, seconds in rows)
    foot = "".join(_table_row(name, seconds, reports) for name, seconds in sums)
    return (
        f"<table><caption>Seconds and share of each phase</caption>"
        f'<thead><tr><th scope="col">phase</th>{heads}</tr></thead>'
        f"<tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"
    )


def _table_row(name: str, seconds: Sequence[float], reports: Sequence[Report]) -> str:
    pairs = zip(seconds, reports, strict=True)
    cells = "".join(f"<td>{s:.3f} <small>{100 * s / (r.total_s or 1):.1f} %</small></td>" for s, r in pairs)
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'


def _title(report: Report, number: int) -> str:
    return report.label or f"start {number}"


def _time(seconds: float) -> str:
    """A duration as people read it: 3.2 ms, 0.85 s, 12.4 s."""
    if seconds < 0.1:
        return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _tick(longest: float) -> float:
    """A round distance of ticks that gives five to ten of them."""
    raw = longest / 8
    power: float = 10.0 ** math.floor(math.log10(raw))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= raw), 10 * power)


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") or "0"


_STYLE = """
:root { color-scheme: light dark; --page: #fbfbfd; --sheet: #fff; --ink: #1c2230; --soft: #6b7385; --line: #e6e8ef;
  --band: #f5f6fa; --gain: #0c8a5b; --bad: #d2344a;
  --python: #8a93a6; --tokenizer: #b08a3c; --distributed: #9a63c4; --weights: #0f9d74; --kv: #2f87d0;
  --kernels: #d9772b; --graphs: #c8508c; --server: #5468d8; }
@media (prefers-color-scheme: dark) { :root { --page: #10131a; --sheet: #171b25; --ink: #e7eaf2; --soft: #98a1b5;
  --line: #2a3040; --band: #1b202c; --gain: #41d19b; --bad: #ff7386;
  --python: #7c869c; --tokenizer: #d0ac62; --distributed: #b98ae0; --weights: #2fc99a; --kv: #5aaaf0;
  --kernels: #f0975a; --graphs: #e67cb2; --server: #8494f5; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; letter-spacing: -.02em; margin: 0 0 20px; }
h2 { font-size: 17px; margin: 0 0 12px; }
h2::first-letter { text-transform: uppercase; }
h2 small { color: var(--soft); font-weight: 400; font-size: 14px; margin-left: 8px; }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin-bottom: 24px; }
.card { background: var(--sheet); border: 1px solid var(--line); border-radius: 12px;
  padding: 14px 20px; min-width: 150px; }
.card b { display: block; font-size: 26px; line-height: 1.2; letter-spacing: -.02em;
  font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: 13px; }
.card.gain b { color: var(--gain); }
section, .figures { background: var(--sheet); border: 1px solid var(--line); border-radius: 14px; padding: 20px 22px;
  margin-bottom: 18px; overflow-x: auto; }
.picture { min-width: 640px; }
svg { display: block; width: 100%; height: auto; font-size: 12px; }
svg text { fill: var(--ink); font-variant-numeric: tabular-nums; }
.name, .subname, .more { text-anchor: end; }
.name { font-size: 13px; font-weight: 600; }
svg .subname, svg .more, svg .subtime, svg .tick { fill: var(--soft); font-size: 11px; }
.tick { text-anchor: middle; }
.time, .subtime { paint-order: stroke; stroke: var(--sheet); stroke-width: 4px; stroke-linejoin: round; }
.grid { stroke: var(--line); stroke-width: 1; }
.end { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 3 4; opacity: .45; }
.band { fill: transparent; }
g:hover > .band { fill: var(--band); }
.sub { opacity: .5; }
.sub.deep { opacity: .3; }
.python { fill: var(--python); } .tokenizer { fill: var(--tokenizer); } .distributed { fill: var(--distributed); }
.weights { fill: var(--weights); } .kv { fill: var(--kv); } .kernels { fill: var(--kernels); }
.graphs { fill: var(--graphs); } .server { fill: var(--server); }
.broken { fill: var(--bad); }
.failed { color: var(--bad); margin: 0 0 10px; overflow-wrap: anywhere; }
.stages { list-style: none; margin: 10px 0 0; padding: 0; font-size: 13px; color: var(--soft); }
.stages li { margin-top: 6px; }
.stages b { color: var(--ink); display: inline-block; min-width: 86px; }
.stages i { font-style: normal; border: 1px solid currentColor; border-radius: 99px; padding: 0 9px; margin-right: 6px;
  display: inline-block; line-height: 1.6; }
.attached, .restored, .published { color: var(--gain); } .refused { color: var(--bad); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; font-size: 17px; padding-bottom: 8px; }
th, td { padding: 6px 10px; text-align: right; border-top: 1px solid var(--line); }
thead th { border-top: 0; color: var(--soft); font-weight: 500; }
th:first-child { text-align: left; font-weight: 500; padding-left: 0; }
tfoot tr > * { font-weight: 700 !important; }
td small { color: var(--soft); font-weight: 400; display: inline-block; min-width: 56px; }
footer { color: var(--soft); font-size: 13px; }
@media print { body { background: #fff; } section, .figures { break-inside: avoid; } }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>FER: {title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{lead}
{sections}
<div class="figures">{table}</div>
<footer>Times run from the start of the process, imports included, to the first token.
All waterfalls share one axis.</footer>
</main>
</body>
</html>
"""
