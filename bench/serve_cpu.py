"""SIGKILL of the serving engine to the next token at the client: SmolLM2-135M on the host, behind ``fer serve``.

Rows: the plain start (``FER_MODE=off``), with the keeper, with keeper and launcher, and with a standby that is ready.
Each run kills the engine in the middle of a streamed answer and compares the whole text with the undisturbed one. The
split is the service's own account of the outage and the recovery's report; its parts follow each other.

python -m bench.serve_cpu [--runs 5] [--rows plain keeper launcher standby]
                          [--model FOLDER] [--serve "--device cuda:0 --batch-sizes 1,4,8 --max-length 8192"]

With ``--model`` and ``--serve`` the same rows for another model and on a GPU; the folder needs a tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.harness import Results, private_directory, spread

WARM, TOKENS, LIMIT_S = 4, 40, 120.0
SPARE_S, IMAGINED_S = 5.0, 1.0
"""Seconds in which a spare comes, and those in which it makes what it can of the engine."""
PROMPT = "Once upon a time, in a small village by the sea,"
ROWS = {
    "plain": (["--launcher", "off"], {"FER_MODE": "off"}),
    "keeper": (["--launcher", "off"], {}),
    "launcher": (["--launcher", "auto"], {}),
    "standby": (["--launcher", "auto", "--standbys", "1"], {}),
}


class Service:
    """One ``fer serve``; every figure is taken at its client's side."""

    def __init__(self, address: str, name: str) -> None:
        found = urlsplit(address)
        self._place, self._name = (found.hostname or "", found.port or 0), name

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._place, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.get("/status")[1]))

    def quiet(self, engines: int) -> dict[str, Any]:
        """Wait until all engines have recovered: a start that still runs would share the cores."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            status = self.status()
            if sum(member["role"] in ("active", "standby") for member in status["members"]) == engines:
                return status
            time.sleep(0.1)
        raise RuntimeError("the engines did not come up")

    def spared(self) -> dict[str, Any]:
        """Wait for the spare of an engine that will have one; a service is without it in the first seconds only."""
        deadline = time.monotonic() + SPARE_S
        while True:
            status = self.status()
            active = [member for member in status["members"] if member["role"] == "active"]
            wanted = len(status["members"]) == 1 and active and active[0]["processes"][0]["via"] == "launcher"
            if not wanted or time.monotonic() > deadline:
                return status
            if active[0]["spare"]:
                time.sleep(IMAGINED_S)
                return status
            time.sleep(0.1)

    def pieces(self, tokens: int = TOKENS) -> Iterator[tuple[float, str]]:
        """Text and the moment it came, from one streamed answer."""
        connection = http.client.HTTPConnection(*self._place, timeout=LIMIT_S)
        asked = {"model": self._name, "prompt": PROMPT, "max_tokens": tokens, "stream": True}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(asked).encode())
            response = connection.getresponse()
            while line := response.readline().decode().strip() or response.readline().decode().strip():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    return
                found = json.loads(data)
                if "error" in found:
                    raise RuntimeError(found["error"]["message"])
                yield time.monotonic(), found["choices"][0]["text"]

    def cut_off(self, engines: int, known: int = WARM, tokens: int = TOKENS) -> tuple[str, float, float]:
        """One death after so many tokens of an answer: its whole text, when we killed, when the next token came."""
        self.quiet(engines)
        pid = self.spared()["pid"]
        stream = self.pieces(tokens)
        text = "".join(next(stream)[1] for _ in range(known))
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        came, piece = next(stream)
        while came < killed:  # was under way when we killed
            text += piece
            came, piece = next(stream)
        return text + piece + "".join(more for _, more in stream), killed, came

    def kill(self, engines: int, undisturbed: str) -> tuple[dict[str, Any], float, float]:
        """The same, where the answer must be the undisturbed one: the status afterwards, and both moments."""
        text, killed, came = self.cut_off(engines)
        if text != undisturbed:
            raise RuntimeError(f"another answer: {text!r} in place of {undisturbed!r}")
        return self.status(), killed, came


def split(status: dict[str, Any], killed: float, came: float) -> dict[str, float]:
    """Seconds of each part of an outage, one after another, and of the whole."""
    outage = status["last_outage"]
    seen = outage["died_ns"] / 1e9
    if outage["path"] == "standby":
        parts = {"detection": seen - killed, "active": outage["active"]}
    else:
        active = next(member for member in status["members"] if member["role"] == "active")
        phases = {name: seconds for name, seconds in active["recovery"]["phase_s"].items() if name != "python"}
        # The next engine begins at the first sign of the death, while the kernel takes the process apart: a spare that
        # waited, or one that is spawned then.
        told = outage.get("told", outage["begun"])
        parts = {"until it begins": seen + told - killed}
        if outage["spawned"] + seen >= killed:
            parts["until it begins"] = seen + outage["spawned"] - killed
            parts["interpreter"] = told - outage["spawned"]
        parts["imports"] = outage["ready"] - told - sum(phases.values())
        parts |= {f"recover: {name}": seconds for name, seconds in phases.items() if seconds >= 0.001}
        parts["promotion"] = outage["active"] - outage["ready"]
    parts["first token"] = came - seen - outage["active"]
    return {"whole": came - killed, **parts}


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Median milliseconds of each part of several outages, without the whole."""
    parts = dict.fromkeys(part for run in found for part in run if part != "whole")
    return {part: round(statistics.median(run.get(part, 0.0) for run in found) * 1e3, 1) for part in parts}


def faster(results: Results, found: dict[str, float]) -> None:
    """Medians of rows beside the plain start's, if that was among them."""
    if "plain" in found:
        rest = {name: f"{found['plain'] / value:.1f} times" for name, value in found.items() if name != "plain"}
        results.add("faster than the plain start, medians", rest)


@contextlib.contextmanager
def service(model: Path, arguments: list[str], environment: dict[str, str]) -> Iterator[Service]:
    command = [sys.executable, "-m", "fer", "serve", "--model", str(model), "--port", "0", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    try:
        yield Service(process.stdout.readline().decode().strip(), model.name)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        process.stdout.close()


@contextlib.contextmanager
def launcher(model: Path) -> Iterator[None]:
    """A launcher with what the engine imports, and the model's tokenizer; returns once it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fer", "launcher", "run", "--preload", str(model)], stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        asked = [sys.executable, "-m", "fer", "launcher", "status"]
        while subprocess.run(asked, capture_output=True, check=False).returncode:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("no launcher came up")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(LIMIT_S)


def _row(results: Results, name: str, model: Path, more: list[str], runs: int) -> float:
    arguments, environment = ROWS[name]
    engines = 2 if name == "standby" else 1
    with service(model, [*arguments, *more], environment) as served:
        served.quiet(engines)
        undisturbed = "".join(piece for _, piece in served.pieces())
        found = [split(*served.kill(engines, undisturbed)) for _ in range(runs)]
        how = served.status()["members"][0]["processes"][0]
    results.add(f"{name}: engine started by", f"{how['via']} ({how['why']})")
    results.add(f"{name}: SIGKILL to next token at the client (ms)", spread([run["whole"] for run in found]))
    results.add(f"{name}: load average afterwards", round(os.getloadavg()[0], 2))
    results.add(f"{name}: median of each part (ms)", medians(found))
    return statistics.median(run["whole"] for run in found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rows", nargs="*", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--serve", type=shlex.split, default=[])
    arguments = parser.parse_args()

    from fer import paths
    from fer.engines.demo_model import smollm2

    model = arguments.model or smollm2(paths.home())
    results = Results("serve_cpu")
    results.add("load average at the beginning", [round(value, 2) for value in os.getloadavg()])
    results.add("caches", "page cache warm, byte-compiled packages; nothing is compiled")
    found: dict[str, float] = {}
    with private_directory():
        for name in arguments.rows:
            with launcher(model) if "auto" in ROWS[name][0] else contextlib.nullcontext():
                found[name] = _row(results, name, model, arguments.serve, arguments.runs)
    faster(results, found)
    results.save()


if __name__ == "__main__":
    main()
