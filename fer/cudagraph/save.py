"""From captured graphs to an archive: walk, audit, module globals, contents, output digests."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fer.cudagraph import archive as archives
from fer.cudagraph.archive import Archive, Content
from fer.cudagraph.audit import Owner, Owners, Refusal, audit, summarize
from fer.cudagraph.capture import Captured, blocks_of
from fer.cudagraph.record import Functions, oracle
from fer.cudagraph.records import Graph, Tables
from fer.cudagraph.walk import walk
from fer.errors import FerError

if TYPE_CHECKING:
    import torch

    from fer.cudagraph.cupti import Seen
    from fer.cudagraph.libcuda import Cuda
    from fer.engines.graphs import DecodeGraphs
    from fer.memory.ranges import Ranges

PROBES: Final = 2
"""Replays, each with inputs of its own, whose outputs are digested; a workspace nobody resets shows at the second."""

SMALL: Final = 1 << 20
"""Bytes up to which a scratch buffer's contents are kept; larger ones (matrix products' workspaces) begin as zeros."""


@dataclass
class Saved:
    """What became of each graph."""

    path: Path
    kept: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: int = 0


def name_of(size: int) -> str:
    """The name of the graph of one batch size."""
    return f"decode/{size}"


def save(
    path: Path,
    cuda: Cuda,
    seen: Seen,
    captured: Captured,
    graphs: DecodeGraphs,
    ranges: Ranges,
    weights: Sequence[Owner],
    facts: Mapping[str, Any],
    checkpoint: str,
) -> Saved:
    """Write the archive of what was captured.

    Args:
        weights: where the weights lie.
        facts: what the archive's use depends on, stored as it is.
        checkpoint: names the weights' content, for the output digests.

    Raises:
        ArchiveError: it cannot be written.
        DriverError: the driver could not be read.
    """
    saved = Saved(path)
    tables = Tables()
    functions = Functions(cuda, tables, seen)
    scratch = blocks_of(ranges.scratch.pool.id, "scratch")
    named = tensors(graphs)
    owners = Owners([*weights, *named, *scratch, Owner("pool", ranges.pool.address, ranges.pool.used)])
    ask = oracle(cuda)
    with _timed(saved, "walk"):
        for size in graphs.batch_sizes:
            if size in captured.graphs:
                _walk(cuda, captured.graphs[size], name_of(size), tables, functions, saved)
            else:
                saved.refused[name_of(size)] = captured.troubles.get(size, "was not captured")
    with _timed(saved, "globals"):
        functions.read_globals(owners, ask)
    with _timed(saved, "audit"):
        for graph in tables.top():
            refusals = audit(tables, graph, owners, ask, span=ranges.span)
            if refusals:
                saved.refused[graph.name] = summarize(refusals)
    with _timed(saved, "contents"):
        contents = [_content(cuda, owner) for owner in scratch if owner.size <= SMALL]
    with _timed(saved, "digests"):
        kv = ranges.kv
        inputs = {
            name: tensor
            for name, tensor in graphs.tensors().items()
            if _is_small_input(tensor) and not kv.address <= tensor.data_ptr() < kv.address + kv.mapped
        }
        golden, probes = _golden(captured, graphs, inputs, saved)
    kept = [graph for graph in tables.top() if graph.name not in saved.refused]
    saved.kept, saved.nodes = [graph.name for graph in kept], sum(len(graph.nodes) for graph in kept)
    whole = {
        **facts,
        "ranges": {
            each.name: {"address": each.address, "used": each.used, "mapped": each.mapped} for each in ranges.all
        },
        "owners": [(owner.name, owner.address, owner.size) for owner in (*weights, *named, *scratch)],
        "refused": saved.refused,
        "outputs": {name_of(size): describe(outputs) for size, outputs in captured.outputs.items()},
        "golden": {checkpoint: golden},
        "digests": {graph.name: tables.digest(graph) for graph in kept},
        "created": time.time(),
    }
    with _timed(saved, "write"):
        names = tuple(f"probe/{name}/" for name in saved.kept)
        useful = [each for each in probes if each.name.startswith(names)]
        archives.write(path, Archive(only(tables, kept), whole, [*contents, *useful]))
    return saved


def tensors(graphs: DecodeGraphs) -> list[Owner]:
    """The engine's named tensors as owners."""
    return [
        Owner(f"tensor/{name}", tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for name, tensor in graphs.tensors().items()
    ]


def describe(outputs: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Where each output lies and what it looks like, as plain data."""
    return {
        name: {
            "address": tensor.data_ptr(),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }
        for name, tensor in outputs.items()
    }


def digests(
    graphs: DecodeGraphs,
    size: int,
    replay: Callable[[], None],
    outputs: Mapping[str, torch.Tensor],
    filled: Callable[[int], None] = lambda number: None,
) -> list[str]:
    """SHA-256 over sums of all outputs after each of :data:`PROBES` replays with fixed inputs.

    Args:
        filled: called with the number of the probe once its inputs are in place.
    """
    import torch

    found = []
    for number in range(PROBES):
        graphs.fill(size, number)
        filled(number)
        replay()
        found.append(digest_of(outputs))
    values = torch.stack(found).cpu()  # one wait for all of them
    return [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in values]


def digest_of(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """128 bits of every output, in order of name, still on the device."""
    import torch

    return torch.stack([_device_digest(outputs[name]) for name in sorted(outputs)])


def probe_name(graph: str, number: int) -> str:
    """Beginning of the names of the inputs of one probe."""
    return f"probe/{graph}/{number}/"


def _device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """128 bits that change with any bit of a tensor: two sums modulo 2**64, each byte weighted by its place."""
    import torch

    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    half = plain.view(torch.int16) if plain.numel() % 2 == 0 else plain
    words = half.to(torch.int64) + 0x10001
    place = torch.arange(1, words.numel() + 1, device=tensor.device, dtype=torch.int64) * 2 + 1
    mixed = words * (place * 0x5851F42D4C957F2D)
    other = words * (place * place * 0x14057B7EF767814F + 0x2545F4914F6CDD1D)
    return torch.stack([mixed.sum(), (other ^ (other >> 29)).sum()])


def only(tables: Tables, kept: Sequence[Graph]) -> Tables:
    """Tables of these graphs alone, without the functions and binaries that no graph needs any more."""
    chosen = [index for index, graph in enumerate(tables.graphs) if _root(tables, graph) in {g.name for g in kept}]
    used = sorted({f for graph in kept for f in tables.functions_of(graph)})
    images = sorted({tables.functions[f].image for f in used if tables.functions[f].image >= 0})
    new_graph = {old: new for new, old in enumerate(chosen)}
    new_function = {old: new for new, old in enumerate(used)} | {-1: -1}
    new_image = {old: new for new, old in enumerate(images)} | {-1: -1}
    fresh = Tables(attributes=list(tables.attributes), images=[tables.images[i] for i in images])
    for old in used:
        each = tables.functions[old]
        fresh.functions.append(type(each)(each.name, new_image[each.image], each.layout, each.attributes))
    for old in chosen:
        graph = tables.graphs[old]
        nodes = graph.nodes.copy()
        nodes["function"] = [new_function[int(i)] for i in nodes["function"]]
        nodes["child"] = [new_graph.get(int(i), -1) for i in nodes["child"]]
        fresh.graphs.append(Graph(graph.name, nodes, graph.edges, graph.params, new_graph.get(graph.parent, -1)))
    return fresh


def _root(tables: Tables, graph: Graph) -> str:
    while graph.parent >= 0:
        graph = tables.graphs[graph.parent]
    return graph.name


def _walk(cuda: Cuda, graph: Any, name: str, tables: Tables, functions: Functions, saved: Saved) -> None:
    before = len(tables.graphs)
    try:
        walk(cuda, int(graph.raw_cuda_graph()), name, tables, functions)
    except FerError as error:
        del tables.graphs[before:]
        saved.refused[name] = str(error)


def _content(cuda: Cuda, owner: Owner) -> Content:
    data = ctypes.create_string_buffer(owner.size)
    cuda.call("to_host", ctypes.addressof(data), owner.address, owner.size)
    return Content(owner.name, owner.address, data.raw)


def _golden(
    captured: Captured, graphs: DecodeGraphs, small: Mapping[str, torch.Tensor], saved: Saved
) -> tuple[dict[str, list[str]], list[Content]]:
    """Digests of each graph's outputs, ``[]`` where two native runs differ, and the inputs that led to them.

    Refuses graphs that draw random numbers: torch moves the generator on at each replay of its own graphs.
    """
    import torch

    golden: dict[str, list[str]] = {}
    inputs: list[tuple[str, int, torch.Tensor]] = []
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with torch.inference_mode():
        for size, graph in captured.graphs.items():
            name = name_of(size)
            if name in saved.refused:
                continue

            def keep(number: int, name: str = name) -> None:
                for label, tensor in small.items():
                    plain = tensor.contiguous().reshape(-1).view(torch.uint8)
                    inputs.append((probe_name(name, number) + label, tensor.data_ptr(), plain.clone()))

            offset = generator.get_offset()
            first = digests(graphs, size, graph.replay, captured.outputs[size], keep)
            second = digests(graphs, size, graph.replay, captured.outputs[size])
            if generator.get_offset() != offset:
                saved.refused[name] = "uses random-number state"
                continue
            golden[name] = first if first == second else []
    sizes = [len(data) for _, _, data in inputs]
    whole = torch.cat([data for _, _, data in inputs]).cpu().numpy().tobytes() if inputs else b""
    contents, at = [], 0
    for (label, address, _), length in zip(inputs, sizes, strict=True):
        contents.append(Content(label, address, whole[at : at + length]))
        at += length
    return golden, contents


def _is_small_input(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and 0 < tensor.nbytes <= SMALL // 4


class _timed:
    def __init__(self, saved: Saved, name: str) -> None:
        self._saved, self._name = saved, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._saved.seconds[self._name] = time.perf_counter() - self._begin


__all__ = ["Refusal", "Saved", "describe", "digests", "name_of", "only", "save", "tensors"]
