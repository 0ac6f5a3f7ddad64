"""Clients that connect and say nothing, under a low limit of open files; and a service whose stdout cannot be had."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.descriptors import open_descriptors
from tests.support.keeper import read_line, wait_until
from tests.support.launcher import Launcher
from tests.support.processes import Children, halt
from tests.support.serve_engine import expected
from tests.support.serving import LIMIT_S, Service

SOFT, HARD = 200, 256
CLIENTS = 300
LOG_BYTES = 20_000
"""Far more than a service says that is killed once, and far less than one traceback a connection."""

PARENT = """
import sys
from fer.cli.output import watch_stdout
from tests.support.serve_parent import main
watch_stdout()
main()
"""


class Wrapped(Service):
    """A service that a shell starts, which does something first, such as ``ulimit -n 256``; ``into``: its stdout."""

    def __init__(self, children: Children, folder: Path, first: str, into: str = "", **asked: Any) -> None:
        model = folder / "tiny"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.log = folder / "serve.log"
        given = json.dumps({"model": str(model), **asked})
        command = ["/bin/sh", "-c", f'{first}\nexec "$@" {into}', "sh", sys.executable, "-c", PARENT, given]
        environment = {**os.environ, "TEST_FAULT": str(folder / "fault")}
        with self.log.open("wb") as log:
            self.process = children.spawn(command, stderr=log, env=environment)
        self.address = read_line(self.process.stdout, LIMIT_S)

    @property
    def files(self) -> int:
        """How many it has open."""
        return len(open_descriptors(self.process.pid))

    def connections(self) -> dict[str, int]:
        """As the operator sees them, whom clients do not keep out."""
        return dict(self.admin("GET", "/status").json["connections"])

    def active_pid(self) -> int | None:
        found = self.admin("GET", "/status").json
        return int(found["pid"]) if found["state"] == "active" else None


Start = Callable[..., Wrapped]


@pytest.fixture
def start(children: Children, tmp_path: Path) -> Start:
    """A service with few descriptors, whose engine is active."""

    def made(**asked: Any) -> Wrapped:
        service = Wrapped(children, tmp_path, f"ulimit -S -n {SOFT}\nulimit -H -n {HARD}", **asked)
        service.until("active")
        return service

    return made


@contextlib.contextmanager
def silent(service: Service, count: int) -> Iterator[list[socket.socket]]:
    """So many clients that connect and send nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(service.place, timeout=LIMIT_S)) for _ in range(count)]


def heard(sock: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    found = b""
    while piece := sock.recv(1 << 16):
        found += piece
    return found


def test_silent_clients_cost_neither_a_stream_nor_a_restart_nor_the_log(start: Start) -> None:
    service = start(idle_s=8.0)
    wait_until(lambda: service.connections()["open"] == 0, "the clients of the start have gone")
    base, most = service.files, service.connections()["most"]
    assert 32 <= most < HARD // 2
    stream = service.stream("once", 300).read(5)
    killed = service.active_pid()
    assert killed is not None
    halt(killed)  # so that the stream is under way all the time
    with silent(service, CLIENTS) as clients:
        wait_until(lambda: service.connections()["refused"] == CLIENTS - most + 1, "those beyond the bound are refused")
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: service.active_pid() not in (None, killed), "another engine", LIMIT_S)
        assert stream.rest().text == expected("once", 300) and stream.error is None
        answers = [heard(sock) for sock in clients]  # the rest are closed when they have said nothing for long enough
        refused = [answer for answer in answers if answer]
        assert len(refused) == CLIENTS - most + 1
        assert all(answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: " in answer for answer in refused)
        assert service.complete("hello", 12).text == expected("hello", 12)
    stream.close()
    wait_until(lambda: service.files <= base, "descriptors are as they were")
    log = service.log.read_text()
    assert log.count("as many as may be") == 1 and "out of system resource" not in log and "Traceback" not in log
    assert len(log) < LOG_BYTES
    assert service.end() == 0


def test_a_client_that_reads_its_refusal_sees_it_in_the_usual_form(start: Start) -> None:
    service = start(idle_s=60.0)
    with silent(service, service.connections()["most"]):
        wait_until(lambda: service.connections()["open"] == service.connections()["most"], "all are taken")
        connection = http.client.HTTPConnection(*service.place, timeout=LIMIT_S)
        connection.connect()
        response = connection.response_class(connection.sock)
        response.begin()
        assert response.status == 503 and int(response.headers["Retry-After"]) > 0
        assert "too many connections" in json.loads(response.read())["error"]["message"]
        connection.close()
    wait_until(lambda: service.connections()["open"] == 0, "those that leave make room")
    assert service.complete("hello", 12).status == 200
    assert service.end() == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/comp",
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: x\r\n",
    ],
    ids=["nothing", "a part of a line", "a request and nothing after it", "a head without an end"],
)
def test_a_connection_without_a_request_is_closed(children: Children, tmp_path: Path, sent: bytes) -> None:
    service = Wrapped(children, tmp_path, "", idle_s=0.5)
    with socket.create_connection(service.place, timeout=LIMIT_S) as sock:
        sock.sendall(sent)
        answer = heard(sock)
        assert answer.startswith(b"HTTP/1.1 200 ") if sent.endswith(b"\r\n\r\n") else not answer
    assert service.end() == 0


def test_bytes_of_a_head_do_not_keep_a_connection_open(children: Children, tmp_path: Path) -> None:
    service = Wrapped(children, tmp_path, "", idle_s=0.5)
    with socket.create_connection(service.place, timeout=LIMIT_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n")
        sock.settimeout(0.05)
        closed = False

        def drips() -> bool:
            nonlocal closed
            try:
                sock.sendall(b"X")
                closed = sock.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                closed = True
            return closed

        wait_until(drips, "it is closed all the same")
    assert service.end() == 0


def test_an_answer_that_takes_longer_than_a_connection_may_idle_is_whole(children: Children, tmp_path: Path) -> None:
    service = Wrapped(children, tmp_path, "", idle_s=0.2)
    service.until("active")
    connection = http.client.HTTPConnection(*service.place, timeout=LIMIT_S)
    for stream in (False, True):  # at one connection: the time begins anew with each answer
        asked = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(asked).encode())
        body = connection.getresponse().read()
        assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"][0]["text"]
    assert connection.sock is not None and connection.sock.recv(1) == b"", "closed afterwards"
    connection.close()
    assert service.end() == 0


@pytest.mark.parametrize("via", ["exec", "launcher"])
def test_the_service_has_all_files_it_may_and_engines_what_it_was_started_with(
    children: Children, start: Start, via: str
) -> None:
    if via == "launcher":
        Launcher(children)
    service = start()
    assert f"via={via}" in service.log.read_text()
    assert resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE) == (HARD, HARD)
    pid = service.active_pid()
    assert pid is not None and resource.prlimit(pid, resource.RLIMIT_NOFILE) == (SOFT, HARD)
    assert service.end() == 0


@pytest.mark.parametrize(("into", "said"), [(">&-", ""), (">/dev/full", "No space left"), (">&- <&-", "")])
def test_a_service_without_a_stdout_serves(children: Children, tmp_path: Path, into: str, said: str) -> None:
    service = Wrapped(children, tmp_path, "", into)
    assert service.address == ""
    wait_until(lambda: " at http" in service.log.read_text(), "it serves", LIMIT_S)
    found = re.search(r" at (http://[^,]+), admin", service.log.read_text())
    assert found is not None
    service.address = found[1]
    service.until("active")
    assert service.complete("hello", 12).text == expected("hello", 12)
    assert service.end() == 0
    log = service.log.read_text()
    assert "Traceback" not in log and ("cannot be written to stdout" in log) == bool(said) and said in log
