"""``fer batch run``: every line has its result once, whatever dies in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import fer
from tests.support.keeper import wait_until
from tests.support.processes import Children, kill_and_wait
from tests.support.serve_engine import expected
from tests.support.serving import LIMIT_S, Service

Start = Callable[..., Service]
LENGTH = 40


@pytest.fixture
def start(children: Children, tmp_path: Path) -> Start:
    def made(**asked: Any) -> Service:
        service = Service(children, tmp_path, batch=True, **asked)
        service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")
        return service

    return made


def write(path: Path, count: int, *more: bytes, length: int = LENGTH) -> Path:
    """A file of requests, with further lines in the middle."""
    found = [json.dumps(request(f"r{number}", f"prompt {number}", length)).encode() for number in range(count)]
    middle = count // 2
    path.write_bytes(b"\n".join([*found[:middle], *more, *found[middle:]]) + b"\n")
    return path


def request(name: str, prompt: str, length: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": length, **more}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def right(path: Path, count: int, length: int = LENGTH) -> bool:
    """Whether each of the requests has one result, and the right one."""
    texts = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["text"]
        for each in results(path)
        if each["error"] is None and each["response"]["status_code"] == 200
    }
    named = [each["custom_id"] for each in results(path) if each["custom_id"] is not None]
    wanted = {f"r{number}": expected(f"prompt {number}", length) for number in range(count)}
    return texts == wanted and len(named) == len({*named})


def run(service: Service, requests: Path, output: Path, *more: str) -> list[str]:
    return ["batch", "run", str(requests), "--output", str(output), "--url", service.address, "--json", *more]


def test_bad_lines_have_errors_and_the_rest_has_answers(start: Start, tmp_path: Path) -> None:
    service = start()
    long = json.dumps(request("long", "x" * 600, 5)).encode()
    other = json.dumps(request("other", "x", 5, temperature=1)).encode()
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(requests, 6, b"{nonsense", b'{"custom_id": "r0"}', long, other)
    done = fer(*run(service, requests, output))
    assert done.code == 1
    assert done.json == {"before": 0, "answered": 6, "refused": 2, "bad": 2, "left": 0, "preemptible": 6}
    assert "line 4: it is not valid JSON" in done.err and "line 5: url is None" in done.err
    found = {each["custom_id"]: each for each in results(output)}
    assert found["long"]["response"]["status_code"] == 400 and found["other"]["response"]["status_code"] == 400
    assert found["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert sorted(each["error"]["line"] for each in results(output) if each["error"]) == [4, 5]
    again = fer(*run(service, requests, output))
    assert again.json == {"before": 8, "answered": 0, "refused": 0, "bad": 2, "left": 0, "preemptible": 0}
    assert len(results(output)) == 10, "nothing is written twice"


def test_killed_and_started_again_it_goes_on(start: Start, children: Children, tmp_path: Path) -> None:
    service = start()
    requests, output = write(tmp_path / "in.jsonl", 40), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "fer", *run(service, requests, output, "--concurrency", "3")]
    for atleast in (5, 12):
        client = children.spawn(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        wait_until(lambda: output.exists() and output.read_bytes().count(b"\n") >= atleast, "some results")  # noqa: B023
        children.kill(client)
    done = fer(*run(service, requests, output))
    assert done.code == 0 and done.json["before"] >= 12 and done.json["before"] + done.json["answered"] == 40
    assert right(output, 40)


def test_engines_that_die_meanwhile_lose_nothing(start: Start, children: Children, tmp_path: Path) -> None:
    service = start()
    requests, output = write(tmp_path / "in.jsonl", 24, length=100), tmp_path / "out.jsonl"
    client = children.spawn([sys.executable, "-m", "fer", *run(service, requests, output)], stderr=subprocess.DEVNULL)
    service.until_status("requests are there", lambda status: status["batch"]["in_flight"] > 0)
    for _ in range(2):
        status = service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")
        kill_and_wait(status["batch"]["processes"][0]["pid"])
    assert client.wait(LIMIT_S) == 0
    assert right(output, 24, 100)


def test_a_service_that_comes_later_and_is_killed_is_waited_for(
    start: Start, children: Children, tmp_path: Path
) -> None:
    service = start()
    port = service.place[1]
    requests, output = write(tmp_path / "in.jsonl", 12, length=100), tmp_path / "out.jsonl"
    assert service.end() == 0
    client = children.spawn([sys.executable, "-m", "fer", *run(service, requests, output)], stderr=subprocess.DEVNULL)
    wait_until(output.exists, "it has begun")
    again = start(port=port)
    again.until_status("requests are there", lambda status: status["batch"]["in_flight"] > 0)
    kill_and_wait(again.process.pid)
    start(port=port)
    assert client.wait(LIMIT_S) == 0
    assert right(output, 12, 100)


def test_nobody_there_leaves_everything_to_the_next_run(start: Start, tmp_path: Path) -> None:
    service = start()
    assert service.end() == 0
    requests, output = write(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    done = fer(*run(service, requests, output, "--patience-s", "0.1"))
    assert done.code == 1 and done.json["left"] == 3 and "Connection refused" in done.err
    assert results(output) == []


def test_a_request_that_engines_die_of_is_not_sent_again(start: Start, tmp_path: Path) -> None:
    service = start()
    requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(json.dumps(request("p", "poison", 5)) + "\n")
    done = fer(*run(service, requests, output))
    assert done.code == 1 and done.json["refused"] == 1
    assert results(output)[0]["response"]["body"]["error"]["code"] == "engine_died"
    service.until_status("three engines died", lambda status: status["batch"]["failures"] == 3)


def test_mistakes_are_told(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("")
    ask = ["batch", "run", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    for more in (["--url", "localhost"], ["--concurrency", "0"], ["--tier", "fast"]):
        assert fer(*ask, *more).code == 2
    assert fer("batch", "run", str(tmp_path / "none"), "--output", str(tmp_path / "out.jsonl")).code == 2
    assert fer("batch", "pause").code == 2, "no service runs here"
