"""Requests and results in the form of OpenAI's batch files: https://platform.openai.com/docs/guides/batch.

A request is a line ``{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}``; its result a
line ``{"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": null}``. A line that is
no request gets a result too, with ``response`` null and ``error`` ``{"code": "invalid_line", "message", "line"}``.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fer.errors import UsageError
from fer.memory.fd import Fd

URLS = ("/v1/chat/completions", "/v1/completions")
LINE_BYTES = 16 << 20
"""Bytes of one line of a file, requests and results alike."""


@dataclass(frozen=True)
class Asked:
    """A request of a file, in its line ``number``, counted from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """A line that is no request, and why. ``custom_id`` None where it has none."""

    number: int
    custom_id: str | None
    why: str


def read(path: Path) -> Iterator[Asked | Bad]:
    """The requests of a file, one after another; empty lines are none.

    Raises:
        UsageError: it cannot be read.
    """
    lines: dict[str, int] = {}
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                if not line.strip():
                    continue
                found = _understand(number, line)
                if isinstance(found, Asked):
                    earlier = lines.setdefault(found.custom_id, number)
                    if earlier != number:
                        why = f"custom_id {found.custom_id!r} is that of line {earlier}"
                        found = Bad(number, found.custom_id, why)
                yield found
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=error.strerror or str(error)) from error


def _lines(file: Any) -> Iterator[bytes]:
    """Lines of a bounded length: of a longer one its beginning, which is then no JSON."""
    while line := file.readline(LINE_BYTES):
        yield line
        while len(line) == LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(LINE_BYTES)  # what is left of it


def _understand(number: int, line: bytes) -> Asked | Bad:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Bad(number, None, f"it is not valid JSON: {error}")
    if not isinstance(found, dict):
        return Bad(number, None, "it is no JSON object")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return Bad(number, None, "custom_id must be a text that is not empty")
    if unknown := sorted(found.keys() - {"custom_id", "method", "url", "body"}):
        return Bad(number, custom_id, f"the field {unknown[0]!r} is unknown")
    if found.get("method", "POST") != "POST":
        return Bad(number, custom_id, f"method is {found['method']!r}, and only POST is known")
    if found.get("url") not in URLS:
        return Bad(number, custom_id, f"url is {found.get('url')!r}; known are {', '.join(URLS)}")
    if not isinstance(found.get("body"), dict):
        return Bad(number, custom_id, "body must be a JSON object")
    if found["body"].get("stream"):
        return Bad(number, custom_id, "body.stream must not be set: a result is one line")
    return Asked(number, custom_id, found["url"], found["body"])


@dataclass
class Output:
    """A file of results: one process writes it, a whole line at a time, and a later one goes on.

    Attributes:
        done: the custom ids that have a result; ``bad`` the numbers of lines that have one since they are no request.
    """

    path: Path
    done: set[str] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    _fd: Fd | None = None

    def __enter__(self) -> Output:
        """Open it, and read what is there. A torn last line is removed: its request is sent again.

        Raises:
            UsageError: another process writes it, it cannot be written, or it holds something else.
        """
        try:
            self._fd = Fd(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written", why=error.strerror or str(error)) from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd.fileno()).st_mode):
                raise UsageError(
                    f"{self.path} is no file", fix="Give another --output: it is read when it is gone on with"
                )
            fcntl.flock(self._fd.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._recall(self._fd.fileno())
        except BlockingIOError as error:
            self._fd.close()
            raise UsageError(
                f"{self.path} is being written by another process", fix="Let it end, or give another --output"
            ) from error
        except BaseException:
            self._fd.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.fsync(self._fd.fileno())
            self._fd.close()

    def _recall(self, fd: int) -> None:
        whole = 0
        with open(fd, "rb", closefd=False) as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break  # its writer was killed in the middle
                self._note(number, line)
                whole += len(line)
        os.ftruncate(fd, whole)

    def _note(self, number: int, line: bytes) -> None:
        try:
            found = json.loads(line)
            error, custom_id = found["error"], found["custom_id"]
            if error is not None and error["code"] == "invalid_line":
                self.bad.add(int(error["line"]))
            else:
                self.done.add(str(custom_id))
        except (ValueError, TypeError, KeyError, RecursionError) as problem:
            raise UsageError(
                f"{self.path} holds something else than results",
                why=f"line {number}: {problem}",
                fix="Give another --output",
            ) from problem

    def answer(self, asked: Asked, status: int, body: Any) -> None:
        """Write the service's answer to a request, which may be a refusal. Raises UsageError: it cannot be written."""
        self.done.add(asked.custom_id)
        request = str(body.get("id", "")) if isinstance(body, dict) else ""
        response = {"status_code": status, "request_id": request, "body": body}
        self._write({"id": f"line-{asked.number}", "custom_id": asked.custom_id, "response": response, "error": None})

    def complain(self, bad: Bad) -> None:
        """Write that a line is no request. Raises UsageError: it cannot be written."""
        self.bad.add(bad.number)
        error = {"code": "invalid_line", "message": f"line {bad.number}: {bad.why}", "line": bad.number}
        self._write({"id": f"line-{bad.number}", "custom_id": bad.custom_id, "response": None, "error": error})

    def _write(self, result: dict[str, Any]) -> None:
        assert self._fd is not None, "results are written while the file is open"
        # ASCII, so that whatever text a model makes is valid in any encoding.
        data = json.dumps(result, separators=(",", ":")).encode("ascii") + b"\n"
        try:
            while data:  # a write may be cut short by a full disk; the next one then fails, and a torn line is removed
                data = data[os.write(self._fd.fileno(), data) :]
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written", why=error.strerror or str(error)) from error
