"""CUDA graphs on one GPU: captured with default and frozen GC, saved; restored in fresh processes and compared bitwise.

python -m bench.graphs_gpu [folder]            # everything, each role in a process of its own
python -m bench.graphs_gpu save|restore|moved FOLDER
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

STEPS = 100
TIMED = (1, 64)  # batch sizes whose steps are timed
PLAIN = "FER_TEST_PLAIN" in os.environ  # the unfused model: twice the nodes


def _sha(*tensors: Any) -> str:
    import torch

    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()[:16]


def _chain(model: Any, size: int, replay: Any, outputs: Any, steps: int) -> str:
    """Decode greedily from a fixed start; digest of all tokens and of the last logits."""
    import torch

    with torch.inference_mode():
        for each in model.cache:
            each.zero_()
        model.fill(size, 0)
        tokens = []
        for _ in range(steps):
            replay()
            model.token[:size].copy_(outputs["token"])
            model.position[:size].add_(1)
            tokens.append(outputs["token"].clone())
        torch.cuda.synchronize()
        return _sha(torch.stack(tokens), outputs["logits"])


def pace(replay: Any, count: int = 60) -> float:
    """Milliseconds a replay, median of three."""
    import torch

    found = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / count)
    return sorted(found)[1]


def _model(small: bool) -> Any:
    from bench.graphs_model import Decoder

    return Decoder(layers=4, hidden=1024, inner=2048, batch_sizes=(1, 2, 4, 8)) if small else Decoder(fused=not PLAIN)


def _place(model: Any, ranges: Any) -> list[Any]:
    """Weights and inputs into ``static``, the cache into ``kv``; the weights' owners."""
    import torch

    from fer.cudagraph.audit import Owner

    with torch.inference_mode():
        ranges.static.map(model.weight_bytes(), chunk=1 << 30)
        with ranges.static.place():
            model.load()
            model.allocate()
        ranges.kv.map(model.kv_bytes(), chunk=1 << 30)
        with ranges.kv.place():
            model.allocate_kv()
    torch.cuda.synchronize()
    outside = [n for n, t in {**model.weights(), **model.tensors()}.items() if not _inside(t, ranges)]
    print("tensors outside ranges:", outside[:5], len(outside))
    return [Owner(f"weight/{n}", t.data_ptr(), t.nbytes) for n, t in model.weights().items()]


def _inside(tensor: Any, ranges: Any) -> bool:
    return any(each.address <= tensor.data_ptr() < each.address + each.mapped for each in ranges.all)


def _open() -> tuple[Any, Any]:
    import torch

    from fer.memory.device import CudaDevice
    from fer.memory.ranges import reserve

    device = CudaDevice(0)
    ranges = reserve(device)
    torch.cuda.init()
    torch.cuda.set_device(0)
    return device, ranges


def save(folder: Path, small: bool) -> dict[str, Any]:
    from fer.cudagraph.cupti import Recorder
    from fer.memory.device import CudaDevice

    CudaDevice(0)
    recorder = Recorder()
    _, ranges = _open()
    from fer.cudagraph import save as saving
    from fer.cudagraph.capture import capture
    from fer.cudagraph.libcuda import open_cuda

    model = _model(small)
    begin = time.perf_counter()
    weights = _place(model, ranges)
    print(f"placed in {time.perf_counter() - begin:.2f} s")
    ranges.scratch.map(6 << 30, chunk=1 << 30)
    ranges.pool.map(12 << 30, chunk=1 << 30)
    made = capture(model, model.batch_sizes, ranges)
    result: dict[str, Any] = {
        "frozen": {"warm_up": made.warm_up_s, "capture": made.capture_s, "instantiate": made.instantiate_s},
        "troubles": made.troubles,
    }
    print(json.dumps(result))
    ranges.scratch.trim()
    ranges.pool.trim()
    print("used", {each.name: each.used >> 20 for each in ranges.all}, "MiB")
    seen = recorder.seen
    print("cubins", len(seen.cubins), "handles", len(seen.by_handle), "troubles", recorder.troubles[:3])
    begin = time.perf_counter()
    saved = saving.save(
        folder / "a.fergraph", open_cuda(), seen, made, model, ranges, weights, {"kv": dict(model.layout())}, "seed 0"
    )
    result["save_s"] = time.perf_counter() - begin
    size = (folder / "a.fergraph").stat().st_size
    from fer.cudagraph import archive

    kept = archive.read(folder / "a.fergraph")
    binaries = sum(len(image.data) for image in kept.tables.images)
    result |= {
        "save": saved.seconds, "kept": len(saved.kept), "refused": saved.refused, "nodes": saved.nodes,
        "archive_bytes": size, "beside_binaries": size - binaries, "images": len(kept.tables.images),
        "functions": len(kept.tables.functions), "contents": len(kept.contents),
        "globals": [(i.trouble, [n for n, _ in i.globals]) for i in kept.tables.images if i.trouble or i.globals],
        "irreproducible": [n for n, g in kept.facts["golden"]["seed 0"].items() if not all(g)],
        "kv": kept.facts["kv"],
    }  # fmt: skip
    print(json.dumps(result)[:3000])
    chains = {}
    for size_ in model.batch_sizes:
        chains[str(size_)] = _chain(model, size_, made.graphs[size_].replay, made.outputs[size_], STEPS)
    result["chains"] = chains
    (folder / "save.json").write_text(json.dumps(result))
    print("chains done")
    recorder.close()
    print("recorder closed")
    import torch

    print(
        torch.linalg.det(torch.eye(8, device="cuda")).item(), torch.cummax(torch.rand(9, device="cuda"), 0)[0].sum() > 0
    )
    return result


def restore(folder: Path, small: bool, moved: bool = False) -> dict[str, Any]:
    import torch

    if moved:
        _disturb()
    _, ranges = _open()
    from fer.cudagraph import archive as archives
    from fer.cudagraph import probe as probing
    from fer.cudagraph import restore as restoring
    from fer.cudagraph import save as saving
    from fer.cudagraph import session
    from fer.cudagraph.libcuda import open_cuda
    from fer.engines.graphs import SHALLOW

    cuda, model = open_cuda(restoring=True), _model(small)
    weights = _place(model, ranges)
    result: dict[str, Any] = {}
    begin = time.perf_counter()
    archive = archives.read(folder / "a.fergraph")
    result["read"] = time.perf_counter() - begin
    wrong = restoring.verify_owners(archive.facts["owners"], [*weights, *saving.tensors(model)])
    begin = time.perf_counter()
    restoring.place(archive, cuda, ranges)
    torch.cuda.synchronize()
    result |= {"place": time.perf_counter() - begin, "owners": list(wrong.values())[:5]}
    graphs: dict[str, Any] = {}
    order = [saving.name_of(size) for size in model.batch_sizes]
    restorer = restoring.Restorer(
        archive, cuda, graphs.__setitem__, order=[n for n in order if n not in archive.facts["refused"]],
        context=cuda.value("current_context"), keep=[ranges],
    )  # fmt: skip
    print("files", json.dumps(result))
    begin = time.perf_counter()
    restorer.run()
    result["restore"] = time.perf_counter() - begin
    progress = restorer.progress
    times = list(progress.ready.values())
    result |= {
        "steps": progress.seconds, "ready": len(times), "first": times[0] if times else None,
        "fourth": times[3] if len(times) > 3 else None, "failed": dict(list(progress.failed.items())[:4]),
    }  # fmt: skip
    print(json.dumps(result)[:3000])
    before = json.loads((folder / "save.json").read_text())
    golden, wrong_probes, chains = archive.facts["golden"]["seed 0"], [], {}
    outputs = {name: restoring.outputs_of(archive, name, "cuda:0", ranges) for name in graphs}
    probing.fill_pattern(cuda, ranges.kv.address, ranges.kv.mapped)
    for number in probing.NUMBERS:  # the deep ones first: they read what the pattern left
        for name, graph in graphs.items():
            found = probing.replay_digest(model, session.size_of(name), number, graph.replay, outputs[name])
            if found != golden[name][probing.NUMBERS.index(number)]:
                wrong_probes.append((name, number))
    result["golden_wrong"] = wrong_probes
    print("both probes of", len(graphs), "graphs compared, wrong:", wrong_probes, flush=True)
    with torch.inference_mode():
        for name, graph in graphs.items() if not moved else ():
            size = int(name.split("/")[1])
            chain = _chain(model, size, graph.replay, outputs[name], STEPS)
            chains[size] = chain == before["chains"][str(size)]
        result["chains_wrong"] = [size for size, ok in chains.items() if not ok]
        print("decoded", len(chains), "batch sizes, wrong:", result["chains_wrong"], flush=True)
        first = next(iter(graphs), None)
        if first is not None and not moved:
            size = int(first.split("/")[1])
            for _ in range(1000):
                graphs[first].replay()
            again = probing.replay_digest(model, size, SHALLOW, graphs[first].replay, outputs[first])
            result["after_1000_replays"] = again == golden[first][1]
            print(
                "after 1000 replays the same:",
                result["after_1000_replays"],
                flush=True,
            )
    if not moved:
        result |= _beside(model, graphs)
    result["owners_after"] = len(restoring.verify_owners(archive.facts["owners"], [*weights, *saving.tensors(model)]))
    return result


def _beside(model: Any, graphs: Any) -> dict[str, Any]:
    """What the engine's own capture costs in this process, and its graphs' pace beside the restored ones'."""
    from fer.cudagraph.capture import capture

    found: dict[str, Any] = {}
    for label, freeze in (("first, default GC", False), ("again, default GC", False), ("again, frozen GC", True)):
        begin = time.perf_counter()
        made = capture(model, model.batch_sizes, None, freeze=freeze, keep=False)
        found[label] = {
            "warm_ups": round(made.warm_up_s, 4),
            "capture": round(made.capture_s, 4),
            "all": round(time.perf_counter() - begin, 4),
        }
    paces: dict[str, Any] = {}
    for size in TIMED:
        pairs = []
        for _ in range(5):  # in turns: the machine's pace changes
            pairs.append((pace(graphs[f"decode/{size}"].replay), pace(made.graphs[size].replay)))
        ratios = sorted(restored / native for restored, native in pairs)
        paces[str(size)] = {"ms": pairs, "restored_over_native": [round(each, 5) for each in ratios]}
    print("captures", json.dumps(found), "paces", json.dumps(paces), flush=True)
    return {"native": found, "paces": paces}


def _disturb() -> None:
    """Another context, other allocations and other modules before anything of FER: the driver's own layout changes."""
    import ctypes

    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    context = ctypes.c_void_p()
    print("extra context:", driver.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
    driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    _disturb.kept = [torch.ones(16 << 20, dtype=torch.uint8, device="cuda") for _ in range(20)]  # type: ignore[attr-defined]
    (torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")).sum().item()


def main() -> int:
    faulthandler.enable()
    arguments = sys.argv[1:]
    small = "--small" in arguments
    arguments = [a for a in arguments if a != "--small"]
    roles = ("save", "restore", "moved")
    if arguments and arguments[0] in roles:
        role, folder = arguments[0], Path(arguments[1])
        begin = time.perf_counter()
        try:
            done = save(folder, small) if role == "save" else restore(folder, small, moved=role == "moved")
        except BaseException:
            traceback.print_exc()
            sys.stdout.flush()
            os._exit(1)
        done["process_s"] = time.perf_counter() - begin
        (folder / f"{role}.json").write_text(json.dumps(done))
        print(role, json.dumps(done, indent=1))
        sys.stdout.flush()
        os._exit(0)
    folder = Path(arguments[0] if arguments else "/tmp/fer-graphs")
    folder.mkdir(parents=True, exist_ok=True)
    codes = [
        subprocess.run(
            [sys.executable, "-m", "bench.graphs_gpu", role, str(folder), *(["--small"] if small else [])],
            check=False,
        ).returncode
        for role in roles
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
