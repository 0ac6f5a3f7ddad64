"""SIGKILL of the serving engine to the next token, by how far its answer was: with the cache that outlives it or not.

A parked standby takes over in the middle of a streamed answer. With ``--keep-cache`` it goes on with the next step;
without it makes the known tokens again (``--resume retry``), or reads them with the prompt (``prefill``). Each text is
compared with the undisturbed one; where tokens are read again, half precision may round otherwise.

python -m bench.kept_cache [--runs 5] [--known 4 64 256] [--model FOLDER] [--serve "--device cuda:0 --batch-sizes 1,4"]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

from bench.harness import Results, private_directory, spread
from bench.serve_cpu import PROMPT, Service, launcher, medians, service

MORE = 12
WAYS = {
    "kept cache": [],
    "no kept cache, tokens made again": ["--no-keep-cache"],
    "no kept cache, tokens read again": ["--no-keep-cache", "--resume", "prefill"],
}


def death(served: Service, known: int, undisturbed: str) -> tuple[float, bool, dict[str, Any]]:
    """Seconds from the kill to the next token, whether the text was the undisturbed one, the service's account."""
    text, killed, came = served.cut_off(2, known, known + MORE)
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
            results.add(f"{label}: median of each part (ms)", medians([o["promotion"] for _, _, o in found]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--known", type=int, nargs="*", default=[4, 64, 256])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--serve", type=shlex.split, default=["--batch-sizes", "1,2,4"])
    arguments = parser.parse_args()

    from fer import paths
    from fer.engines.demo_model import smollm2

    model = arguments.model or smollm2(paths.home())
    results = Results("kept_cache")
    results.add("load average at the beginning", [round(value, 2) for value in os.getloadavg()])
    results.add("asked", json.dumps(PROMPT))
    with private_directory(), launcher(model):
        for name, more in WAYS.items():
            way(results, name, model, [*arguments.serve, *more], arguments.known, arguments.runs)
            results.save()


if __name__ == "__main__":
    main()
