"""``fer demo --failover``: a real service, a real death, and nothing left of either."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fer.cli import demo_failover
from tests.support import engine_models, serve_models
from tests.support.processes import with_variable

pytestmark = pytest.mark.timeout(180)


def test_the_gap_of_a_standby_is_shown_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_failover, "WAYS", demo_failover.WAYS[:1])
    monkeypatch.setattr(demo_failover, "TOKENS", 900)  # they come quickly
    monkeypatch.setattr(demo_failover, "BEFORE", 2)  # most tokens of this model are no text of their own
    made = engine_models.llama(tmp_path / "tiny", seed=3, eos_token_id=None, max_position_embeddings=1024)
    page, home = tmp_path / "page.html", tmp_path / "home"
    demo_failover.run(serve_models.add_tokenizer(made), home=home, device="cpu", html=page, as_json=True)
    (way,) = json.loads(capsys.readouterr().out)["ways"]
    assert way["way"] == way["outage"]["path"] == "standby"
    assert {*way["outage"]["promotion"]} == {"claim", "fence", "backing", "self_test"}
    assert way["tokens"][0] <= 0 < way["tokens"][-1], "it died in the middle; both may fall into one millisecond"
    assert 0 < way["gap_s"] <= way["tokens"][-1] - way["tokens"][0]
    assert "SIGKILL" in page.read_text()
    assert not [pid for pid in with_variable("FER_HOME", str(home)) if pid != os.getpid()]
