"""The measured timeline of one start, from process start to first token.

A start is cut into the phases of :data:`PHASES`; steps inside a phase and the path each stage took are kept beside
them. All times are nanoseconds since the process started, as the kernel recorded it, so that interpreter start and
imports are included::

    report = Report(label="recovered")
    with report.phase("weights"):
        with report.step("map slabs"):
            ...
    report.stage("weights", "attached", "fingerprint 3f2a matches", bytes=269_000_000)
    print(report.to_text())
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fer.errors import FerBug, OptionError

PHASES = ("python", "tokenizer", "distributed", "weights", "kv", "kernels", "graphs", "server")
PATHS = ("attached", "loaded", "published", "restored", "refused", "off", "absent")
"""What can become of a stage; ``absent`` is one that this version does not have yet."""

SCHEMA = 1
BAR, ASCII_BAR = "█", "#"
log = logging.getLogger("fer")


@dataclass(kw_only=True)
class Span:
    """A phase (``parent`` is ``""``) or a step inside one (``parent`` is ``"weights"`` or ``"weights/attach"``).

    ``start`` and ``end`` are nanoseconds since process start; ``error`` says how it failed, ``""`` if it did not.
    """

    name: str
    start: int
    end: int
    parent: str = ""
    error: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9

    @property
    def path(self) -> str:
        """Name with all parents, ``"weights/attach/map"``."""
        return f"{self.parent}/{self.name}" if self.parent else self.name


@dataclass(frozen=True, kw_only=True)
class StagePath:
    """The path one stage took, and why."""

    name: str
    path: str
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        pairs = {"stage": self.name, "path": self.path, **({"why": self.why} if self.why else {}), **self.details}
        return " ".join(f"{key}={_word(value)}" for key, value in pairs.items())


class Report:
    """Timeline of one start. Phases may overlap, also from several threads; a name used twice adds up.

    Args:
        label: what the report is called beside others, such as ``"cold"``.
        started_ns: start of the process on ``CLOCK_BOOTTIME``; by default what ``/proc/self/stat`` says.
    """

    def __init__(self, *, label: str = "", started_ns: int | None = None) -> None:
        self.label, self.pid = label, os.getpid()
        self._started = process_start_ns() if started_ns is None else started_ns
        self.started_at = time.time() - self.now() / 1e9
        self.spans: list[Span] = []
        self.stages: dict[str, StagePath] = {}
        self._created, self._finished = self.now(), 0
        self._open = threading.local()

    def now(self) -> int:
        """Nanoseconds since process start."""
        return max(0, boottime_ns() - self._started)

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """Time a phase of :data:`PHASES`. A failure inside is recorded and goes on."""
        if name not in PHASES:
            raise FerBug(f"{name!r} is no phase", why=f"phases are {', '.join(PHASES)}")
        with self._span(Span(name=name, start=self.now(), end=0)) as span:
            yield span

    @contextmanager
    def step(self, name: str, **details: Any) -> Iterator[Span]:
        """Time a step inside the phase or step that is open in this thread; ``span.details`` may be added to."""
        with self._span(Span(name=name, start=self.now(), end=0, parent=self._parent(), details=details)) as span:
            yield span

    def event(self, name: str, start: int, end: int, parent: str | None = None, **details: Any) -> None:
        """Record a step that was timed elsewhere.

        Args:
            start, end: nanoseconds since process start, as :meth:`now` gives them.
            parent: phase or path it belongs to; by default what is open in this thread.
        """
        parent = self._parent() if parent is None else parent
        if parent.split("/")[0] not in PHASES:
            raise FerBug(f"step {name!r} belongs to no phase", why=f"its parent is {parent!r}")
        self.spans.append(Span(name=name, start=start, end=max(start, end), parent=parent, details=details))

    def stage(self, name: str, path: str, why: str = "", **details: Any) -> None:
        """Say once, when it is decided, which of :data:`PATHS` a stage took; writes the stage's one log line."""
        if path not in PATHS:
            raise FerBug(f"{path!r} is no path of a stage", why=f"paths are {', '.join(PATHS)}")
        self.stages[name] = StagePath(name=name, path=path, why=why, details=details)
        log.log(logging.WARNING if path == "refused" else logging.INFO, "%s", self.stages[name])

    def expect(self, name: str, path: str, why: str = "") -> None:
        """What :meth:`stage` will say, as far as that is known: for who reads the report before it does."""
        self.stages[name] = StagePath(name=name, path=path, why=why)

    def finish(self) -> None:
        """The first token is out: the start ends now."""
        self._finished = self.now()

    @property
    def phases(self) -> list[Span]:
        """All phases by start, ``python`` first: it lasts until the first other phase, else until the report began."""
        found = sorted((span for span in self.spans if not span.parent), key=lambda span: span.start)
        if any(span.name == "python" for span in found):
            return found
        return [Span(name="python", start=0, end=found[0].start if found else self._created), *found]

    def phase_s(self, name: str) -> float:
        """Seconds of one phase, 0 where it did not happen."""
        return sum(span.seconds for span in self.phases if span.name == name)

    @property
    def total_s(self) -> float:
        """Seconds from process start to first token (to the end of the last phase, as long as that is not known)."""
        return max([self._finished, *(span.end for span in self.phases)]) / 1e9

    @property
    def the_26s(self) -> float:
        """Seconds of all but weights, named after the published figure."""
        return max(0.0, self.total_s - self.phase_s("weights"))

    @property
    def unaccounted_s(self) -> float:
        """Seconds inside no phase."""
        covered, position = 0, 0
        for span in self.phases:
            covered += max(0, span.end - max(span.start, position))
            position = max(position, span.end)
        return max(0.0, self.total_s - covered / 1e9)

    @property
    def failed(self) -> str:
        """How the start failed, ``""`` if it did not."""
        return next((f"{span.path}: {span.error}" for span in self.phases if span.error), "")

    def to_text(self) -> str:
        """An aligned table of phases with their share of the total, and the stages' paths.

        What ``sys.stdout`` cannot encode is written otherwise, so that the text can be printed everywhere.
        """
        total = self.total_s or 1e-9
        rows = [("phase", "start s", "seconds", "share", "")]
        for span in self.phases:
            bar = " " * round(span.start / total / 1e9 * 24) + BAR * max(1, round(span.seconds / total * 24))
            note = f"{bar:<25} failed: {span.error}" if span.error else bar
            rows.append(
                (span.name, f"{span.start / 1e9:.3f}", f"{span.seconds:.3f}", _share(span.seconds, total), note)
            )
        if self.unaccounted_s >= 0.001:
            rows.append(("(between)", "", f"{self.unaccounted_s:.3f}", _share(self.unaccounted_s, total), ""))
        rows.append(("total", "", f"{self.total_s:.3f}", _share(self.total_s, total), ""))
        rows.append(("all but weights", "", f"{self.the_26s:.3f}", _share(self.the_26s, total), ""))
        lines = [self.label] if self.label else []
        text = "\n".join([*lines, _table(rows), *(str(stage) for stage in self.stages.values())])
        return _printable(text, getattr(sys.stdout, "encoding", None) or "utf-8")

    def to_json(self) -> dict[str, Any]:
        """The report as plain data, schema :data:`SCHEMA`; times in ns since process start, sums in seconds."""
        return {
            "schema": SCHEMA,
            "label": self.label,
            "pid": self.pid,
            "started_at": self.started_at,
            "finished": self._finished,
            "total_s": self.total_s,
            "all_but_weights_s": self.the_26s,
            "unaccounted_s": self.unaccounted_s,
            "phase_s": {name: self.phase_s(name) for name in dict.fromkeys(span.name for span in self.phases)},
            "phases": [asdict(span) for span in self.phases],
            "steps": [_plain(asdict(span)) for span in self.spans if span.parent],
            "stages": [_plain(asdict(stage)) for stage in self.stages.values()],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str | bytes) -> Report:
        """The report another process wrote with :meth:`to_json`.

        Raises:
            OptionError: it is something else, or of another schema.
        """
        try:
            content = json.loads(data) if isinstance(data, (str, bytes)) else data
            if content["schema"] != SCHEMA:
                raise ValueError(f"its schema is {content['schema']!r}, not {SCHEMA}")
            report = cls(label=content["label"])
            report.pid, report.started_at = int(content["pid"]), float(content["started_at"])
            report._finished = int(content["finished"])
            report.spans = [Span(**span) for span in (*content["phases"], *content["steps"])]
            report.stages = {stage["name"]: StagePath(**stage) for stage in content["stages"]}
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError("this is no report of FER", why=str(error)) from error
        return report

    def to_chrome_trace(self) -> dict[str, Any]:
        """The timeline for chrome://tracing or Perfetto; :func:`chrome_trace` takes several reports at once."""
        return chrome_trace([self])

    def to_html(self) -> str:
        """One self-contained page with the waterfall; :func:`fer.waterfall.render` draws several reports at once."""
        from fer.waterfall import render

        return render([self])

    def save_json(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_json` to a file."""
        return _save(path, json.dumps(self.to_json(), indent=1))

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_chrome_trace` to a file."""
        return _save(path, json.dumps(self.to_chrome_trace()))

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write :meth:`to_html` to a file."""
        return _save(path, self.to_html())

    def _parent(self) -> str:
        stack: list[Span] = getattr(self._open, "stack", [])
        return stack[-1].path if stack else "python"

    @contextmanager
    def _span(self, span: Span) -> Iterator[Span]:
        stack = self._open.__dict__.setdefault("stack", [])
        stack.append(span)
        try:
            yield span
        except BaseException as error:
            span.error = f"{type(error).__name__}: {error}".rstrip(": ")
            raise
        finally:
            span.end = self.now()
            stack.remove(span)
            self.spans.append(span)


def chrome_trace(reports: Sequence[Report]) -> dict[str, Any]:
    """Starts for chrome://tracing or Perfetto, a process each, all from 0: microseconds since its process started.

    Overlapping phases of one start stand in lanes of their own.
    """
    # Process ids may repeat among starts, and viewers sort by them: a number each keeps starts apart and in order.
    events = [event for number, report in enumerate(reports, 1) for event in _trace_events(report, number)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schema": SCHEMA}}


def _trace_events(report: Report, number: int) -> Iterator[dict[str, Any]]:
    from fer.waterfall import lanes

    title = f"{report.label or 'start'} (pid {report.pid})"
    yield {"name": "process_name", "ph": "M", "pid": number, "tid": 0, "args": {"name": title}}
    ordered = [*report.phases, *sorted((s for s in report.spans if s.parent), key=lambda s: (s.start, -s.end))]
    for span, lane in zip(ordered, lanes(ordered), strict=True):
        arguments = _plain({**span.details, **({"error": span.error} if span.error else {})})
        times = {"ts": span.start / 1e3, "dur": (span.end - span.start) / 1e3}
        category = "step" if span.parent else "phase"
        yield {"name": span.name, "cat": category, "ph": "X", "pid": number, "tid": lane, "args": arguments, **times}


def comparison_table(*reports: Report) -> str:
    """Phases of several starts side by side; the last column is how many times faster the last is than the first."""
    names = [name for name in PHASES if any(report.phase_s(name) for report in reports)]
    titles = [report.label or f"start {number}" for number, report in enumerate(reports, 1)]
    rows = [("phase", *(f"{title} s" for title in titles), "faster")]
    sums = {name: [report.phase_s(name) for report in reports] for name in names}
    sums["(between)"] = [report.unaccounted_s for report in reports]
    sums["total"] = [report.total_s for report in reports]
    sums["all but weights"] = [report.the_26s for report in reports]
    for name, seconds in sums.items():
        rows.append((name, *(f"{value:.3f}" for value in seconds), _faster(seconds[0], seconds[-1])))
    return _table(rows)


def process_start_ns() -> int:
    """When this process started, on ``CLOCK_BOOTTIME``, exact to a clock tick (10 ms); now where /proc is missing."""
    try:
        # The second field, the command, may hold spaces and brackets: count from its last bracket.
        fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
        start = int(fields[19]) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return boottime_ns()
    return min(start, boottime_ns())


def boottime_ns() -> int:
    """Now, on the clock that processes' starts are told in."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _word(value: Any) -> str:
    """A value of a log line: quoted where it holds anything but plain characters, so that one line stays one line."""
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if text and all(c.isalnum() or c in "._-/:+%," for c in text) else json.dumps(text, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _share(seconds: float, total: float) -> str:
    return f"{100 * seconds / total:.1f} %"


def _faster(before: float, after: float) -> str:
    return f"{before / after:.1f}x" if before >= 0.0005 and after >= 0.0005 else ""


def _printable(text: str, encoding: str) -> str:
    try:
        BAR.encode(encoding)
    except UnicodeEncodeError:
        text = text.replace(BAR, ASCII_BAR)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """First and, where its title is empty, last column to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {0} | ({len(widths) - 1} if not rows[0][-1] else set())
    lines = []
    for row in rows:
        cells = [t.ljust(w) if c in left else t.rjust(w) for c, (t, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])


def _save(path: str | os.PathLike[str], text: str) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
