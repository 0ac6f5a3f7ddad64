"""Batch files: a line is a request or has an error, and an output is gone on with wherever it ended."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fer.errors import UsageError
from fer.standby.batch_file import Asked, Bad, Output, read

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m"}}


def lines(folder: Path, *given: bytes | dict[str, Any]) -> list[Asked | Bad]:
    path = folder / "in.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in given))
    return list(read(path))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "no JSON object"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        ({**LINE, "custom_id": ""}, "custom_id must be a text"),
        ({**LINE, "custom_id": 7}, "custom_id must be a text"),
        ({**LINE, "method": "GET"}, "only POST"),
        ({**LINE, "url": "/v1/embeddings"}, "known are /v1/chat/completions"),
        ({**LINE, "body": None}, "body must be a JSON object"),
        ({**LINE, "body": {"stream": True}}, "stream must not be set"),
        ({**LINE, "model": "m"}, "the field 'model' is unknown"),
    ],
)
def test_a_line_that_is_no_request_is_told_by_its_number(tmp_path: Path, line: Any, why: str) -> None:
    good, empty_was_line_2, bad, last = LINE, b"", line, {**LINE, "custom_id": "b"}
    found = lines(tmp_path, good, empty_was_line_2, bad, last)
    assert [each.number for each in found] == [1, 3, 4]
    assert isinstance(found[1], Bad) and why in found[1].why
    assert isinstance(found[0], Asked) and isinstance(found[2], Asked) and found[2].custom_id == "b"


def test_an_id_is_used_once(tmp_path: Path) -> None:
    found = lines(tmp_path, LINE, LINE)
    assert isinstance(found[1], Bad) and found[1].why == "custom_id 'a' is that of line 1"


@given(st.binary(max_size=60))
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    for found in lines(tmp_path_factory.mktemp("any"), data):
        assert isinstance(found, Bad)


def test_an_unreadable_file_is_a_mistake_of_the_users(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        list(read(tmp_path / "missing"))
    with pytest.raises(UsageError, match="cannot be written"), Output(tmp_path / "missing" / "out"):
        pass


def asked(name: str) -> Asked:
    return Asked(1, name, "/v1/completions", {})


def test_an_output_is_gone_on_with(tmp_path: Path, no_fd_leak: None) -> None:
    path = tmp_path / "out.jsonl"
    with Output(path) as output:
        output.answer(asked("a"), 200, {"id": "cmpl-1", "text": "\ud800 ä"})
        output.complain(Bad(7, None, "it is nonsense"))
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"id": "line-2", "custom_id": "tor')  # its writer was killed
    with Output(path) as output:
        assert output.done == {"a"} and output.bad == {7}
        output.answer(asked("torn"), 400, {"error": {}})
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert path.read_bytes().startswith(whole) and [each["custom_id"] for each in found] == ["a", None, "torn"]
    assert found[0]["response"] == {
        "status_code": 200,
        "request_id": "cmpl-1",
        "body": {"id": "cmpl-1", "text": "\ud800 ä"},
    }
    assert found[1]["error"] == {"code": "invalid_line", "message": "line 7: it is nonsense", "line": 7}
    assert path.stat().st_mode & 0o777 == 0o600


def test_two_do_not_write_one_output(tmp_path: Path, no_fd_leak: None) -> None:
    path = tmp_path / "out.jsonl"
    with Output(path), pytest.raises(UsageError, match="by another process"), Output(path):
        pass


@pytest.mark.parametrize("content", [b"hello\n", b'{"custom_id": "a"}\n', b"[]\n"])
def test_what_is_no_output_is_left_as_it_is(tmp_path: Path, content: bytes, no_fd_leak: None) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="something else than results"), Output(path):
        pass
    assert path.read_bytes() == content


def test_a_device_is_no_output() -> None:
    with pytest.raises(UsageError, match="is no file"), Output(Path("/dev/full")):
        pass


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path, no_fd_leak: None) -> None:
    path = tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(UsageError, match="cannot be written"), Output(path) as output:
        output.answer(asked("a"), 200, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        try:
            output.answer(asked("b"), 200, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with Output(path) as output:
        assert output.done == {"a"}, "what was torn is asked for again"
