"""Processes of the graph cases: one records, others restore in other circumstances; each prints one JSON row.

python -m tests.support.graph_cases '{"role": "save" | "restore" | "moved" | "prove", "file": FILE, "cases": [...]}'

What is imported, and when, is part of what is tested, so nothing of FER, torch or Triton is imported up here.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

EXTRA = 16 << 20
PROBES = 2
_kept: list[Any] = []


def _import(names: Iterable[str]) -> None:
    for name in names:
        _kept.append(importlib.import_module(name))


def _extra() -> None:
    """Allocations that the other process does not make: whatever the driver places next lies elsewhere."""
    import torch

    _kept.extend(torch.ones(EXTRA, dtype=torch.uint8, device="cuda") for _ in range(4))


def _ranges(asked: Mapping[str, Any]) -> Any:
    from fer.memory.device import CudaDevice
    from fer.memory.ranges import reserve

    device = CudaDevice(0)
    if asked.get("extra"):
        _extra()
    ranges = reserve(device)
    import torch

    torch.cuda.init()
    torch.cuda.set_device(0)
    if asked.get("extra"):
        _extra()
    return ranges


def _placed(model: Any, ranges: Any, before: Callable[[], Any] = lambda: None) -> None:
    """Inputs into ``static`` and the cache into ``kv``, after what ``before`` allocates in ``static``."""
    import torch

    with torch.inference_mode():
        model.prepare()
        ranges.static.map(model.static_bytes)
        ranges.kv.map(model.kv_bytes())
        with ranges.static.place():
            _kept.append(before())
            model.allocate()
        with ranges.kv.place():
            model.allocate_kv()
    torch.cuda.synchronize()


def _outputs(model: Any, size: int, replay: Callable[[], None], outputs: Mapping[str, Any]) -> tuple[list[str], bool]:
    """SHA-256 of what each of three replays puts out, for several inputs, and whether all of it is right."""
    import torch

    found, right = [], True
    with torch.inference_mode():
        for number in range(PROBES):
            for _ in range(3):
                model.fill(size, number)
                torch.cuda.synchronize()
                replay()
                torch.cuda.synchronize()
                out = outputs["out"]
                found.append(hashlib.sha256(out.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest())
                right = right and model.right(size, out)
    return found, right


def _all_outputs(model: Any, graphs: Mapping[int, Any], outputs: Mapping[int, Any]) -> dict[str, Any]:
    from tests.support.graph_cases_model import NAMES

    row: dict[str, Any] = {"outputs": {}, "right": {}}
    for size, graph in graphs.items():
        found, right = _outputs(model, size, graph.replay, outputs[size])
        row["outputs"][NAMES[size]], row["right"][NAMES[size]] = found, right
    return row


def _pace(replay: Callable[[], None]) -> float:
    """Microseconds a replay takes."""
    from bench.graphs_gpu import pace

    return round(1000 * pace(replay, 200), 3)


def _consumers(model: Any, graphs: Mapping[int, Any], outputs: Mapping[int, Any]) -> dict[str, list[bool]]:
    """Another stream waits for the event a graph records; a graph waits for the event another stream records."""
    import torch

    from tests.support.graph_cases_model import NUMBERS, SLEEP

    found: dict[str, list[bool]] = {}
    other = torch.cuda.Stream()
    with torch.inference_mode():
        for name in ("event_record", "event_wait"):
            size = NUMBERS[name]
            if size not in graphs:
                continue
            found[name] = []
            for number in range(4):
                model.fill(size, number)
                late = torch.arange(model.shared.numel(), device="cuda") % (17 + number) + 0.5
                torch.cuda.synchronize()
                if name == "event_record":
                    graphs[size].replay()
                    with torch.cuda.stream(other):
                        other.wait_event(model.recorded)
                        seen = model.shared.clone()
                    torch.cuda.synchronize()
                    found[name].append(torch.equal(seen, model.x))
                else:
                    with torch.cuda.stream(other):
                        torch.cuda._sleep(SLEEP)
                        model.shared.copy_(late)
                        model.given.record()
                    graphs[size].replay()
                    torch.cuda.synchronize()
                    found[name].append(torch.equal(outputs[size]["out"], late * 2))
    return found


def save(asked: Mapping[str, Any]) -> dict[str, Any]:
    from fer.cudagraph.cupti import Recorder
    from fer.memory.device import CudaDevice

    CudaDevice(0)
    recorder = Recorder()
    ranges = _ranges(asked)
    from fer.cudagraph import save as saving
    from fer.cudagraph.capture import capture
    from fer.cudagraph.libcuda import open_cuda
    from tests.support.graph_cases_kernels import edges_of
    from tests.support.graph_cases_model import NAMES, Cases

    model = Cases(asked["cases"])
    _placed(model, ranges)
    ranges.scratch.map(model.scratch_bytes)
    ranges.pool.map(model.pool_bytes)
    made = capture(model, model.batch_sizes, ranges)
    _kept.append((model, ranges, made))  # what a failed capture leaves behind must not be cleared away in the middle
    ranges.scratch.trim()
    ranges.pool.trim()
    facts = {"order": [saving.name_of(size) for size in model.batch_sizes]}
    saved = saving.save(Path(asked["file"]), open_cuda(), recorder.seen, made, model, ranges, [], facts, "fixed")
    recorder.close()
    row = _all_outputs(model, made.graphs, made.outputs)
    row |= {
        "kept": [_case(name) for name in saved.kept],
        "refused": {_case(name): why for name, why in saved.refused.items()},
        "troubles": {NAMES[size]: why for size, why in made.troubles.items()},
        "recorder": recorder.troubles,
        "edges": {NAMES[size]: edges_of(int(graph.raw_cuda_graph())) for size, graph in made.graphs.items()},
        "us": {NAMES[size]: _pace(g.replay) for size, g in made.graphs.items() if "programmatic" in NAMES[size]},
        "consumers": _consumers(model, made.graphs, made.outputs),
        "allocator": _allocator(),
        "addresses": {name: tensor.data_ptr() for name, tensor in model.tensors().items()},
    }
    return row


def restore(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Restore what was kept and capture the rest, and let both put out what they do.

    Asked for: ``scale``, to which this process sets its own copies' variable; ``own``, cases whose steps it runs
    itself before; ``drop``, to lose Triton's kernels and their modules before the graphs are replayed.
    """
    ranges = _ranges(asked)
    import torch

    from fer.cudagraph import archive as archives
    from fer.cudagraph import restore as restoring
    from fer.cudagraph import save as saving
    from fer.cudagraph.libcuda import open_cuda
    from tests.support.graph_cases_model import NAMES, NUMBERS, Cases

    _import(asked.get("after", ()))
    cuda = open_cuda(restoring=True)
    model = Cases(asked["cases"], scale=asked.get("scale", 3.0))
    _placed(model, ranges)
    with torch.inference_mode():
        for name in asked.get("own", ()):
            model.step(NUMBERS[name])
    archive = archives.read(Path(asked["file"]))
    row: dict[str, Any] = {
        "owners": restoring.verify_owners(archive.facts["owners"], saving.tensors(model)),
        "addresses": {name: tensor.data_ptr() for name, tensor in model.tensors().items()},
        "archive_edges": _recorded_edges(archive),
    }
    restoring.place(archive, cuda, ranges)
    torch.cuda.synchronize()
    edges, graphs = _watch(cuda), {}
    refused = archive.facts["refused"]
    order = [saving.name_of(size) for size in model.batch_sizes if saving.name_of(size) not in refused]
    restorer = restoring.Restorer(
        archive, cuda, graphs.__setitem__, order=order, context=cuda.value("current_context"), keep=[ranges]
    )
    restorer.run()
    row["failed"] = {_case(name): why for name, why in restorer.progress.failed.items()}
    row["edges"] = {_case(name): edges.get(graph.executable, []) for name, graph in graphs.items()}
    outputs = {_size(name): restoring.outputs_of(archive, name, "cuda:0", ranges) for name in graphs}
    restored = {_size(name): graph for name, graph in graphs.items()}
    if asked.get("drop"):
        del archive, restorer
        row["dropped"] = _drop_triton()
    row |= _all_outputs(model, restored, outputs)
    row["us"] = {NAMES[size]: _pace(g.replay) for size, g in restored.items() if "programmatic" in NAMES[size]}
    if not asked.get("drop"):
        row["native"] = _native(model, [size for size in model.batch_sizes if size not in restored])
        again = _all_outputs(model, restored, outputs)  # what is captured now must not have written over them
        row["after_native"] = again["outputs"] == row["outputs"]
    return row


def moved(asked: Mapping[str, Any]) -> dict[str, Any]:
    """An engine that allocates more in ``static`` than it did, and does not name one tensor any more."""
    ranges = _ranges(asked)
    import torch

    from fer.cudagraph import archive as archives
    from fer.cudagraph import restore as restoring
    from fer.cudagraph import save as saving
    from tests.support.graph_cases_model import Cases

    model = Cases(asked["cases"], forgotten="looked_up")
    _placed(model, ranges, lambda: torch.zeros(EXTRA, dtype=torch.uint8, device="cuda"))
    facts, _ = archives.facts_of(Path(asked["file"]))
    wrong = restoring.verify_owners(facts["owners"], saving.tensors(model))
    missing = {name: why for name, why in wrong.items() if "missing" in why}
    return {
        "owners": list(wrong.values()),
        "touched": {_case(name): why for name, why in restoring.touched(facts, wrong).items()},
        "without": {_case(name): why for name, why in restoring.touched(facts, missing).items()},
        "native": _native(model, model.batch_sizes),
    }


def prove(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the child says that FER starts before it uses an archive."""
    from fer.cudagraph.proof import Request, run

    answer = run(Request(asked["file"], 0, "fixed", "", ""))
    return {"proven": answer["proven"], "wrong": {_case(name): why for name, why in answer["wrong"].items()}}


def _native(model: Any, sizes: Iterable[int]) -> dict[str, Any]:
    """Captured as a start does it that cannot restore these, in a pool of torch's own."""
    from fer.cudagraph.capture import capture
    from tests.support.graph_cases_model import NAMES

    made = capture(model, list(sizes), None, keep=False)
    row = _all_outputs(model, made.graphs, made.outputs)
    row["troubles"] = {NAMES[size]: why for size, why in made.troubles.items()}
    row["consumers"] = _consumers(model, made.graphs, made.outputs)
    row["allocator"] = _allocator()
    _kept.append(made)
    return row


def _allocator() -> str:
    """What is wrong with torch after captures, some of which failed."""
    import torch

    if torch.cuda.current_stream() != torch.cuda.default_stream():
        return "the stream of a capture is still the current one"
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


def _watch(cuda: Any) -> dict[int, Any]:
    """Every graph's edges as the driver holds them when FER asks it for an executable, by executable."""
    from tests.support.graph_cases_kernels import edges_of

    found, instantiate = {}, cuda.instantiate

    def watched(out: Any, graph: int, flags: int) -> int:
        code = int(instantiate(out, graph, flags))
        found[int(out._obj.value)] = edges_of(graph)
        return code

    cuda.instantiate = watched
    return found


def _recorded_edges(archive: Any) -> dict[str, Any]:
    """Edges in an archive, as :func:`edges_of` tells them."""
    found = {}
    for graph in archive.tables.top():
        rows = []
        for edge in graph.edges.tolist():
            source, target, data = edge
            rows.append((source, target, data >> 16 & 255, data & 255))
        found[_case(graph.name)] = sorted(rows)
    return found


def _drop_triton() -> dict[str, bool]:
    """Lose every reference to Triton's kernels in this process and unload their modules, as later Tritons do."""
    import torch

    from bench import graphs_model
    from fer.memory import driver
    from tests.support import graph_cases_kernels as kernels

    functions = [graphs_model.rms_norm, kernels.chained, kernels.tiles, kernels.tuned.fn]
    loaded = [each for f in functions for caches in f.device_caches.values() for each in caches[0].values()]
    for function in functions:
        function.device_caches.clear()
    modules = [each.module for each in loaded if each.module is not None]
    references = [weakref.ref(each) for each in loaded]
    torch.cuda.synchronize()
    loaded.clear()
    gc.collect()
    for module in modules:
        driver.call("cuModuleUnload", module)
    torch.cuda.synchronize()
    return {"loaded": len(modules) >= len(functions), "gone": all(each() is None for each in references)}


def _size(name: str) -> int:
    return int(name.rpartition("/")[2])


def _case(name: str) -> str:
    from tests.support.graph_cases_model import NAMES

    return NAMES[_size(name)]


def main() -> None:
    asked = json.loads(sys.argv[1])
    _import(asked.get("before", ()))
    try:
        row = {"save": save, "restore": restore, "moved": moved, "prove": prove}[asked["role"]](asked)
    except BaseException:  # a CUDA context that is lost would hang in the interpreter's end
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
