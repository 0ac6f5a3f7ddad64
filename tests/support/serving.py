"""A running ``fer serve``, as its clients and its operator see it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.keeper import read_line, wait_until
from tests.support.processes import Children, kill_and_wait

LIMIT_S = 30.0
START_S = 120.0
"""Seconds; a start that imports torch and Transformers takes most of it on a busy machine."""


class Reply:
    """An answer of the service."""

    def __init__(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.status, self.headers, self.body = response.status, response.headers, body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return str(self.json["choices"][0]["text"])


class Service:
    """``fer serve`` in a process.

    Args:
        folder: where a model's folder is pretended, and where the fault file lies.
        asked: settings; see ``tests/support/serve_parent.py``.
    """

    def __init__(self, children: Children, folder: Path, **asked: Any) -> None:
        model = folder / "tiny"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text("{}")
        self.fault = folder / "fault"
        self.log = folder / "serve.log"
        environment = {**os.environ, "TEST_FAULT": str(self.fault), **asked.pop("env", {})}
        with self.log.open("wb") as log:
            self.process: subprocess.Popen[str] = children.spawn(
                [sys.executable, "-m", "tests.support.serve_parent", json.dumps({"model": str(model), **asked})],
                stderr=log,
                env=environment,
            )
        self.address = read_line(self.process.stdout, LIMIT_S)

    @property
    def place(self) -> tuple[str, int]:
        found = urlsplit(self.address)
        assert found.hostname and found.port, f"no address: {self.log.read_text()}"
        return found.hostname, found.port

    def ask(self, path: str, body: Any = None, *, limit_s: float = LIMIT_S) -> Reply:
        """A GET, or a POST of JSON (bytes as they are)."""
        connection = http.client.HTTPConnection(*self.place, timeout=limit_s)
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request("GET" if data is None else "POST", path, data)
            response = connection.getresponse()
            return Reply(response, response.read())
        finally:
            connection.close()

    def complete(self, prompt: str, count: int, **more: Any) -> Reply:
        return self.ask("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": count, **more})

    def stream(self, prompt: str, count: int, **more: Any) -> Stream:
        return Stream(self, {"model": "tiny", "prompt": prompt, "max_tokens": count, "stream": True, **more})

    def admin(self, method: str, path: str, body: Any = None) -> Reply:
        """A request at the admin socket, with JSON where there is any."""
        status = next(iter(Path(os.environ["FER_RUNTIME_DIR"]).glob("serve-*/admin.sock")))
        connection = http.client.HTTPConnection("localhost", timeout=LIMIT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(LIMIT_S)
        connection.sock.connect(str(status))
        try:
            connection.request(method, path, None if body is None else json.dumps(body).encode())
            response = connection.getresponse()
            return Reply(response, response.read())
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        return dict(self.ask("/status").json)

    def until(self, state: str) -> dict[str, Any]:
        """Wait for a state of the service; the status that shows it."""
        return self.until_status(f"state {state}", lambda status: status["state"] == state)

    def until_status(self, what: str, holds: Any) -> dict[str, Any]:
        """Wait until ``holds`` says so of the status; the one it said so of, since the next may be another again."""
        seen: list[dict[str, Any]] = []

        def held() -> bool:
            seen[:] = [self.status()]
            return bool(holds(seen[0]))

        wait_until(held, what, LIMIT_S)
        return seen[0]

    def kill_worker(self) -> int:
        """SIGKILL the active engine; its pid."""
        pid = int(self.status()["pid"])
        kill_and_wait(pid)
        return pid

    def end(self) -> int:
        """SIGTERM, and wait; the exit status."""
        self.process.terminate()
        return self.process.wait(LIMIT_S)


class RealService(Service):
    """``fer serve`` itself, with a real model that is called "tiny".

    Args:
        more: further arguments of the command.
    """

    def __init__(self, children: Children, folder: Path, log: Path, *more: str) -> None:
        self.log = log
        command = ["-m", "fer", "serve", "--model", str(folder), "--name", "tiny", "--port", "0", *more]
        with log.open("wb") as file:
            self.process = children.spawn([sys.executable, *command], stderr=file)
        self.address = read_line(self.process.stdout, START_S)


class Stream:
    """A streamed answer, read line by line."""

    def __init__(self, service: Service, body: dict[str, Any], path: str = "/v1/completions") -> None:
        self._connection = http.client.HTTPConnection(*service.place, timeout=LIMIT_S)
        self._connection.request("POST", path, json.dumps(body).encode())
        self.response = self._connection.getresponse()
        self.text, self.reason, self.error = "", None, None
        self.lines: list[str] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The objects, until ``[DONE]``, an error or the end of the connection."""
        while line := self.response.readline():
            data = line.decode().strip().removeprefix("data: ")
            if not data:
                continue
            self.lines.append(data)
            if data == "[DONE]":
                return
            found = json.loads(data)
            if "error" in found:
                self.error = found["error"]
                return
            for choice in found["choices"]:
                self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                self.reason = choice["finish_reason"] or self.reason
            yield found

    def read(self, pieces: int) -> Stream:
        """Some pieces and no more."""
        for _, _ in zip(range(pieces), self, strict=False):
            pass
        return self

    def rest(self) -> Stream:
        """Everything to the end."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        self._connection.close()
        self.response.close()
