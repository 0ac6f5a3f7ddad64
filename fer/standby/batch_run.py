"""Sends the requests of a file to a service, as many at once as it is told to, and writes each result as it comes."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fer.errors import OptionError
from fer.standby.batch_file import Asked, Bad, Output, read

PASSING = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses that say nothing of the request: the service cannot answer just now."""
FINAL = frozenset({"engine_died"})
"""Codes of errors that such a status may have and that would come again: this request is what engines die of."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
ANSWER_S = 24 * 3600.0
"""Seconds for one answer: a preempted one may wait for long, and a service that is gone is told by its socket."""
COMPLAINTS = 20
"""Complaints that are shown; the output has them all."""


@dataclass
class Progress:
    """What became of the lines of a file.

    Attributes:
        before: had a result already. answered: were answered now; ``refused``: with an error that will not go away.
        bad: are no requests. left: have no result, since the service could not answer: run it again.
        preemptible: answers that say they are of the tier flex.
    """

    before: int = 0
    answered: int = 0
    refused: int = 0
    bad: int = 0
    left: int = 0
    preemptible: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every line has an answer."""
        return not (self.refused or self.bad or self.left)

    def complain(self, text: str) -> None:
        if len(self.complaints) < COMPLAINTS:
            self.complaints.append(text)

    def to_json(self) -> dict[str, int]:
        names = ("before", "answered", "refused", "bad", "left", "preemptible")
        return {name: getattr(self, name) for name in names}


class Runner:
    """A client of one service.

    Args:
        url: its address.
        concurrency: requests at once.
        tier: the ``service_tier`` of requests that name none.
        patience_s: seconds for which one request is tried while the service cannot answer.
    """

    def __init__(self, url: str, *, concurrency: int = 8, tier: str = "flex", patience_s: float = 3600.0) -> None:
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname:
            raise OptionError(f"--url {url!r} is no address", fix="Give one such as http://127.0.0.1:8000")
        if concurrency < 1:
            raise OptionError("no requests at once cannot be", fix="Raise --concurrency")
        self._secure, self._place = found.scheme == "https", (found.hostname, found.port)
        self._base = found.path.rstrip("/").removesuffix("/v1")
        self._concurrency, self._tier, self._patience_s = concurrency, tier, patience_s
        self._stop = threading.Event()
        self._lock = threading.Lock()  # of the output and the progress
        self._trouble: Exception | None = None

    def run(self, requests: Path, output: Path) -> Progress:
        """Send every request of a file that has no result yet.

        Raises:
            UsageError: a file cannot be read or written, or is another process's. Results that are there stay.
        """
        progress = Progress()
        waiting: queue.Queue[Asked | None] = queue.Queue(2 * self._concurrency)  # a large file is not read at once
        with Output(output) as results:
            threads = [
                threading.Thread(target=self._work, args=(waiting, results, progress), name="batch", daemon=True)
                for _ in range(self._concurrency)
            ]
            for thread in threads:
                thread.start()
            try:
                self._hand_out(requests, waiting, results, progress)
            except BaseException:
                self._stop.set()
                raise
            finally:
                for _ in threads:
                    self._put(waiting, None)
                for thread in threads:
                    # On an interrupt answers that are under way are given up: the next run asks for them again.
                    while thread.is_alive() and not self._stop.is_set():
                        thread.join(0.2)
                with self._lock:
                    pass  # a line that is being written is written to its end
        if self._trouble is not None:
            raise self._trouble
        return progress

    def _hand_out(
        self, requests: Path, waiting: queue.Queue[Asked | None], results: Output, progress: Progress
    ) -> None:
        for found in read(requests):
            if self._stop.is_set():
                return
            if isinstance(found, Bad):
                with self._lock:
                    progress.bad += 1
                    progress.complain(f"line {found.number}: {found.why}")
                    if found.number not in results.bad:
                        results.complain(found)
            elif found.custom_id in results.done:
                progress.before += 1
            else:
                self._put(waiting, found)

    def _put(self, waiting: queue.Queue[Asked | None], item: Asked | None) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                waiting.put(item, timeout=0.2)
                return

    # -- one thread

    def _work(self, waiting: queue.Queue[Asked | None], results: Output, progress: Progress) -> None:
        client = _Client(self._place, secure=self._secure)
        try:
            while not self._stop.is_set() and (asked := waiting.get()) is not None:
                self._one(client, asked, results, progress)
        except Exception as error:  # the output cannot be written: nothing more is to be asked for
            self._trouble = self._trouble or error
            self._stop.set()
        finally:
            client.close()

    def _one(self, client: _Client, asked: Asked, results: Output, progress: Progress) -> None:
        deadline, pause = time.monotonic() + self._patience_s, FIRST_PAUSE_S
        body = {"service_tier": self._tier, **asked.body}
        while True:
            try:
                status, found, after = client.post(self._base + asked.url, body)
                why = f"status {status}: {_message(found)}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                status, found, after, why = 0, None, 0.0, str(error) or type(error).__name__
                client.close()
            if status and (status not in PASSING or _field(found, "code") in FINAL):
                with self._lock:
                    if self._stop.is_set():
                        return
                    results.answer(asked, status, found)
                    self._count(asked, status, found, progress)
                return
            pause = min(LONGEST_PAUSE_S, pause * 2.0)
            wait_s = max(pause, after)
            if time.monotonic() + wait_s > deadline or self._stop.wait(wait_s):
                with self._lock:
                    progress.left += 1
                    progress.complain(f"line {asked.number}: no answer to {asked.custom_id!r} yet: {why}")
                return

    @staticmethod
    def _count(asked: Asked, status: int, found: Any, progress: Progress) -> None:
        if status == 200:
            progress.answered += 1
            progress.preemptible += isinstance(found, dict) and found.get("service_tier") == "flex"
        else:
            progress.refused += 1
            progress.complain(f"line {asked.number}: {asked.custom_id!r} was refused with {status}: {_message(found)}")


class _Client:
    """One connection, made anew where it broke."""

    def __init__(self, place: tuple[str, int | None], *, secure: bool) -> None:
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._connection = kind(*place, timeout=ANSWER_S)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any, float]:
        """Status, decoded body, and the seconds after which the service wants to be asked again, 0 if it does not say.

        Raises:
            OSError, HTTPException, ValueError: there was no answer, or none in JSON.
        """
        self._connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        data = response.read()
        after = response.headers.get("Retry-After", "")
        try:
            found: Any = json.loads(data)
        except ValueError:
            if response.status == 200:
                raise
            found = data.decode("utf-8", "replace")[:1000]
        return response.status, found, float(after) if after.isdigit() else 0.0

    def close(self) -> None:
        self._connection.close()


def _message(found: Any) -> str:
    return _field(found, "message") or str(found)[:200]


def _field(found: Any, name: str) -> str:
    """A field of an error in OpenAI's form, ``""`` where there is none."""
    error = found.get("error") if isinstance(found, dict) else None
    return str(error.get(name) or "") if isinstance(error, dict) else ""
