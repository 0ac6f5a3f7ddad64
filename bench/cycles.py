"""Attach and kill, many times over: does anything grow?

    python -m bench.cycles [--device cuda:0] [--cycles 200]

Children are forked from a process that has imported torch and holds no CUDA context; each attaches and kills itself.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from bench import synthetic
from bench.harness import Results, child, gpu_used_mib, private_keeper, spread

TENSORS, TOTAL = 400, 1 << 30


def start(device: str) -> dict[str, Any]:
    """One start: cold the first time, attached from then on."""
    import fer

    report = fer.recover(synthetic.engine(model="stack", device=device, tensors=TENSORS, total=TOTAL), mode="client")
    return {"path": report.stages["weights"].path, "seconds": report.phase_s("weights")}


def levels(runtime: Path, keeper: int, device: str) -> dict[str, int]:
    """All that could leak, as it stands between two cycles."""
    status = Path(f"/proc/{keeper}/status").read_text()
    return {
        "keeper fds": len(os.listdir(f"/proc/{keeper}/fd")),
        "keeper RSS (KiB)": int(status.split("VmRSS:")[1].split()[0]),
        "/dev/shm entries": len(os.listdir("/dev/shm")),
        "runtime directory entries": len(os.listdir(runtime)),
        "device memory (MiB)": gpu_used_mib() if device != "cpu" else 0,
    }


def _settled_keeper_fds(keeper: int, leases: int) -> None:
    from fer.weights.client import KeeperClient

    with KeeperClient.connect() as client:  # the keeper answers after it has seen the dead connection's end
        assert sum(len(info.holders) for info in client.status().editions) == leases


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cycles", type=int, default=200)
    arguments = parser.parse_args()

    import torch  # noqa: F401
    import triton  # noqa: F401

    import fer.engines.module
    import fer.orchestrator
    import fer.weights.stage  # noqa: F401
    from fer.weights.client import KeeperClient

    results = Results(f"cycles_{arguments.device.split(':')[0]}")
    with private_keeper() as runtime:
        with KeeperClient.connect() as client:
            keeper = client.keeper_pid
        paths = [child(start, arguments.device)["path"] for _ in range(3)]
        assert paths == ["loaded", "attached", "attached"], paths
        before = levels(runtime, keeper, arguments.device)
        runs = [child(start, arguments.device) for _ in range(arguments.cycles)]
        assert all(run["path"] == "attached" for run in runs)
        _settled_keeper_fds(keeper, 0)
        after = levels(runtime, keeper, arguments.device)
        results.add("cycles", arguments.cycles)
        results.add("before", before)
        results.add("after", after)
        results.add("growth", {name: after[name] - before[name] for name in before})
        results.add("weights phase (ms)", spread([run["seconds"] for run in runs])[:60])
    results.save()


if __name__ == "__main__":
    main()
