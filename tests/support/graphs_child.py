"""One start of an engine with decode graphs in a process of its own; prints one JSON row and ends by SIGKILL."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

_KEPT: list[Any] = []


def disturb(how: str) -> None:
    """Change what lies where before FER begins."""
    import torch

    if how == "context":
        library, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        library.cuInit(0)
        assert library.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        _KEPT.append(context)
    elif how == "allocations":
        _KEPT.extend(torch.ones(16 << 20, dtype=torch.uint8, device="cuda") for _ in range(20))
    elif how == "modules":
        a = torch.randn(64, 64, device="cuda")
        _KEPT.append((torch.linalg.inv(a) @ a).sum().item())
    elif how == "imports":  # the order in which libraries come into the process, and what they load then
        import transformers.models.qwen3.modeling_qwen3
        import triton.language

        _KEPT.extend((triton.language, transformers.models.qwen3.modeling_qwen3, torch.backends.cudnn.version()))
    elif how == "profiler":  # CUPTI has one subscriber, and that is somebody else
        from fer.cudagraph.cupti import Recorder

        _KEPT.append(Recorder())
    elif how == "no-cupti":
        os.environ["LD_LIBRARY_PATH"] = ""
        from fer.cudagraph import cupti

        cupti.glob.glob = lambda pattern: []  # type: ignore[assignment]
        cupti.ctypes.CDLL = _without("cupti", ctypes.CDLL)  # type: ignore[misc]
    elif how == "base":  # the address of one range is taken, so nothing can be restored
        from fer.memory import arena, driver, gpus
        from fer.memory.device import CudaDevice

        device = CudaDevice(0)
        place = arena.address_of(gpus.arena_index(device.pci_bus), arena.SCRATCH)
        with device.current():
            assert int(driver.call("cuMemAddressReserve", arena.SCRATCH.size, 0, place, 0)) == place


def _without(part: str, load: Any) -> Any:
    def loader(name: Any, *arguments: Any, **more: Any) -> Any:
        if part in str(name):
            raise OSError(f"{name}: not found")
        return load(name, *arguments, **more)

    return loader


def main() -> None:
    asked = json.loads(sys.argv[1])
    disturb(asked.get("disturb", ""))
    import fer
    from fer.cudagraph import store
    from fer.engines.transformers import TransformersEngine

    engine = TransformersEngine(
        asked["folder"], device="cuda:0", max_length=128, batch_sizes=asked.get("batch_sizes", [1, 2, 4])
    )
    report = fer.recover(engine, **asked.get("options", {}))
    stage = report.stages["cudagraph"]
    row: dict[str, Any] = {"path": stage.path, "why": stage.why, "details": dict(stage.details)}
    row["weights"] = report.stages["weights"].path
    row["answers"] = engine.generate_many(asked["prompts"], asked.get("tokens", 16))
    row["alone"] = engine.generate(asked["prompts"][0], asked.get("tokens", 16))
    decode = engine.graphs()
    row["session"] = decode.session.verify_owners() if decode is not None and decode.session is not None else None
    if asked.get("proof"):
        end = time.monotonic() + 100
        while time.monotonic() < end and not store.look(store.find()[0]).proof.startswith(("proven", "failed")):
            time.sleep(0.2)  # the child works beside us and says so in a file
        listed = store.look(store.find()[0])
        row["proof"], row["proof_why"], row["quarantined"] = listed.proof, listed.why, dict(listed.quarantined)
    print(json.dumps(row, default=str), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def hostile() -> None:
    """Graphs that must be refused, each with the reason the audit gives."""
    import torch

    from fer.cudagraph.audit import Owners, audit
    from fer.cudagraph.cupti import Recorder
    from fer.cudagraph.libcuda import open_cuda
    from fer.cudagraph.record import Functions, oracle
    from fer.cudagraph.records import Tables
    from fer.cudagraph.walk import walk
    from fer.memory.device import CudaDevice
    from fer.memory.ranges import reserve

    device = CudaDevice(0)
    recorder = Recorder()
    ranges = reserve(device)
    x, host = torch.ones(1 << 12, device="cuda"), torch.ones(1 << 12).pin_memory()
    event = torch.cuda.Event(external=True)

    def outside() -> None:
        x.add_(1)

    def copy() -> None:
        x.copy_(host, non_blocking=True)

    def record() -> None:
        event.record()

    def dropout() -> None:
        torch.nn.functional.dropout(x, 0.5)

    found = {}
    for work in (outside, copy, record, dropout):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            work()
        tables = Tables()
        cuda = open_cuda()
        place = walk(cuda, int(graph.raw_cuda_graph()), work.__name__, tables, Functions(cuda, tables, recorder.seen))
        refusals = audit(tables, tables.graphs[place], Owners([]), oracle(cuda), span=ranges.span)
        found[work.__name__] = [str(each) for each in refusals]
    recorder.close()
    print(json.dumps(found), flush=True)
    os._exit(0)


def fixture() -> None:
    """The archive in the tests' data, restored and compared here: at the addresses of a host's first GPU."""
    from fer.cudagraph.proof import Request, run
    from fer.memory import gpus
    from fer.memory.device import CudaDevice

    if gpus.arena_index(CudaDevice(0).pci_bus):
        print(json.dumps({"elsewhere": True}), flush=True)
        os._exit(0)
    data = Path(__file__).parent.parent / "data" / "h200.fergraph"
    print(json.dumps(run(Request(str(data), 0, "fixture", "", ""))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    {"hostile": hostile, "fixture": fixture}.get(sys.argv[1], main)()
