"""SIGKILL of the serving engine to the next token at the client, SmolLM2-135M on the host: hot standby and what is
without it; then many deaths one after another, with a look at everything that could have been left behind.

Each run kills the engine in the middle of a streamed answer and compares the whole text with the undisturbed one. Rows:
the plain start (``FER_MODE=off``, no launcher), a restart by the launcher, and a parked standby that is promoted. The
split is the service's own account of the outage; its parts follow each other, fence is part of claim.

python -m bench.standby_cpu [--runs 20] [--cycles 20] [--rows plain launcher standby]
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from bench.harness import Results, private_directory, spread
from bench.serve_cpu import ROWS, Service, faster, launcher, medians, service, split


def killed(served: Service, engines: int, undisturbed: str) -> dict[str, float]:
    """One death in the middle of an answer: seconds of each part, and of the whole."""
    status, at, came = served.kill(engines, undisturbed)
    outage = status["last_outage"]
    if outage["path"] != "standby":
        return split(status, at, came)
    seen, promotion = outage["died_ns"] / 1e9, dict(outage["promotion"])
    fence = promotion.pop("fence")
    parts = {"detection": seen - at, "fence": fence, "claim": promotion.pop("claim") - fence, **promotion}
    parts["routing"] = outage["active"] - fence - sum(parts[name] for name in ("claim", "backing", "self_test"))
    parts["first token"] = came - seen - outage["active"]
    return {"whole": came - at, **parts}


def row(results: Results, name: str, model: Path, runs: int) -> float:
    arguments, environment = ROWS[name]
    engines = 2 if name == "standby" else 1
    with service(model, arguments, environment) as served:
        served.quiet(engines)
        undisturbed = "".join(piece for _, piece in served.pieces())
        found = [killed(served, engines, undisturbed) for _ in range(runs)]
    results.add(f"{name}: SIGKILL to next token at the client (ms)", spread([run["whole"] for run in found]))
    results.add(f"{name}: every run (ms)", [round(run["whole"] * 1e3, 1) for run in found])
    results.add(f"{name}: median of each part (ms)", medians(found))
    results.add(f"{name}: load average afterwards", round(os.getloadavg()[0], 2))
    return statistics.median(run["whole"] for run in found)


def cycles(
    results: Results, served: Service, count: int, held: Callable[[], dict[str, int]], deadline: float = math.inf
) -> None:
    """Deaths one after another, until a moment of :func:`time.monotonic`.

    Args:
        held: counts of what could be left.

    Raises:
        RuntimeError: an answer differs, or something is left.
    """
    served.quiet(2)
    undisturbed = "".join(piece for _, piece in served.pieces())
    killed(served, 2, undisturbed)  # the first one finds its place
    served.quiet(2)
    before = held()
    found: list[dict[str, float]] = []
    while len(found) < count and time.monotonic() < deadline:
        found.append(killed(served, 2, undisturbed))
    if not found:
        results.add("deaths in a row: not run", "the time was up")
        return
    served.quiet(2)
    until = time.monotonic() + 10.0
    while (after := held()) != before and time.monotonic() < until:
        time.sleep(0.2)
    results.add("deaths in a row, every answer the undisturbed one", len(found))
    results.add("deaths in a row: SIGKILL to next token at the client (ms)", spread([run["whole"] for run in found]))
    results.add("deaths in a row: median of each part (ms)", medians(found))
    results.add("held before and after", {name: [before[name], after[name]] for name in before})
    if grown := {name: after[name] - before[name] for name in before if after[name] > before[name]}:
        raise RuntimeError(f"left behind after {len(found)} deaths: {grown}")


def kept(served: Service, directory: Path) -> dict[str, int]:
    """What could leak: of the service and the keeper, by count."""
    from fer.weights.client import KeeperClient

    with KeeperClient.connect(directory) as client:
        keeper = client.status()
    pid = served.status()["supervisor"]
    return {
        "descriptors of the service": len(os.listdir(f"/proc/{pid}/fd")),
        "descriptors of the keeper": len(os.listdir(f"/proc/{keeper.pid}/fd")),
        "editions": len(keeper.editions),
        "processes": sum(_belongs(entry, directory) for entry in Path("/proc").iterdir() if entry.name.isdigit()),
        "shared memory": len(os.listdir("/dev/shm")),
        "files and sockets": sum(1 for _ in directory.rglob("*")),
    }


def _belongs(entry: Path, directory: Path) -> bool:
    with contextlib.suppress(OSError):
        return f"FER_RUNTIME_DIR={directory}".encode() in (entry / "environ").read_bytes().split(b"\0")
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--slow-runs", type=int, default=5, help="of rows whose starts take seconds")
    parser.add_argument("--cycles", type=int, default=20)
    names = ("plain", "launcher", "standby")
    parser.add_argument("--rows", nargs="*", choices=names, default=[*names])
    arguments = parser.parse_args()

    from fer import paths
    from fer.engines.demo_model import smollm2

    model = smollm2(paths.home())
    results = Results("standby_cpu")
    results.add("load average at the beginning", [round(value, 2) for value in os.getloadavg()])
    results.add("caches", "page cache warm, byte-compiled packages; nothing is compiled")
    found: dict[str, float] = {}
    with private_directory() as directory, contextlib.ExitStack() as beside:
        if "plain" in arguments.rows:
            found["plain"] = row(results, "plain", model, arguments.slow_runs)
        beside.enter_context(launcher(model))
        if "launcher" in arguments.rows:
            found["launcher"] = row(results, "launcher", model, arguments.slow_runs)
        if "standby" in arguments.rows:
            found["standby"] = row(results, "standby", model, arguments.runs)
        if arguments.cycles:
            with service(model, *ROWS["standby"]) as served:
                cycles(results, served, arguments.cycles, lambda: kept(served, directory))
    faster(results, found)
    results.save()


if __name__ == "__main__":
    main()
