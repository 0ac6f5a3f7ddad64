"""How commands speak."""

from __future__ import annotations

import json
import logging

import pytest
import typer

from fer.cli import output
from fer.cli.log import log_to_stderr
from fer.errors import LeasesStand, OutOfMemory


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 29, "1.5 GiB"), (5 << 50, "5120.0 TiB")],
)
def test_sizes(count: int | None, text: str) -> None:
    assert output.size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119, "119 s"), (600, "10 min"), (7200, "2 h"), (864000, "10 d")]
)
def test_ages(seconds: float, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.time, "time", lambda: 1_000_000.0)
    assert output.ago(1_000_000.0 - seconds) == text


@pytest.mark.parametrize(
    ("rank", "text"),
    [("tp0/1,pp0/1,dp0/1,ep0/1", "single"), ("tp1/8,pp0/1,dp0/2,ep0/1", "tp1/8,dp0/2")],
)
def test_ranks(rank: str, text: str) -> None:
    assert output.place(rank) == text


def test_counts() -> None:
    assert [output.count(n, "edition") for n in (0, 1, 2)] == ["0 editions", "1 edition", "2 editions"]


def test_an_error_in_text_has_cause_remedy_and_holders(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, output.guarded():
        raise LeasesStand(
            "editions are in use",
            why="engines run",
            fix="Stop them",
            holders=["engine (12)", {"pid": 13, "label": "[red]x"}],
        )
    assert ended.value.exit_code == 5
    said = capsys.readouterr()
    assert said.out == ""
    for words in (
        "error: editions are in use",
        "why: engines run",
        "fix: Stop them",
        "holder: engine (12)",
        "[red]x (13)",
    ):
        assert words in said.err


def test_an_error_for_programs_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, output.guarded(as_json=True):
        raise OutOfMemory("no room", needed=2, free=1)
    assert ended.value.exit_code == 6
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["kind"], error["fields"]) == ("OutOfMemory", {"needed": 2, "free": 1})


def test_a_bug_keeps_its_traceback_and_stays_readable_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, output.guarded(as_json=True):
        raise ZeroDivisionError("oh")
    assert ended.value.exit_code == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["error"]["kind"] == "ZeroDivisionError"
    assert "Traceback" in said.err
    with pytest.raises(ZeroDivisionError), output.guarded():
        raise ZeroDivisionError("oh")


def test_the_log_follows_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("fer")
    before, level = list(logger.handlers), logger.level
    try:
        log_to_stderr("info")
        logger.info("stage=weights path=attached")
        logger.debug("not shown")
        assert capsys.readouterr().err == "fer: stage=weights path=attached\n"
    finally:
        logger.handlers[:] = before
        logger.setLevel(level)
