"""One card shared: a batch engine that is killed and comes back, and an update to another model under requests.

*Batch*: a preemptible engine beside an online one on the same weights is killed in the middle of an answer, and is back
by itself. From SIGKILL until the next engine answers, and until the next token at the client, whose whole text is
compared with the undisturbed one. Beside it the same without FER's parts (``FER_MODE=off``, no launcher).

*Update*: clients ask without a pause, streamed and whole, while the model is replaced by one whose last norm differs.
The longest time that any client waited for anything, requests that failed, and each answer compared with both models:
it is the one's or the other's, never of both. Beside it the plain way: the service ends and is started with the other
model, without FER's parts; clients ask again until somebody listens.

python -m bench.sharing [--runs 10] [--updates 3] [--restarts 2] [--rows batch update]
                        [--model FOLDER] [--other FOLDER] [--serve "--device cuda:0 --batch-sizes 1,4,8"]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness import Results, private_directory, spread
from bench.serve_cpu import LIMIT_S, PROMPT, ROWS, Service, launcher, service

TOKENS, WARM = 24, 4
NAME = "served"


def changed(model: Path, folder: Path) -> Path:
    """A folder like a model's, all of its files linked but the one whose last norm is changed."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in sorted(model.iterdir()):
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            norms = [name for name in tensors if name.endswith("model.norm.weight")]
            if norms:
                tensors[norms[0]] = tensors[norms[0]].flip(0).contiguous()
                save_file(tensors, folder / file.name, metadata={"format": "pt"})
                continue
        (folder / file.name).symlink_to(file)
    return folder


class Client:
    """Streams and whole answers, of the batch engine too."""

    def __init__(self, served: Service, tier: str = "auto") -> None:
        self._served, self._tier = served, tier

    def body(self, *, stream: bool) -> dict[str, Any]:
        asked = {"model": NAME, "prompt": PROMPT, "max_tokens": TOKENS, "stream": stream}
        return {**asked, "service_tier": self._tier}

    def pieces(self) -> Iterator[tuple[float, str]]:
        """Text and the moment it came."""
        with self._asked(stream=True) as response:
            if response.status != 200:
                raise RuntimeError(response.read().decode())
            while line := response.readline() or b"":
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    found = json.loads(data)
                    if "error" in found:
                        raise RuntimeError(found["error"]["message"])
                    yield time.monotonic(), found["choices"][0]["text"]
            raise RuntimeError("the stream ended early")

    def whole(self) -> str:
        with self._asked(stream=False) as response:
            found = json.loads(response.read())
            if response.status != 200:
                raise RuntimeError(str(found))
            return str(found["choices"][0]["text"])

    @contextlib.contextmanager
    def _asked(self, *, stream: bool) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(*self._served._place, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(self.body(stream=stream)).encode())
            yield connection.getresponse()


def until(served: Service, holds: Any) -> dict[str, Any]:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if holds(status := served.status()):
                return status
        time.sleep(0.01)
    raise RuntimeError("it did not come about")


def batch(results: Results, row: str, model: Path, more: list[str], runs: int) -> None:
    """Deaths of the batch engine, one after another, each in the middle of an answer."""
    arguments, environment = ROWS[row]
    with service(model, [*arguments, "--batch", "--name", NAME, *more], environment) as served:
        client = Client(served, "flex")
        until(served, lambda status: status["batch"]["role"] == "batch")
        undisturbed = client.whole()
        back, token = [], []
        for _ in range(runs):
            status = until(served, lambda status: status["batch"]["role"] == "batch")
            stream = client.pieces()
            text = "".join(next(stream)[1] for _ in range(WARM))
            killed = time.monotonic()
            os.kill(status["batch"]["processes"][0]["pid"], signal.SIGKILL)
            came, piece = next(stream)
            while came < killed:
                text += piece
                came, piece = next(stream)
            text += piece + "".join(rest for _, rest in stream)
            if text != undisturbed:
                raise RuntimeError(f"another answer: {text!r} in place of {undisturbed!r}")
            token.append(came - killed)
            back.append(until(served, lambda status: status["batch"]["role"] == "batch")["batch"]["back_s"])
        how = served.status()["batch"]["processes"][0]
    results.add(f"batch, {row}: engine started by", f"{how['via']} ({how['why']})")
    results.add(f"batch, {row}: SIGKILL to the next engine that answers (ms)", spread(back))
    results.add(f"batch, {row}: SIGKILL to the next token at the client, same text (ms)", spread(token))


class Asking:
    """Clients that ask without a pause, until told to stop; what they got, and how long they waited for it."""

    def __init__(self, served: Service) -> None:
        self._client, self._ends = Client(served), threading.Event()
        self.texts: list[str] = []
        self.failed: list[str] = []
        self.longest = 0.0
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._streams, self._wholes)]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join(LIMIT_S)

    def _streams(self) -> None:
        last = time.monotonic()
        while not self._ends.is_set():
            try:
                text = ""
                for came, piece in self._client.pieces():
                    self.longest, last = max(self.longest, came - last), came
                    text += piece
                self.texts.append(text)
            except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
                self.failed.append(str(error))
                time.sleep(0.05)

    def _wholes(self) -> None:
        while not self._ends.is_set():
            try:
                self.texts.append(self._client.whole())
            except (OSError, http.client.HTTPException, RuntimeError, ValueError) as error:
                self.failed.append(str(error))
                time.sleep(0.05)


def judged(results: Results, row: str, asking: Asking, answers: list[str]) -> None:
    """Count whose the answers are; raises where one is nobody's."""
    odd = [text for text in asking.texts if text not in answers]
    if odd:
        raise RuntimeError(f"an answer of neither model: {odd[0]!r}")
    counted = [sum(text == answer for text in asking.texts) for answer in answers]
    results.add(f"{row}: answers of the old and of the new model", counted)


def updates(results: Results, models: list[Path], more: list[str], runs: int) -> list[str]:
    """Updates there and back; the answers of both models."""
    gaps, failed, whole, parts = [], 0, [], []
    answers = []
    for model in models:
        with service(model, ["--name", NAME, *ROWS["launcher"][0], *more], {}) as served:
            served.quiet(1)
            answers.append(Client(served).whole())
    with service(models[0], ["--name", NAME, *ROWS["standby"][0], *more], {}) as served:
        for number in range(runs):
            old, new = models[number % 2], models[1 - number % 2]
            served.quiet(2)
            with Asking(served) as asking:
                time.sleep(1.0)
                begin = time.monotonic()
                command = [sys.executable, "-m", "fer", "update", str(new), "--json"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
                if done.returncode:
                    raise RuntimeError(done.stdout)
                whole.append(time.monotonic() - begin)
                time.sleep(1.0)
            judged(results, f"update {number + 1}", asking, [answers[models.index(old)], answers[models.index(new)]])
            gaps.append(asking.longest)
            failed += len(asking.failed)
            parts.append(json.loads(done.stdout)["seconds"])
    results.add("update: longest wait of a client for its next token (ms)", spread(gaps))
    results.add("update: failed requests", failed)
    results.add("update: the whole command (ms)", spread(whole))
    results.add("update: seconds of each step, every run", parts)
    return answers


def restarts(results: Results, models: list[Path], more: list[str], answers: list[str], runs: int) -> None:
    """The plain way: the service ends, and another one starts at the same port with the other model."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    gaps, failed = [], []
    for _ in range(runs):
        arguments = ["--name", NAME, *ROWS["plain"][0], "--drain-s", "5", *more]
        with contextlib.ExitStack() as stack:
            with at(models[0], port, arguments) as served:
                served.quiet(1)
                asking = stack.enter_context(Asking(served))
                time.sleep(1.0)
            served = stack.enter_context(at(models[1], port, arguments))
            until(served, lambda status: status["state"] == "active")
            counted = len(asking.texts)
            while len(asking.texts) < counted + 2:
                time.sleep(0.05)
        judged(results, "plain restart", asking, answers)
        gaps.append(asking.longest)
        failed.append(len(asking.failed))
    results.add("plain restart: longest wait of a client for its next token (ms)", spread(gaps))
    results.add("plain restart: failed requests (each asked again after 50 ms)", failed)


@contextlib.contextmanager
def at(model: Path, port: str, arguments: list[str]) -> Iterator[Service]:
    """A service at this port, without FER's parts."""
    command = [sys.executable, "-m", "fer", "serve", "--model", str(model), "--port", port, *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **ROWS["plain"][1]}
    )
    assert process.stdout is not None
    try:
        yield Service(process.stdout.readline().decode().strip(), model.name)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--restarts", type=int, default=2)
    parser.add_argument("--rows", nargs="*", choices=["batch", "update"], default=["batch", "update"])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--other", type=Path, default=None, help="the model to update to; by default one is made")
    parser.add_argument("--serve", type=shlex.split, default=[])
    arguments = parser.parse_args()

    from fer import paths
    from fer.engines.demo_model import smollm2

    model = arguments.model or smollm2(paths.home())
    results = Results("sharing")
    results.add("load average at the beginning", [round(value, 2) for value in os.getloadavg()])
    results.add("caches", "page cache warm, byte-compiled packages; nothing is compiled")
    with private_directory() as directory:
        if "batch" in arguments.rows:
            with launcher(model):
                batch(results, "launcher", model, arguments.serve, arguments.runs)
            batch(results, "plain", model, arguments.serve, max(2, arguments.runs // 4))
        if "update" in arguments.rows:
            models = [model, arguments.other or changed(model, directory / "other")]
            with launcher(model):
                answers = updates(results, models, arguments.serve, arguments.updates)
            restarts(results, models, arguments.serve, answers, arguments.restarts)
    results.add("load average at the end", [round(value, 2) for value in os.getloadavg()])
    results.save()


if __name__ == "__main__":
    main()
