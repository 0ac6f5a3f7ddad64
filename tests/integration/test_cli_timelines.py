"""``fer load`` writes the timeline of its start to files."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.cli import fer, start_keeper
from tests.support.engine_models import llama
from tests.support.processes import Children

pytestmark = pytest.mark.timeout(300)


def test_load_writes_a_page_and_a_trace(children: Children, tmp_path: Path) -> None:
    model, page, trace = llama(tmp_path / "llama"), tmp_path / "new" / "page.html", tmp_path / "new" / "trace.json"
    start_keeper(children)
    loading = ("load", "--model", model, "--device", "cpu")
    done = fer(*loading, "--html", page, "--trace", trace)
    assert done.code == 0, done.err
    HTMLParser().feed(page.read_text("utf-8"))
    events = json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert {"python", "weights", "publish"} <= {event["name"] for event in events}

    file = tmp_path / "file"
    file.touch()
    refused = fer(*loading, "--trace", file / "trace.json", "--json")
    assert refused.code == 2
    assert str(file / "trace.json") in refused.json["error"]["what"]
