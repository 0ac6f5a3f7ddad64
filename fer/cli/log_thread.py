"""FER's log on stderr, written by a thread: for a command that must not wait for whoever reads it.

``fer serve`` logs in its event loop. A pipe that nobody reads takes some KiB, and the next line would stop the service
for as long as it is not read. :class:`logging.handlers.QueueListener` is not used, since it ends by a wait without
limit for exactly that pipe, and since nothing would tell that its queue had been full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import sys
import threading
from collections.abc import Iterator

from fer.cli.log import Stderr

RECORDS = 10_000
"""Log records that may wait to be written; what is logged beyond that is dropped, and counted."""
END_S = 1.0
"""Seconds the process waits at its end for what is not written yet."""


class LogThread:
    """Writes lines to a descriptor, in order, in a daemon thread.

    Never by ``sys.stderr``: its lock would be held while a write waits, and the interpreter takes it when it ends.

    Args:
        fd: stays the caller's.
        most: records that may wait.
    """

    def __init__(self, fd: int, encoding: str = "utf-8", *, most: int = RECORDS) -> None:
        self._fd, self._encoding, self._most = fd, encoding, most
        # With each piece goes how many were dropped just before it. Bounded by put(), so that a mark always gets in.
        self._queue: queue.SimpleQueue[tuple[int, bytes | threading.Event]] = queue.SimpleQueue()
        self._lock, self._dropped, self._given_up = threading.RLock(), 0, False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, text: str) -> None:
        """Have a record written. Never waits, and never raises: what there is no room for is dropped."""
        piece = f"{text}\n".encode(self._encoding, "backslashreplace")
        with self._lock:  # nobody holds it for longer than these lines
            if self._queue.qsize() >= self._most:
                self._dropped += 1
            else:
                self._queue.put((self._dropped, piece))
                self._dropped = 0

    def flush(self, limit_s: float = END_S) -> bool:
        """Wait until all that was put is written or has failed; whether it has come to that in time.

        For the end: once it has not, the wait is not repeated.
        """
        if self._given_up:
            return False
        mark = threading.Event()
        with self._lock:
            self._queue.put((self._dropped, mark))
            self._dropped = 0
        self._given_up = not mark.wait(limit_s)
        return not self._given_up

    def _run(self) -> None:
        failed = 0
        while True:
            dropped, piece = self._queue.get()
            lost = failed + dropped
            data = _notice(lost) if lost else b""
            if isinstance(piece, bytes):
                data, lost = data + piece, lost + 1
            failed = 0 if self._write(data) else lost
            if isinstance(piece, threading.Event):
                piece.set()

    def _write(self, data: bytes) -> bool:
        """Whether it could be written. A full disk, or a reader that has gone, is no reason to end."""
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever shares the pipe with us made it so
                room = select.poll()
                room.register(self._fd, select.POLLOUT)
                room.poll()
            except OSError:
                return False
        return True


class ThreadHandler(logging.Handler):
    """Hands records to a :class:`LogThread` as text, with the exception's where there is one."""

    def __init__(self, thread: LogThread, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._thread = thread

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception as error:  # logging's own way to tell would write to stderr here
            text = f"fer: what {record.pathname}:{record.lineno} logs cannot be shown: {error!r}"
        self._thread.put(text)

    def flush(self) -> None:
        """For logging, which calls it when the interpreter ends."""
        self._thread.flush()


@contextlib.contextmanager
def log_in_thread() -> Iterator[None]:
    """From now on a thread writes the log that :func:`fer.cli.log.log_to_stderr` shows, and at the end all is written.

    So are warnings of libraries, such as of a request that is no HTTP, which logging would write to stderr itself.
    Nothing changes where stderr is no file. Where its reader takes nothing for :data:`END_S` at the end of the block,
    all that follows on stderr is dropped, since the process could not end otherwise.
    """
    try:
        fd, encoding = sys.stderr.fileno(), sys.stderr.encoding
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something in memory
        yield
        return
    thread = LogThread(fd, encoding)
    logger = logging.getLogger("fer")
    for shown in [handler for handler in logger.handlers if isinstance(handler, Stderr)]:
        handler = ThreadHandler(thread, shown.level)
        handler.setFormatter(shown.formatter)
        logger.removeHandler(shown)
        logger.addHandler(handler)
    logging.lastResort = ThreadHandler(thread, logging.WARNING)
    try:
        yield
    finally:
        if not thread.flush():
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)


def _notice(count: int) -> bytes:
    return f"fer: {count} records of this log were dropped here: its reader is too slow, or its disk full\n".encode()
