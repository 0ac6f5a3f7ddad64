"""``fer demo --failover``: what a client sees when its engine is killed, with a standby, a launcher, and neither."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from fer.cli.failover_picture import page, strip
from fer.cli.output import emit, err, escape, out, save
from fer.cli.processes import DEATH_LIMIT_S, sweep, terminated_like_interrupted
from fer.errors import FerError, IntegrityError, WaitTimeout

TOKENS, BEFORE = 48, 16
"""Tokens of the answer, and of these how many come before the kill."""
LIMIT_S = 600.0
PROMPT = "Once upon a time, in a small village by the sea,"


@dataclass(frozen=True)
class Way:
    """How an engine comes back."""

    name: str
    title: str
    arguments: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    launcher: bool = True


WAYS = (
    Way("standby", "a parked standby is promoted", ("--standbys", "1")),
    Way("launcher", "a launcher forks an engine, which attaches the weights", ()),
    Way("plain", "a new process loads the model", ("--launcher", "off"), {"FER_MODE": "off"}, launcher=False),
)


@dataclass(kw_only=True)
class Seen:
    """One answer at its client.

    Attributes:
        tokens: when each piece came, seconds after the kill.
        gap_s: the longest wait between two pieces, which the death made.
        outage: the service's own account.
    """

    way: Way
    tokens: list[float]
    text: str
    gap_s: float
    outage: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "way": self.way.name,
            "gap_s": round(self.gap_s, 4),
            "tokens": [round(at, 4) for at in self.tokens],
            "text": self.text,
            "outage": self.outage,
        }


class Client:
    """Of one ``fer serve``."""

    def __init__(self, address: str, name: str) -> None:
        found = urlsplit(address)
        self._place, self._name = (found.hostname or "", found.port or 0), name

    def status(self) -> dict[str, Any]:
        """The service's."""
        connection = http.client.HTTPConnection(*self._place, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("GET", "/status")
            return dict(json.loads(connection.getresponse().read()))

    def until_quiet(self, engines: int, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Wait until so many engines have recovered. Raises FerError where the service ends, or WaitTimeout."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise FerError("fer serve ended", why=f"exit code {process.returncode}", fix="Its message is above")
            status = self.status()
            if sum(member["role"] in ("active", "standby") for member in status["members"]) == engines:
                return status
            time.sleep(0.1)
        raise WaitTimeout(f"the engines did not start in {LIMIT_S:.0f} s", fix="Try a smaller model")

    def stream(self) -> Iterator[tuple[float, str]]:
        """Pieces of one answer and when they came. Raises FerError where the service says that it failed."""
        connection = http.client.HTTPConnection(*self._place, timeout=LIMIT_S)
        asked = {"model": self._name, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(asked).encode())
            for line in connection.getresponse():
                data = line.decode().strip().removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                found = json.loads(data)
                if "error" in found:
                    raise FerError("the answer failed", why=found["error"]["message"], fix="See fer doctor")
                yield time.monotonic(), found["choices"][0]["text"]


def run(model: Path, *, home: Path, device: str, html: Path | None, as_json: bool) -> None:
    """Kill and draw.

    Raises:
        IntegrityError: an answer that was cut off came out otherwise than the undisturbed one.
        FerError: a service did not start, or the model's answer is too short to be cut off.
    """
    console = err() if as_json else out()
    console.print(f"Model: {escape(str(model))}\nAsked: {PROMPT}\n")
    runtime_dir = Path(tempfile.mkdtemp(prefix="fer-demo-"))
    variables = os.environ | {"FER_RUNTIME_DIR": str(runtime_dir), "FER_HOME": str(home)}
    with terminated_like_interrupted():
        try:
            with _launcher(model, runtime_dir, variables, console) as up:
                seen = [_play(way, model, device, variables, console) for way in WAYS if up or not way.launcher]
        finally:
            _end(runtime_dir)
    file = html or home / "demo" / "failover.html"
    save(file, page(seen))
    data = {"same_text": True, "ways": [each.to_json() for each in seen], "html": str(file)}

    def text(console: Console) -> None:
        console.print(strip(seen))
        console.print(f"All {len(seen)} answers were the undisturbed one. Picture: {escape(str(file))}")

    emit(as_json, data, text)


def _play(way: Way, model: Path, device: str, variables: dict[str, str], console: Console) -> Seen:
    engines = 1 + ("--standbys" in way.arguments)
    command = [sys.executable, "-m", "fer", "serve", "--model", str(model), "--device", device, "--port", "0"]
    process = subprocess.Popen(
        [*command, *way.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**variables, **way.variables},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        with console.status(f"starting: {way.title}"):
            address = process.stdout.readline().decode().strip()
            if not address:
                why = f"exit code {process.wait(DEATH_LIMIT_S)}"
                raise FerError("fer serve did not begin", why=why, fix=f"See what {' '.join(command[1:])} says")
            client = Client(address, model.resolve().name)
            status = client.until_quiet(engines, process)
        undisturbed = "".join(piece for _, piece in client.stream())
        seen = _kill(way, client, int(status["pid"]))
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DEATH_LIMIT_S)
        process.kill()
        process.wait(DEATH_LIMIT_S)
        if process.stdout is not None:
            process.stdout.close()
    if seen.text != undisturbed:
        raise IntegrityError(
            f"the answer came out otherwise with {way.name}",
            why=f"{seen.text!r} in place of {undisturbed!r}",
            fix="Please report this with the model's name",
        )
    console.print(f"[bold]{way.title}[/]: SIGKILL to engine {status['pid']}, gap of [bold]{seen.gap_s:.3f} s[/]")
    return seen


def _kill(way: Way, client: Client, pid: int) -> Seen:
    """One answer, with a death in the middle."""
    stream = client.stream()
    pieces = list(itertools.islice(stream, BEFORE))
    if len(pieces) < BEFORE:
        why = f"it came in {len(pieces)} pieces, and the engine is killed after {BEFORE}"
        raise FerError("the model's answer is too short for this demo", why=why, fix="Give another --model")
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    pieces += stream
    times = [at - killed for at, _ in pieces]
    gap = max(after - before for before, after in itertools.pairwise(times))
    outage = client.status()["last_outage"] or {}
    return Seen(way=way, tokens=times, text="".join(piece for _, piece in pieces), gap_s=gap, outage=outage)


@contextlib.contextmanager
def _launcher(model: Path, runtime_dir: Path, variables: dict[str, str], console: Console) -> Iterator[bool]:
    """A launcher for the engines; whether it serves. Where none can, that is said, and its ways are left out."""
    command = [sys.executable, "-m", "fer", "launcher"]
    process = subprocess.Popen(
        [*command, "run", "--preload", str(model)], stderr=subprocess.DEVNULL, env=variables, start_new_session=True
    )
    try:
        with console.status("starting a launcher"):
            deadline = time.monotonic() + LIMIT_S
            asked = [*command, "status"]
            while up := subprocess.run(asked, capture_output=True, check=False, env=variables).returncode:
                if process.poll() is not None or time.monotonic() > deadline:
                    console.print("No launcher can serve here; see `fer launcher run`. Its ways are left out.")
                    break
                time.sleep(0.2)
        yield not up
    finally:
        process.terminate()
        process.wait(DEATH_LIMIT_S)


def _end(runtime_dir: Path) -> None:
    from fer.weights.client import KeeperClient

    with contextlib.suppress(FerError), KeeperClient.connect(runtime_dir, label="fer demo") as client:
        client.stop(force=True)
    sweep(runtime_dir)
    shutil.rmtree(runtime_dir, ignore_errors=True)
