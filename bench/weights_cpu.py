"""The weights stage in host memory: 4 GiB attached, bound and verified; the first forward pass beside the loaded one's.

Attached weights are measured twice: as they are, with the thread that brings their pages in beside the first forward
pass, and without it, which is what the attach alone leaves that pass to do.

python -m bench.weights_cpu [--gib 4]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from bench import synthetic
from bench.harness import Results, child, private_keeper, spread
from bench.synthetic import GIB, HIDDEN

TENSORS, RUNS = 2000, 5


def start(total: int) -> dict[str, Any]:
    """One start and two forward passes; seconds. Cold the first time, attached from then on."""
    import fer

    engine = synthetic.engine(model="stack", device="cpu", tensors=TENSORS, total=total)
    report = fer.recover(engine, mode="client")
    row: dict[str, Any] = {"path": report.stages["weights"].path, "weights": report.phase_s("weights")}
    steps = {span.name: span.seconds for span in report.spans if span.parent.startswith("weights")}
    row["attach, bind, verify"] = sum(
        steps.get(name, 0.0) for name in ("lease", "map", "begin check", "bind", "finish check")
    )
    row["steps"] = {name: round(seconds * 1e3, 2) for name, seconds in steps.items()}
    return row | _forwards(engine.module)


def _forwards(module: Any) -> dict[str, Any]:
    """Two forward passes: the seconds of each, and the page faults of the process in that time."""
    import resource

    import torch

    x, row = torch.randn(1, HIDDEN, dtype=torch.bfloat16), dict[str, Any]()
    for number in ("first", "second"):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.perf_counter()
        with torch.inference_mode():
            module(x)
        row[f"{number} forward"] = time.perf_counter() - begin
        row[f"{number} forward faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return row


def _plain(total: int) -> dict[str, Any]:
    """The same module loaded by its loader alone, without FER."""
    engine = synthetic.engine(model="stack", device="cpu", tensors=TENSORS, total=total)
    begin = time.perf_counter()
    engine.adopt(engine.load())
    return {"load": time.perf_counter() - begin} | _forwards(engine.module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=4)
    total = int(parser.parse_args().gib * GIB)

    import torch  # noqa: F401

    import fer.engines.module
    import fer.orchestrator
    import fer.weights.stage  # noqa: F401

    results = Results("weights_cpu")
    with private_keeper():
        plain = child(_plain, total)
        for name in ("load", "first forward", "second forward"):
            results.add(f"loaded without FER, {name} (ms)", round(plain[name] * 1e3, 1))
        results.add("loaded without FER, page faults of the first forward", plain["first forward faults"])
        cold = child(start, total)
        assert cold["path"] == "loaded", cold
        results.add("first start, weights phase (ms)", round(cold["weights"] * 1e3, 1))
        results.add("first start, steps (ms)", cold["steps"])
        runs = [child(start, total) for _ in range(RUNS)]
        assert all(run["path"] == "attached" for run in runs), runs
        for name in ("attach, bind, verify", "weights", "first forward", "second forward"):
            results.add(f"attached, {name} (ms)", spread([run[name] for run in runs]))
        results.add("attached, steps of one run (ms)", runs[0]["steps"])
        results.add("attached, page faults of the first forward", [run["first forward faults"] for run in runs])
    results.save()


if __name__ == "__main__":
    main()
