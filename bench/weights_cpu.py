"""The weights stage in host memory: 4 GiB attached, bound and verified; the first forward pass beside the loaded one's.

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
    import resource

    import torch

    import fer

    engine = synthetic.engine(model="stack", device="cpu", tensors=TENSORS, total=total)
    report = fer.recover(engine, mode="client")
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    row: dict[str, Any] = {"path": report.stages["weights"].path, "weights": report.phase_s("weights")}
    steps = {span.name: span.seconds for span in report.spans if span.parent.startswith("weights")}
    row["attach, bind, verify"] = sum(
        steps.get(name, 0.0) for name in ("lease", "map", "begin check", "bind", "finish check")
    )
    row["steps"] = {name: round(seconds * 1e3, 2) for name, seconds in steps.items()}
    for number in ("first", "second"):
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.perf_counter()
        with torch.inference_mode():
            engine.module(x)
        row[f"{number} forward"] = time.perf_counter() - begin
        row[f"{number} forward faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return row


def _plain(total: int) -> dict[str, Any]:
    """The same module loaded by its loader alone, without FER."""
    import torch

    engine = synthetic.engine(model="stack", device="cpu", tensors=TENSORS, total=total)
    begin = time.perf_counter()
    engine.adopt(engine.load())
    row: dict[str, Any] = {"load": time.perf_counter() - begin}
    x = torch.randn(1, HIDDEN, dtype=torch.bfloat16)
    for number in ("first", "second"):
        begin = time.perf_counter()
        with torch.inference_mode():
            engine.module(x)
        row[f"{number} forward"] = time.perf_counter() - begin
    return row


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
        for name, seconds in plain.items():
            results.add(f"loaded without FER, {name} (ms)", round(seconds * 1e3, 1))
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
