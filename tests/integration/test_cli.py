"""The commands against a real keeper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import LIMIT_S, fer, start_keeper
from tests.support.engine_models import llama
from tests.support.keeper import read_line
from tests.support.processes import WAIT_S, Children

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with random weights."""
    return llama(tmp_path_factory.mktemp("models") / "llama")


# --- without a keeper ---


@pytest.mark.parametrize("command", [["status"], ["evict", "--all"], ["verify"], ["keeper", "stop"]])
def test_without_a_keeper_commands_say_so(command: list[str], runtime_dir: Path) -> None:
    done = fer(*command)
    assert done.code == 4
    assert done.out == ""
    assert "no keeper listens" in done.err
    assert str(runtime_dir) in done.err
    assert "fix:" in done.err


def test_an_error_is_an_object_for_programs(runtime_dir: Path) -> None:
    done = fer("status", "--json")
    assert done.code == 4
    error = done.json["error"]
    assert error["kind"] == "KeeperUnavailable"
    assert error["fields"]["looked_in"] == [str(runtime_dir)]


def test_a_mistake_in_the_arguments_is_an_object_too() -> None:
    done = fer("evict", "--nonsense", "--json")
    assert done.code == 2
    assert done.json["error"]["kind"] == "UsageError"
    assert "--nonsense" in done.json["error"]["what"]


@pytest.mark.parametrize("arguments", [["evict"], ["evict", "abc", "--all"], ["nonsense"], ["load"]])
def test_mistakes_are_code_two(arguments: list[str]) -> None:
    assert fer(*arguments).code == 2


def test_too_much_named_is_said_so() -> None:
    assert "too much" in fer("evict", "--all", "--gpu", "x").err
    assert "name what to evict" in fer("evict").err


@pytest.mark.parametrize("reader", ["full", "gone"])
def test_a_log_that_takes_nothing_more_stops_nothing(reader: str) -> None:
    code = (
        "import logging, fer.cli.log as log\nlog.log_to_stderr()\n"
        "for _ in range(3): logging.getLogger('fer').info('on')\nprint('served')"
    )
    if reader == "full":
        log = os.open("/dev/full", os.O_WRONLY)
    else:
        read, log = os.pipe()
        os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log, text=True, timeout=LIMIT_S, check=False
        )
    finally:
        os.close(log)
    assert (done.stdout, done.returncode) == ("served\n", 0)


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["status"], ["status", "--json"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_named_without_a_traceback(
    children: Children, arguments: list[str], unbuffered: str
) -> None:
    if arguments[0] == "status":
        start_keeper(children)
    with open("/dev/full", "wb") as full:
        command, env = [sys.executable, "-m", "fer", *arguments], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert done.returncode == 1
    assert "error: the result cannot be written to stdout" in done.stderr
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "fer", "--version"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_a_bad_setting_is_refused_by_name(model: Path) -> None:
    done = fer("load", "--model", model, "--verify", "maybe", "--json")
    assert done.code == 2
    assert done.json["error"]["kind"] == "OptionError"
    assert "maybe" in done.json["error"]["what"]


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    done = fer("load", "--model", tmp_path, "--json")
    assert done.code == 2
    assert done.json["error"]["kind"] == "CheckpointError"


def test_nothing_is_coloured_where_nobody_looks() -> None:
    for done in (fer("doctor"), fer("--help"), fer("status")):
        assert "\x1b" not in done.out + done.err


# --- with a keeper ---


def test_a_keeper_runs_shows_itself_and_stops(children: Children, runtime_dir: Path) -> None:
    keeper = start_keeper(children)
    status = fer("status", "--json").json
    assert status["protection"] == "minder"
    assert status["editions"] == []
    assert "holds no editions" in fer("status").out
    done = fer("keeper", "stop", "--json")
    assert (done.code, done.json) == (0, {"stopped": True})
    assert keeper.wait(WAIT_S) == 0
    assert fer("status").code == 4


def test_a_second_keeper_is_refused(children: Children) -> None:
    start_keeper(children)
    second = children.spawn([sys.executable, "-m", "fer", "keeper", "run"])
    assert second.wait(LIMIT_S) != 0
    assert fer("status").code == 0


def test_load_explain_verify_evict(children: Children, model: Path) -> None:
    start_keeper(children)
    missing = fer("explain", "--model", model, "--device", "cpu", "--json")
    assert missing.code == 3
    assert missing.json["would_attach"] is False
    assert missing.json["reasons"]

    loaded = fer("load", "--model", model, "--device", "cpu", "--json", fresh=True)
    assert loaded.code == 0, loaded.err
    weights = loaded.json["weights"]
    assert (weights["path"], weights["published"]) == ("loaded", True)
    edition = weights["edition"]

    (kept,) = fer("status", "--json").json["editions"]
    assert kept["edition"] == edition
    assert kept["holders"] == []
    assert kept["digests"] is True  # fer load waits for them
    assert kept["fields"]["group"]["model"] == str(model)
    assert edition[:12] in fer("status").out

    hit = fer("explain", "--model", model, "--device", "cpu", "--json")
    assert (hit.code, hit.json["edition"]) == (0, edition)

    near = fer("explain", "--model", model, "--device", "cpu", "--dtype", "bfloat16", "--json")
    assert near.code == 3
    (other,) = near.json["near"]
    assert other["edition"] == edition
    assert ["dtype", "bfloat16", "float32"] in [
        [name, here.strip("'\""), kept.strip("'\"")] for name, here, kept in other["differences"]
    ]

    for extra in ([], ["--full"], [edition[:8]]):
        verified = fer("verify", *extra, "--json")
        assert verified.code == 0
        assert verified.json["intact"] is True
    assert "digests" in verified.json["editions"][0]["found"] or extra

    again = fer("load", "--model", model, "--device", "cpu", "--json")
    assert again.json["weights"]["path"] == "attached"

    assert fer("evict", "0000nothing", "--json").code == 2
    gone = fer("evict", edition[:10], "--json")
    assert [info["edition"] for info in gone.json["evicted"]] == [edition]
    assert fer("status", "--json").json["editions"] == []


def test_a_leased_edition_is_neither_evicted_nor_stopped(children: Children, model: Path) -> None:
    from fer.weights.client import KeeperClient

    start_keeper(children)
    assert fer("load", "--model", model, "--device", "cpu").code == 0
    with KeeperClient.connect(label="an engine") as engine:
        (kept,) = engine.status().editions
        engine.lease(kept.edition).close()
        for command in (["evict", kept.edition], ["keeper", "stop"]):
            refused = fer(*command, "--json")
            assert refused.code == 5
            assert refused.json["error"]["kind"] == "LeasesStand"
            assert "an engine" in json.dumps(refused.json["error"]["fields"])
            text = fer(*command)
            assert f"holder: an engine ({os.getpid()})" in text.err
        every = fer("evict", "--all", "--json")
        assert (every.code, every.json["evicted"]) == (0, [])
        assert [info["edition"] for info in every.json["in_use"]] == [kept.edition]
        assert f"used by an engine ({os.getpid()})" in fer("evict", "--all").out
        assert fer("evict", "--gpu", "GPU-other", "--json").json == {"evicted": [], "in_use": []}
        assert "an engine" in fer("status").out
        assert fer("keeper", "stop", "--force").code == 0


def test_a_running_keeper_gets_a_clean_bill_from_the_doctor(children: Children, runtime_dir: Path) -> None:
    start_keeper(children)
    checks = {check["check"]: check for check in fer("doctor", "--json").json["checks"]}
    assert checks["keeper"]["level"] == "ok"
    assert "minder" in checks["keeper"]["found"]
    assert checks[f"socket directory {runtime_dir}"]["level"] == "ok"


@pytest.mark.parametrize("place", [lambda base: base / "a", lambda base: base / ("long" * 30)])
def test_the_runtime_directory_may_be_given(children: Children, tmp_path: Path, place: Callable[[Path], Path]) -> None:
    folder = place(tmp_path)
    keeper = children.spawn([sys.executable, "-m", "fer", "keeper", "run", "--runtime-dir", str(folder)])
    assert read_line(keeper.stdout)
    assert fer("status", "--runtime-dir", folder).code == 0
    assert fer("status").code == 4
    assert fer("keeper", "stop", "--runtime-dir", folder).code == 0
    assert keeper.wait(WAIT_S) == 0
