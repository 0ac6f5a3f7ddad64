"""``fer serve`` whose stderr nobody reads: it goes on serving, and what it logged is there in order when it is read."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.keeper import read_line
from tests.support.processes import Children
from tests.support.serve_engine import expected
from tests.support.serving import LIMIT_S, Service

PIPE_BYTES = 4096
MOST_KILLS = 40

COMMAND = """
import functools, sys
from fer.cli.entry import main
from fer.standby import service
from fer.standby.process import Command

def engine(settings):
    def commands(path):
        return [Command(arguments=(sys.executable, "-m", "tests.support.serve_engine", "--socket", str(path)))]
    return commands

service.serve = functools.partial(service.serve, engine=engine)
main()
"""
"""The program ``fer`` itself; only the engine's model is arithmetic."""


class Pipe:
    """Stderr of a service, not read until somebody asks for its lines."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        assert fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES) == PIPE_BYTES
        self._found: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    @property
    def unread(self) -> int:
        """Bytes in it."""
        return int(struct.unpack("i", fcntl.ioctl(self.read_end, termios.FIONREAD, b"\0" * 4))[0])

    def fill(self) -> None:
        """Up to the brim."""
        os.set_blocking(self.write_end, False)
        os.write(self.write_end, b"." * (PIPE_BYTES - 1) + b"\n")
        os.set_blocking(self.write_end, True)
        assert self.unread == PIPE_BYTES

    def given_away(self) -> None:
        """Only the service has the other end now."""
        os.close(self.write_end)

    def begin_to_read(self) -> None:
        """To its end, in a thread."""
        self._reader.start()

    def lines(self) -> list[str]:
        """All of them, after the last who could write has ended."""
        if self._reader.ident is None:
            self.begin_to_read()
        self._reader.join(LIMIT_S)
        assert not self._reader.is_alive(), "somebody still has the pipe"
        return b"".join(self._found).decode().splitlines()

    def _read(self) -> None:
        while piece := os.read(self.read_end, 1 << 16):
            self._found.append(piece)


class Logging(Service):
    """``fer serve`` whose stderr is a pipe."""

    def __init__(self, children: Children, folder: Path, pipe: Pipe) -> None:
        model = folder / "tiny"
        model.mkdir()
        (model / "config.json").write_text("{}")
        self.log, self.fault = folder / "no-log", folder / "fault"
        self.process = children.python(
            COMMAND,
            *("serve", "--model", str(model), "--port", "0", "--launcher", "off"),
            stderr=pipe.write_end,
            env={**os.environ, "TEST_FAULT": str(self.fault)},
        )
        pipe.given_away()

    def listens(self) -> Logging:
        self.address = read_line(self.process.stdout, LIMIT_S)
        return self

    def next_engine(self, before: int) -> int:
        """The pid of the engine that serves after this one."""

        def other(status: dict[str, Any]) -> bool:
            return status["state"] == "active" and status["pid"] not in (before, None)

        return int(self.until_status("another engine serves", other)["pid"])


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.read_end)


def nonsense(service: Service) -> bytes:
    """The answer to what is no HTTP; the library that reads it logs that as a warning."""
    with socket.create_connection(service.place, timeout=LIMIT_S) as client:
        client.sendall(b"\0nonsense\r\n\r\n")
        return client.recv(1 << 12)


def test_a_log_that_nobody_reads_stops_nothing(children: Children, tmp_path: Path, pipe: Pipe) -> None:
    service = Logging(children, tmp_path, pipe).listens()
    engines = [service.next_engine(0)]
    same = 0
    for _ in range(MOST_KILLS):
        before = pipe.unread
        service.complete("hello", 1)  # an engine that was of use is followed at once
        service.kill_worker()
        engines.append(service.next_engine(engines[-1]))
        same = same + 1 if pipe.unread == before else 0
        if same == 3:
            break  # the lines of three deaths found no room
    assert same == 3, f"{pipe.unread} bytes of {PIPE_BYTES}"

    assert nonsense(service).startswith(b"HTTP/1.1 400")
    stream = service.stream("once", 140).read(20)
    service.kill_worker()
    assert stream.rest().text == expected("once", 140)
    engines.append(service.next_engine(engines[-1]))
    assert service.status()["restarts"] == len(engines) - 1

    pipe.begin_to_read()
    assert service.end() == 0
    lines = pipe.lines()
    assert sum(map(len, lines)) > PIPE_BYTES
    own = [line for line in lines if re.search(r"started, via=|killed by|Invalid HTTP|ending:", line)]
    kinds = []
    for pid in engines:
        kinds += [rf"fer: engine-0: process {pid} started, via=.*", r"fer: .*killed by SIGKILL.*"]
    kinds[-3:-3] = ["Invalid HTTP request received."]
    kinds[-1] = "fer: ending: 0 requests are under way"
    assert len(own) == len(kinds), "\n".join(lines)
    for line, kind in zip(own, kinds, strict=True):
        assert re.fullmatch(kind, line), "\n".join(lines)


def test_a_log_that_nobody_reads_does_not_hang_the_end(children: Children, tmp_path: Path, pipe: Pipe) -> None:
    pipe.fill()
    service = Logging(children, tmp_path, pipe).listens()
    service.until("active")
    assert service.complete("hello", 20).text == expected("hello", 20)
    assert service.end() == 0


@pytest.mark.parametrize("read", [True, False])
def test_an_error_comes_after_the_log_and_ends_it(children: Children, tmp_path: Path, pipe: Pipe, read: bool) -> None:
    (tmp_path / "fault").write_text("usage")
    if not read:
        pipe.fill()
    service = Logging(children, tmp_path, pipe)
    if read:
        pipe.begin_to_read()
    assert service.process.wait(LIMIT_S) == 2
    lines = pipe.lines()
    if read:
        said = [number for number, line in enumerate(lines) if line == "error: the model folder is damaged"]
        assert said and all(number < said[0] for number, line in enumerate(lines) if "started, via=" in line)


def test_a_reader_that_goes_away_stops_nothing(children: Children, tmp_path: Path, pipe: Pipe) -> None:
    service = Logging(children, tmp_path, pipe).listens()
    first = service.next_engine(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, pipe.read_end)  # and with it goes the only reader
    os.close(null)
    service.kill_worker()
    service.next_engine(first)
    assert service.complete("hello", 20).text == expected("hello", 20)
    assert service.end() == 0
