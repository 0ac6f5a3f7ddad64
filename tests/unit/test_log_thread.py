"""The log of ``fer serve``: in order, complete where it can be, and never waited for."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fer.cli.log_thread import LogThread, ThreadHandler
from tests.support.processes import ROOT, WAIT_S


class Pipe:
    """A pipe that takes nothing more until it is read."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.write_end, b"." * 4096)
        os.set_blocking(self.write_end, True)
        self.found = b""

    def read(self, line: bytes) -> list[str]:
        """All lines so far, as soon as this is among them; without what the pipe was full of."""
        while line not in self.found:
            ready, _, _ = select.select([self.read_end], [], [], WAIT_S)
            assert ready, f"not read in time: {self.found[-200:]!r}"
            self.found += os.read(self.read_end, 1 << 16)
        return self.found.lstrip(b".").decode().splitlines()


@pytest.fixture
def full() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    # First, so that a thread that still waits in a write does so no more when its descriptor is closed.
    os.close(pipe.read_end)
    os.close(pipe.write_end)


def test_lines_come_in_order(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        thread = LogThread(file.fileno())
        for number in range(5000):
            thread.put(f"line {number}")
        assert thread.flush(WAIT_S)
        thread.put("and goes on")
        assert thread.flush(WAIT_S)
    assert (tmp_path / "log").read_text().splitlines() == [*(f"line {n}" for n in range(5000)), "and goes on"]


def test_nobody_waits_for_a_reader_and_the_next_record_tells_how_many_were_dropped(full: Pipe) -> None:
    thread = LogThread(full.write_end, most=5)
    for number in range(100):  # would never end if it waited
        thread.put(f"line {number}")
    full.read(b"line 4\n")
    thread.put("next")
    lines = full.read(b"next\n")
    shown = [line for line in lines if line.startswith("line ")]
    assert len(shown) in (5, 6)  # one may have been in the thread's hand
    assert shown == [f"line {number}" for number in range(len(shown))]
    dropped = f"fer: {100 - len(shown)} records of this log were dropped here"
    assert [line.partition(": its")[0] for line in lines] == [*shown, dropped, "next"]


def test_where_no_record_follows_the_end_tells_how_many_were_dropped(full: Pipe) -> None:
    thread = LogThread(full.write_end, most=5)
    for number in range(100):
        thread.put(f"line {number}")
    assert not thread.flush(0.01)
    lines = full.read(b"full\n")  # the notice's last word
    assert lines[-1].startswith(f"fer: {100 - len(lines[:-1])} records")


def test_the_wait_at_the_end_is_bounded_and_not_repeated(full: Pipe) -> None:
    thread = LogThread(full.write_end)
    thread.put("stuck")
    assert not thread.flush(0.01)
    assert not thread.flush(threading.TIMEOUT_MAX)  # would stand here
    assert full.read(b"stuck\n") == ["stuck"]


def test_a_pipe_that_does_not_block_loses_nothing(full: Pipe) -> None:
    os.set_blocking(full.write_end, False)
    thread = LogThread(full.write_end)
    for number in range(1000):
        thread.put(f"line {number}")
    assert full.read(b"line 999\n") == [f"line {number}" for number in range(1000)]


def test_a_disk_that_has_room_again_is_told_what_is_missing(tmp_path: Path) -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        thread = LogThread(fd)
        thread.put("lost")
        thread.put("lost as well")
        assert thread.flush(WAIT_S)
        with (tmp_path / "log").open("wb") as file:
            os.dup2(file.fileno(), fd)
        thread.put("kept")
        assert thread.flush(WAIT_S)
    finally:
        os.close(fd)
    notice, kept = (tmp_path / "log").read_text().splitlines()
    assert notice.startswith("fer: 2 records") and kept == "kept"


def test_a_reader_that_has_gone_ends_nothing() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        thread = LogThread(write_end)
        for _ in range(3):
            thread.put("to nobody")
            assert thread.flush(WAIT_S)
    finally:
        os.close(write_end)


def test_records_are_text_before_they_wait(tmp_path: Path, full: Pipe) -> None:
    handler = ThreadHandler(LogThread(full.write_end))
    handler.setFormatter(logging.Formatter("fer: %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    given = ["as it was"]
    logger.info("%s", given)
    given[0] = "as it is now"
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError:
        logger.exception("failed \udc80")
    logger.info("%d", "no number")
    logger.info("last")
    lines = full.read(b"last\n")
    assert lines[:3] == ["fer: ['as it was']", "fer: failed \\udc80", "Traceback (most recent call last):"]
    assert lines[-3] == "ZeroDivisionError: oh"
    assert lines[-2].startswith(f"fer: what {__file__}:") and "cannot be shown" in lines[-2]


COMMAND = """
import logging, sys
from fer.cli.log import log_to_stderr
from fer.cli.log_thread import log_in_thread
log_to_stderr()
with log_in_thread():
    for number in range(int(sys.argv[1])):
        logging.getLogger("fer.x").info("line %d", number)
        logging.getLogger("other").warning("warned %d", number)
        logging.getLogger("other").info("not shown")
print("the error", file=sys.stderr)
logging.getLogger("fer.x").info("after it")
print("done")
"""
"""What a command does that logs by a thread."""


def run(count: int, stderr: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, str(count)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=WAIT_S, cwd=ROOT)


def test_a_normal_end_loses_no_line() -> None:
    done = run(2000, subprocess.PIPE)
    expected = [line for number in range(2000) for line in (f"fer: line {number}", f"warned {number}")]
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr.splitlines() == [*expected, "the error", "fer: after it"]


def test_a_stuck_reader_does_not_hang_the_end(full: Pipe) -> None:
    done = run(10, full.write_end)
    assert (done.returncode, done.stdout) == (0, "done\n")


@pytest.mark.parametrize("reader", ["full", "gone", "closed"])
def test_a_log_that_takes_nothing_more_stops_nothing(reader: str) -> None:
    if reader == "full":
        log = os.open("/dev/full", os.O_WRONLY)
    else:
        read_end, log = os.pipe()
        os.close(read_end)
    code = COMMAND.replace('print("the error", file=sys.stderr)', "")
    command = [sys.executable, "-c", code, "3"]
    if reader == "closed":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, timeout=WAIT_S, cwd=ROOT)
    finally:
        os.close(log)
    assert (done.returncode, done.stdout) == (0, "done\n")
