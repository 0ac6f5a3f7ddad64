"""The report of a start: timeline, table, JSON, trace, waterfall."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fer.errors import FerBug, OptionError
from fer.report import PATHS, PHASES, Report, Span, StagePath, chrome_trace, comparison_table, process_start_ns
from fer.waterfall import lanes, render

ROOT = Path(__file__).parents[2]
S = 1_000_000_000


def made(label: str = "", finished: int = 10 * S, *spans: Span) -> Report:
    """A report with times of our own."""
    report = Report(label=label)
    report.spans, report._finished = list(spans), finished
    return report


def span(name: str, start: float, end: float, parent: str = "", **details: Any) -> Span:
    return Span(name=name, start=int(start * S), end=int(end * S), parent=parent, details=details)


@pytest.fixture
def cold() -> Report:
    report = made(
        "cold",
        10 * S,
        span("tokenizer", 2, 2.5),
        span("weights", 2.5, 8.5),
        span("server", 9, 10),
        span("load", 2.5, 8, "weights", bytes=123),
        span("read", 3, 4, "weights/load"),
    )
    report.stage("weights", "published", "no edition fits", bytes=123)
    return report


# --- times ---


def test_time_counts_from_the_start_of_the_process() -> None:
    """A child that knows when it was started by us: imports lie before its report."""
    code = (
        "import time; from fer.report import *; r = Report();"
        "print(process_start_ns(), r.now(), r.phases[0].name, r.phases[0].start, r.phases[0].end)"
    )
    import time

    before = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
    after = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    started, now, name, start, end = out.stdout.split()
    tick = S // os.sysconf("SC_CLK_TCK")
    assert before - tick <= int(started) <= after
    assert (name, start) == ("python", "0")
    assert 0 < int(end) <= int(now) <= after - before + tick


def test_a_command_with_brackets_and_spaces_does_not_confuse_it(tmp_path: Path) -> None:
    link = tmp_path / "py) S 1 2 (x"
    link.symlink_to(sys.executable)
    code = "from fer.report import *; print(process_start_ns())"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHOME": sys.base_prefix}
    out = subprocess.run([link, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env)
    assert int(out.stdout) >= process_start_ns() - S


def test_python_lasts_until_the_first_phase() -> None:
    report = made("", 0, span("weights", 3, 4))
    assert [(p.name, p.start, p.end) for p in report.phases] == [("python", 0, 3 * S), ("weights", 3 * S, 4 * S)]
    assert report.total_s == 4
    assert [p.name for p in Report().phases] == ["python"]


def test_the_26_seconds_are_all_but_weights(cold: Report) -> None:
    assert (cold.total_s, cold.phase_s("weights"), cold.the_26s) == (10, 6, 4)
    assert cold.unaccounted_s == pytest.approx(0.5)


def test_overlapping_phases_leave_no_time_unaccounted_twice() -> None:
    report = made("", 10 * S, span("distributed", 1, 6), span("weights", 2, 4), span("kv", 5, 9))
    assert report.unaccounted_s == pytest.approx(1)
    assert report.phase_s("python") == 1


def test_a_phase_that_happens_twice_adds_up() -> None:
    report = made("", 0, span("kv", 1, 2), span("kv", 3, 5))
    assert report.phase_s("kv") == 3
    assert report.to_json()["phase_s"] == {"python": 1, "kv": 3}


def test_phases_and_steps_are_timed_and_nested() -> None:
    report = Report()
    with report.phase("weights"):
        with report.step("attach", slabs=3) as attach, report.step("map"):
            attach.details["bytes"] = 7
        start = report.now()
        report.event("verify", start, start + 5, ok=True)
    report.finish()
    found = {s.path: s for s in report.spans}
    assert set(found) == {"weights", "weights/attach", "weights/attach/map", "weights/verify"}
    assert found["weights/attach"].details == {"slabs": 3, "bytes": 7}
    assert found["weights/verify"].end - found["weights/verify"].start == 5
    assert (
        found["weights"].start <= found["weights/attach"].start <= found["weights/attach"].end <= found["weights"].end
    )
    assert found["weights"].end / S <= report.total_s


def test_phases_of_threads_do_not_mix_their_steps() -> None:
    report, both = Report(), threading.Barrier(2, timeout=20)

    def run(name: str) -> None:
        with report.phase(name):
            both.wait()
            with report.step("inside"):
                both.wait()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("weights", "distributed")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(s.path for s in report.spans if s.parent) == ["distributed/inside", "weights/inside"]


def test_a_failure_is_recorded_and_goes_on() -> None:
    report = Report(label="cold")
    with pytest.raises(ValueError, match="no room"), report.phase("kv"), report.step("reserve"):
        raise ValueError("no room")
    assert {s.path: s.error for s in report.spans} == {"kv/reserve": "ValueError: no room", "kv": "ValueError: no room"}
    assert report.failed == "kv: ValueError: no room"
    assert "failed: ValueError: no room" in report.to_text()
    assert "no room" in report.to_html()
    with report.phase("server"):
        pass
    assert report.spans[-1].error == ""


def test_names_are_checked() -> None:
    report = Report()
    with pytest.raises(FerBug, match="'weight' is no phase"), report.phase("weight"):
        pass
    with pytest.raises(FerBug, match="belongs to no phase"):
        report.event("x", 0, 1, "nothing")
    with pytest.raises(FerBug, match="'hit' is no path"):
        report.stage("weights", "hit")


# --- stages ---


def test_each_stage_logs_one_line(caplog: pytest.LogCaptureFixture) -> None:
    report = Report()
    with caplog.at_level(logging.INFO, logger="fer"):
        report.stage("weights", "attached", "fingerprint 3f2a matches", bytes=7, seconds=0.25, gpu="GPU-1/2")
        report.stage("kernels", "absent")
        report.stage("cudagraph", "refused", 'two\nlines "quoted"', empty="")
    assert [record.getMessage() for record in caplog.records] == [
        'stage=weights path=attached why="fingerprint 3f2a matches" bytes=7 seconds=0.25 gpu=GPU-1/2',
        "stage=kernels path=absent",
        r'stage=cudagraph path=refused why="two\nlines \"quoted\"" empty=""',
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO", "WARNING"]
    assert {record.name for record in caplog.records} == {"fer"}


def test_every_path_is_known() -> None:
    report = Report()
    for path in PATHS:
        report.stage("weights", path)
        assert report.stages["weights"] == StagePath(name="weights", path=path)


# --- text ---


def test_the_table_is_aligned_and_complete(cold: Report) -> None:
    lines = cold.to_text().splitlines()
    assert lines[0] == "cold"
    rows = {line.split("  ")[0]: line for line in lines[3:]}
    assert "60.0 %" in rows["weights"]
    assert "6.000" in rows["weights"]
    assert "0.500" in rows["(between)"]
    assert "40.0 %" in rows["all but weights"]
    assert lines[-1] == 'stage=weights path=published why="no edition fits" bytes=123'
    column = lines[1].index("share") + len("share")
    assert all(line[column - 1] == "%" for line in lines[3:-1])


@pytest.mark.parametrize(("encoding", "bar", "word"), [("ascii", "####", "\\xe4"), ("utf-8", "████", "ä")])
def test_the_table_can_be_printed_whatever_stdout_encodes(
    cold: Report, monkeypatch: pytest.MonkeyPatch, encoding: str, bar: str, word: str
) -> None:
    cold.stage("kernels", "refused", "Kernel fällt aus")
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding, write_through=True))
    print(cold.to_text())
    text = written.getvalue().decode(encoding)
    assert bar in text
    assert f"Kernel f{word}llt aus" in text


def test_two_starts_side_by_side(cold: Report) -> None:
    recovered = made("recovered", 3 * S, span("tokenizer", 2, 2.5), span("weights", 2.5, 2.6), span("server", 2.6, 3))
    lines = {line.split("  ")[0].strip(): line.split() for line in comparison_table(cold, recovered).splitlines()}
    assert lines["weights"] == ["weights", "6.000", "0.100", "60.0x"]
    assert lines["total"] == ["total", "10.000", "3.000", "3.3x"]
    assert lines["all but weights"][-3:] == ["4.000", "2.900", "1.4x"]
    assert "kv" not in lines
    assert len(comparison_table(cold, recovered, recovered).splitlines()[0].split("  ")) >= 4


def test_a_start_without_any_time_divides_by_nothing() -> None:
    report = made("", 0)
    report._created = 0
    assert report.total_s == 0
    assert report.to_text()
    assert report.to_html()
    assert comparison_table(report, report)


# --- JSON, trace, files ---


def test_another_process_can_render_it(cold: Report) -> None:
    text = json.dumps(cold.to_json())
    copy = Report.from_json(text)
    assert copy.to_json() == cold.to_json() == Report.from_json(cold.to_json()).to_json()
    assert copy.to_text() == cold.to_text()
    assert copy.to_html() == cold.to_html()
    assert json.loads(text)["schema"] == 1


def test_details_of_any_kind_become_plain(tmp_path: Path) -> None:
    report = made("", S, span("weights", 0, 1), span("x", 0, 1, "weights", path=tmp_path))
    report.stage("weights", "off", gpu=tmp_path)
    assert json.dumps(report.to_json())
    assert json.dumps(report.to_chrome_trace())


@pytest.mark.parametrize("data", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1}', {"schema": 1, "label": ""}])
def test_other_data_is_no_report(data: Any) -> None:
    with pytest.raises(OptionError, match="no report of FER"):
        Report.from_json(data)


def test_the_trace_is_in_microseconds_and_overlaps_have_lanes() -> None:
    report = made("x", 9 * S, span("distributed", 1, 6), span("weights", 2, 4), span("a", 2, 3, "weights"))
    events = {event["name"]: event for event in report.to_chrome_trace()["traceEvents"]}
    assert (events["weights"]["ts"], events["weights"]["dur"], events["weights"]["ph"]) == (2e6, 2e6, "X")
    assert events["weights"]["tid"] != events["distributed"]["tid"]
    assert events["python"]["tid"] == events["distributed"]["tid"]
    assert events["process_name"]["args"]["name"].startswith("x (pid ")


def test_within_a_lane_spans_nest_or_follow() -> None:
    spans = [span("a", 0, 4), span("b", 2, 6), span("c", 4, 5), span("in", 2, 3, "a"), span("across", 3, 5, "a")]
    assert lanes(spans) == [0, 1, 0, 0, 1]


def test_files_are_written_with_their_folder(cold: Report, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert json.loads(cold.save_json(folder / "r.json").read_text())["label"] == "cold"
    assert json.loads(cold.save_chrome_trace(folder / "t.json").read_text())["traceEvents"]
    assert cold.save_html(folder / "r.html").read_text().startswith("<!DOCTYPE html>")


# --- waterfall ---

_VOID = {"meta", "br", "line", "rect"}


class Page(HTMLParser):
    """Checks nesting and collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def bars(page: Page, kind: str) -> list[dict[str, str | None]]:
    return [a for tag, a in page.tags if tag == "rect" and kind in (a.get("class") or "").split()]


def test_the_page_is_whole_and_needs_nothing_else(cold: Report) -> None:
    text = cold.to_html()
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.tags}
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert {"cold", "weights", "all but weights"} <= {part.strip() for part in page.text}


def test_every_phase_and_step_has_its_bar_to_scale(cold: Report) -> None:
    page = Page(cold.to_html())
    assert [b["class"] for b in bars(page, "bar")] == ["bar python", "bar tokenizer", "bar weights", "bar server"]
    widths = {(b["class"] or "").split()[1]: float(b["width"] or 0) for b in bars(page, "bar")}
    assert widths["weights"] / widths["server"] == pytest.approx(6, rel=0.01)
    assert len(bars(page, "sub")) == 2
    assert len(bars(page, "deep")) == 1


def test_several_starts_share_one_axis(cold: Report) -> None:
    page = Page(render([cold, made("recovered", 2 * S, span("weights", 1, 1.1), span("server", 1.1, 2))]))
    widths = [float(bar["width"] or 0) for bar in bars(page, "weights")]
    assert widths[0] / widths[-1] == pytest.approx(60, rel=0.05)
    assert "5.0×" in page.text
    assert "60×" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 2


def test_what_a_report_says_cannot_become_markup() -> None:
    evil = '<script>alert("x")</script>'
    report = made(evil, S, span("weights", 0, 1), span(evil, 0, 1, "weights", key=evil))
    report.spans[0].error = evil
    report.stage(evil, "refused", evil, note=evil)
    assert "script" not in {tag for tag, _ in Page(report.to_html()).tags}


def test_thousands_of_steps_stay_a_page() -> None:
    steps = [span(f"s{number}", 1, 2, "weights") for number in range(5000)]
    text = made("", 2 * S, span("weights", 1, 2), *steps).to_html()
    assert "4976 more" in text
    assert len(text) < 60_000


def test_no_report_gives_a_page_too() -> None:
    assert "No report was given." in Page(render([])).text


def test_phases_are_the_public_ones() -> None:
    assert PHASES == ("python", "tokenizer", "distributed", "weights", "kv", "kernels", "graphs", "server")


def test_rich_is_not_needed() -> None:
    code = "import sys, fer.report, fer.waterfall; sys.exit(bool({'rich', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=ROOT).returncode == 0


def test_a_trace_of_several_starts_keeps_them_apart() -> None:
    reports = [Report(label=label) for label in ("cold", "recovered")]
    for report in reports:
        with report.phase("weights"):
            pass
    events = chrome_trace(reports)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert [name.split()[0] for name in names.values()] == ["cold", "recovered"]
    for number in names:
        assert "weights" in [event["name"] for event in events if event["pid"] == number]
