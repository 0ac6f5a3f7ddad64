"""The main job: real weights, real deaths."""

from __future__ import annotations

import json
import os
import signal
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.cli import fer
from tests.support.keeper import read_line
from tests.support.processes import WAIT_S, Children, with_variable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LIMIT_S = 500.0


def _left_over(home: str) -> list[int]:
    return list(with_variable("FER_HOME", home))


def test_the_demo_recovers_the_same_tokens_twice(smollm2_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "waterfall.html"
    trace = tmp_path / "trace.json"
    files = ("--html", page, "--trace", trace)
    done = fer("demo", "--model", smollm2_folder, "--device", "cpu", *files, "--json", limit_s=LIMIT_S)
    assert done.code == 0, done.err
    data = done.json
    assert data["same_tokens"] is True
    assert [start["path"] for start in data["starts"]] == ["loaded", "attached", "attached"]
    assert len({start["pid"] for start in data["starts"]}) == 3
    assert len({tuple(start["tokens"]) for start in data["starts"]}) == 1
    assert "Paris" in data["starts"][0]["answer"]
    for start in data["starts"]:
        phases = start["report"]["phase_s"]
        assert {"python", "tokenizer", "weights", "server"} <= set(phases)
    assert data["html"] == str(page)
    HTMLParser().feed(page.read_text("utf-8"))
    named = [event for event in json.loads(trace.read_text("utf-8"))["traceEvents"] if event["ph"] == "M"]
    assert [event["args"]["name"].split(" (")[0] for event in named] == [start["label"] for start in data["starts"]]
    for words in ("Paris", "SIGKILL to engine", "SIGKILL to keeper", "256.6 MiB"):
        assert words in done.err
    assert _left_over(os.environ["FER_HOME"]) == []


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGINT, "1. Cold start", id="SIGINT while an engine starts"),
        pytest.param(signal.SIGTERM, "SIGKILL to engine", id="SIGTERM while the keeper holds weights"),
    ],
)
def test_an_interrupted_demo_ends_all_it_started(
    children: Children, smollm2_folder: Path, number: signal.Signals, moment: str
) -> None:
    demo = children.spawn([sys.executable, "-m", "fer", "demo", "--model", str(smollm2_folder), "--device", "cpu"])
    while moment not in read_line(demo.stdout, LIMIT_S):
        assert demo.poll() is None
    assert _left_over(os.environ["FER_HOME"])
    demo.send_signal(number)
    assert demo.wait(WAIT_S) == 130
    assert _left_over(os.environ["FER_HOME"]) == []


def test_a_model_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = fer("demo", "--model", tmp_path / "nothing", "--json")
    assert done.code == 2
    assert done.json["error"]["kind"] == "CheckpointError"
    assert _left_over(os.environ["FER_HOME"]) == []
