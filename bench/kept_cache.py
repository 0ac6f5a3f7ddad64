"""SIGKILL of the serving engine to the next token, by how far its answer was: with the cache that outlives it or not.

A parked standby takes over in the middle of a streamed answer. With ``--keep-cache`` it goes on with the next step;
without it makes the known tokens again (``--resume retry``), or reads them with the prompt (``prefill``). Each text is
compared with the undisturbed one; where tokens are read again, half precision may round otherwise.

python -m bench.kept_cache [--runs 5] [--known 4 64 256] [--model FOLDER] [--serve "--device cuda:0 --batch-sizes 1,4"]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.harness import Results, spread
from bench.serve_cpu import PROMPT, Service, launcher, service

MORE = 12
WAYS = {
    "kept cache": [],
    "no kept cache, tokens made again": ["--no-keep-cache"],
    "no kept cache, tokens read again": ["--no-keep-cache", "--resume", "prefill"],
}


def death(served: Service, known: int, undisturbed: str) -> tuple[float, bool, dict[str, Any]]:
    """Seconds from the kill to the next token, whether the text was the undisturbed one, the service's account."""
    pid = served.quiet(2)["pid"]
    stream = served.pieces(known + MORE)
    text = "".join(next(stream)[1] for _ in range(known))
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    came, piece = next(stream)
    while came < killed:  # was under way when we killed
        text += piece
        came, piece = next(stream)
    text += piece + "".join(more for _, more in stream)
    return came - killed, text == undisturbed, served.status()["last_outage"]


def way(results: Results, name: str, model: Path, more: list[str], known: list[int], runs: int) -> None:
    with service(model, ["--launcher", "auto", "--standbys", "1", *more], {}) as served:
        served.quiet(2)
        for count in known:
            undisturbed = "".join(piece for _, piece in served.pieces(count + MORE))
            found = [death(served, count, undisturbed) for _ in range(runs)]
            label = f"{name}, {count} tokens known"
            results.add(f"{label}: SIGKILL to next token at the client (ms)", spread([s for s, _, _ in found]))
            results.add(
                f"{label}: answers that were the undisturbed ones", f"{sum(ok for _, ok, _ in found)} of {runs}"
            )
            parts = [outage["promotion"] for _, _, outage in found]
            medians = {part: round(statistics.median(p[part] for p in parts) * 1e3, 1) for part in parts[0]}
            results.add(f"{label}: median of each part (ms)", medians)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--known", type=int, nargs="*", default=[4, 64, 256])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--serve", type=shlex.split, default=["--batch-sizes", "1,2,4"])
    arguments = parser.parse_args()

    from fer import paths
    from fer.engines.demo_model import smollm2
    from fer.errors import FerError
    from fer.weights.client import KeeperClient

    model = arguments.model or smollm2(paths.home())
    results = Results("kept_cache")
    results.add("load average at the beginning", [round(value, 2) for value in os.getloadavg()])
    directory = Path(tempfile.mkdtemp(prefix="fer-bench-"))
    os.environ["FER_RUNTIME_DIR"] = str(directory)
    results.add("asked", json.dumps(PROMPT))
    try:
        with launcher(model):
            for name, more in WAYS.items():
                way(results, name, model, [*arguments.serve, *more], arguments.known, arguments.runs)
                results.save()
    finally:
        with contextlib.suppress(FerError), KeeperClient.connect(directory) as client:
            client.stop(force=True)
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
