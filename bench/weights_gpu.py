"""The weights stage on one GPU: attach, verify, bind, publish; beside them legacy IPC and a load from page cache.

    python -m bench.weights_gpu [attach] [publish] [baseline] [rank1t] [share]

Every measured process is forked from this one, which has imported torch and holds no CUDA context, and ends by SIGKILL.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import synthetic
from bench.harness import Results, child, gpu_used_mib, private_keeper, spread
from bench.synthetic import GIB

DEVICE = "cuda:0"
RUNS = 5


def _steps(report: Any) -> dict[str, float]:
    """Seconds of each step of the weights phase, by name."""
    found: dict[str, float] = {}
    for span in report.spans:
        if span.parent.startswith("weights"):
            found[span.name] = found.get(span.name, 0.0) + span.seconds
    return found


def _context() -> float:
    """Make the CUDA context, which every start pays and no stage here can save; seconds."""
    import torch

    begin = time.perf_counter()
    torch.cuda.init()
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def place(model: str, tensors: int, total: int, slabs: int) -> dict[str, float]:
    from bench.in_place import publish_in_place

    return publish_in_place(synthetic.engine(model=model, device=DEVICE, tensors=tensors, total=total), slabs=slabs)


def attach(model: str, tensors: int, total: int, verify: str) -> dict[str, float]:
    """One attached start, each step in seconds."""
    import torch

    import fer

    context = _context()
    engine = synthetic.engine(model=model, device=DEVICE, tensors=tensors, total=total)
    report = fer.recover(engine, mode="client", on_miss="fail", verify=verify)
    steps = _steps(report)
    torch.cuda.synchronize()
    stage = report.stages["weights"]
    return {
        **steps,
        "attach": steps["lease"] + steps["map"],
        "attach, bind, verify": sum(steps[name] for name in ("lease", "map", "begin check", "bind", "finish check")),
        "weights": report.phase_s("weights"),
        "context": context,
        "moved": stage.details["moved"],
    }


def attach_and_verify(model: str, tensors: int, total: int) -> dict[str, float]:
    """Map and check the slabs with nothing in between, in seconds (a start binds while the GPU checks)."""
    from fer.options import Options
    from fer.report import Report
    from fer.weights import attach as attaching
    from fer.weights import manifest
    from fer.weights.client import KeeperClient
    from fer.weights.edition import Workshop
    from fer.weights.lookup import Lookup

    _context()
    engine = synthetic.engine(model=model, device=DEVICE, tensors=tensors, total=total)
    report = Report()
    with report.phase("weights"):
        workshop = Workshop(engine, Options.load(), report)
        client = KeeperClient.connect()
        candidate = Lookup(client, engine.identity(), workshop.backend).choose()
        assert candidate is not None
        begin = time.perf_counter()
        leased = client.lease(candidate.edition)
        leasing = time.perf_counter() - begin
        record = manifest.decode(leased.manifest)
        begin = time.perf_counter()
        mappings = attaching.map_slabs(record, leased.slabs, workshop._by_kind)
        compared = attaching.Check(record, mappings, workshop._by_kind, "fast").finish()
        seconds = leasing + time.perf_counter() - begin
    assert "checksums" in compared or DEVICE == "cpu"
    return {"attach+verify": seconds}


def cold(model: str, tensors: int, total: int) -> dict[str, Any]:
    """A first start: load, publish, go on."""
    import fer

    _context()
    engine = synthetic.engine(model=model, device=DEVICE, tensors=tensors, total=total)
    report = fer.recover(engine, mode="client")
    return {**_steps(report), **report.stages["weights"].details, "why": report.stages["weights"].why}


def evict_all() -> None:
    from fer.weights.client import KeeperClient

    with KeeperClient.connect() as client:
        client.evict()


def _attach_rows(results: Results, name: str, model: str, tensors: int, total: int) -> None:
    for verify, steps in (
        ("off", ("attach", "lease", "map", "skeleton", "read manifest", "bind", "weights")),
        ("fast", ("attach, bind, verify", "finish check", "weights")),
    ):
        runs = [child(attach, model, tensors, total, verify) for _ in range(RUNS)]
        for step in steps:
            results.add(f"{name}, verify={verify}, {step} (ms)", spread([run[step] for run in runs]))
        assert not any(run["moved"] for run in runs), "slabs were not at their recorded addresses"
    runs = [child(attach_and_verify, model, tensors, total) for _ in range(RUNS)]
    results.add(f"{name}, attach and fast verification alone (ms)", spread([run["attach+verify"] for run in runs]))


def bench_attach(results: Results) -> None:
    for gib in (96, 16):
        for slabs in (1, 64):
            made = child(place, "stack", 8000, gib * GIB, slabs)
            used = gpu_used_mib()
            results.add(f"{gib} GiB in {made['slabs']} slabs, held after the loader was killed (MiB beyond the slabs)",
                        used - made["bytes"] // (1 << 20))  # fmt: skip
            _attach_rows(results, f"{gib} GiB, {made['slabs']} slabs, 8000 tensors", "stack", 8000, gib * GIB)
            evict_all()
    results.add("after eviction, in use (MiB)", gpu_used_mib())


def bench_rank1t(results: Results) -> None:
    made = child(place, "1t", 0, 0, 48)
    results.add("1T-class rank, GiB", made["bytes"] / GIB)
    _attach_rows(results, f"1T-class rank, {made['slabs']} slabs", "1t", 0, 0)
    evict_all()


def bench_publish(results: Results) -> None:
    for run in range(3):
        row = child(cold, "stack", 8000, 48 * GIB)
        results.add(f"publish 48 GiB, 8000 tensors, run {run}", row)
        evict_all()


# --- beside it ---


def _ipc_client(handles: str, count: int) -> dict[str, float]:
    import pickle  # the peer's own way; the benchmark's file never leaves this machine

    import torch

    context = _context()
    items = pickle.loads(Path(handles).read_bytes())
    begin = time.perf_counter()
    tensors = [make(*arguments) for make, arguments in items]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    assert len(tensors) == count
    return {"open": seconds, "context": context}


def _ipc_server(handles: str, ready: int, tensors: int, total: int) -> None:
    """Fill ``total`` bytes and export each tensor; stays until it is killed."""
    import pickle

    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    each = total // tensors
    held = [torch.full((each,), n % 251, dtype=torch.uint8, device=DEVICE) for n in range(tensors)]
    torch.cuda.synchronize()
    Path(handles).write_bytes(pickle.dumps([reduce_tensor(tensor) for tensor in held]))
    os.write(ready, b"1")
    time.sleep(300)


def bench_baseline(results: Results) -> None:
    total, tensors = 16 * GIB, 8000
    with tempfile.TemporaryDirectory() as folder:
        handles = f"{folder}/handles"
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _ipc_server(handles, write, tensors, total)
            finally:
                os._exit(0)
        os.close(write)
        try:
            assert os.read(read, 1), "the exporter failed"
            runs = [child(_ipc_client, handles, tensors)["open"] for _ in range(3)]
            results.add("beside: legacy CUDA IPC, 16 GiB, 8000 tensors, open (ms)", spread(runs))
        finally:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(read)
        path = f"{folder}/model.safetensors"
        child(_write_safetensors, path, tensors, total, timeout=200)
        runs = [child(_load_safetensors, path)["load"] for _ in range(3)]
        results.add(
            "beside: safetensors.load_file to the GPU, 16 GiB, 8000 tensors, from page cache (ms)", spread(runs)
        )


def _write_safetensors(path: str, tensors: int, total: int) -> None:
    import torch
    from safetensors.torch import save_file

    each = total // tensors
    block = torch.randint(0, 255, (each,), dtype=torch.uint8)
    save_file({f"t{n}": block.clone() for n in range(tensors)}, path)


def _load_safetensors(path: str) -> dict[str, float]:
    import torch
    from safetensors.torch import load_file

    _context()
    begin = time.perf_counter()
    tensors = load_file(path, device=DEVICE)
    torch.cuda.synchronize()
    return {"load": time.perf_counter() - begin, "tensors": len(tensors)}


def _hold(ready: int, verify: str) -> None:
    attach("stack", 8000, 16 * GIB, verify)
    os.write(ready, b"1")
    time.sleep(300)


def bench_share(results: Results) -> None:
    """Two engines on one card: what the second adds."""
    child(place, "stack", 8000, 16 * GIB, 16)
    used, pids = [gpu_used_mib()], []
    try:
        for _ in range(2):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    _hold(write, "fast")
                finally:
                    os._exit(0)
            pids.append(pid)
            os.close(write)
            assert os.read(read, 1), "an engine failed"
            os.close(read)
            used.append(gpu_used_mib())
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    results.add("16 GiB shared: in use with 0, 1, 2 engines (MiB)", used)
    results.add("second engine adds (MiB)", used[2] - used[1])
    evict_all()


BENCHES = {
    "attach": bench_attach,
    "rank1t": bench_rank1t,
    "publish": bench_publish,
    "baseline": bench_baseline,
    "share": bench_share,
}


def main(names: list[str]) -> None:
    import torch  # before any fork: children then start with it
    import triton  # noqa: F401

    import fer.engines.module
    import fer.orchestrator
    import fer.weights.stage  # noqa: F401

    assert not torch.cuda.is_initialized()
    results = Results("weights_gpu")
    with private_keeper():
        for name in names or BENCHES:
            BENCHES[name](results)
    results.save()


if __name__ == "__main__":
    main(sys.argv[1:])
