"""From captured graphs to an archive: walk, audit, module globals, contents, output digests."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fer.cudagraph import archive as archives
from fer.cudagraph.archive import Archive, Content
from fer.cudagraph.audit import Owner, Owners, Refusal, audit_nodes, audit_pointers, module_refusals, stray, summarize
from fer.cudagraph.capture import Captured, blocks_of
from fer.cudagraph.probe import NUMBERS, PATTERN, Native, alias, fill_pattern, probe_name, sample_name
from fer.cudagraph.record import Functions, oracle
from fer.cudagraph.records import Graph, Tables
from fer.cudagraph.walk import walk
from fer.engines.graphs import DEEP, SHALLOW
from fer.errors import FerError

if TYPE_CHECKING:
    import torch

    from fer.cudagraph.cupti import Seen
    from fer.cudagraph.libcuda import Cuda
    from fer.engines.graphs import DecodeGraphs
    from fer.memory.ranges import Ranges

SMALL: Final = 1 << 20
"""Bytes up to which a scratch buffer's contents are kept; larger ones (matrix products' workspaces) begin as zeros."""

INPUT: Final = 1 << 18
"""Bytes of an input up to which it is kept with the probes."""


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
    saving = _Saving(path, cuda, seen, captured, graphs, ranges, weights)
    saved = saving.saved
    try:
        saving.read()
        with _timed(saved, "digests"):
            golden, probes = saving.native.digests(), saving.native.contents()
            spreads, samples = saving.native.samples()
    finally:
        saving.empty_cache()  # whatever happened: the engine serves from it in a moment
    saving.judge()
    kept = [graph for graph in saving.tables.top() if graph.name not in saved.refused]
    saved.kept, saved.nodes = [graph.name for graph in kept], sum(len(graph.nodes) for graph in kept)
    whole = {
        **facts,
        **saving.facts(),
        "golden": {checkpoint: {name: golden[name] for name in saved.kept}},
        "unlike": {name: spread for name, spread in spreads.items() if name in saved.kept},
    }
    with _timed(saved, "write"):
        of = [(name, number) for name in saved.kept for number in NUMBERS]
        names = tuple(name_(*each) for each in of for name_ in (probe_name, sample_name))
        useful = [each for each in (*probes, *samples) if each.name.startswith(names)]
        archives.write(path, Archive(only(saving.tables, kept), whole, [*saving.contents, *useful]))
    return saved


class _Saving:
    """One save under way.

    Attributes:
        owned: all memory that a later process has at the same address, but for the pool.
        contents: scratch buffers as they were before the first probe.
        slab: bytes of the slab that can stand for the cache, 0 where there are no deep probes.
        used: the owners that each graph uses, by name.
    """

    def __init__(
        self,
        path: Path,
        cuda: Cuda,
        seen: Seen,
        captured: Captured,
        graphs: DecodeGraphs,
        ranges: Ranges,
        weights: Sequence[Owner],
    ) -> None:
        self.cuda, self.captured, self.graphs, self.ranges = cuda, captured, graphs, ranges
        self.saved, self.tables = Saved(path), Tables()
        self.functions = Functions(cuda, self.tables, seen)
        scratch = blocks_of(ranges.scratch.pool.id, "scratch")
        self.owned = [*weights, *tensors(graphs), *scratch]
        self.owners = Owners([*self.owned, Owner("pool", ranges.pool.address, ranges.pool.used)])
        self.ask = oracle(cuda)
        self.contents = [_content(cuda, owner) for owner in scratch if owner.size <= SMALL]
        self.slab = _slab(graphs, ranges)
        self.native = _probes(captured, graphs, ranges, deep=bool(self.slab))
        self.audited: dict[str, list[Refusal]] = {}
        self.used: dict[str, set[str]] = {}

    def read(self) -> None:
        """Walk and audit every graph; meanwhile the GPU replays those that it may."""
        native = self.native
        if self.slab:
            fill_pattern(self.cuda, self.ranges.kv.address, self.ranges.kv.mapped)
        for size in self.graphs.batch_sizes:
            name = name_of(size)
            with _timed(self.saved, "walk"):
                graph = self._walk(size)
            if graph is not None:
                self.audited[name] = audit_nodes(self.tables, graph)
                if not self.audited[name]:
                    native.launch(name, native.numbers[0], times=2)
        unlike = native.unlike(native.numbers[0])  # of those it must be known what the other probe is worth
        for name, refusals in self.audited.items():
            for number in () if refusals else native.numbers[1:]:
                native.launch(name, number, times=2 if name in unlike else 1)
            with _timed(self.saved, "audit"):
                found = audit_pointers(self.tables, self._top(name), self.owners, self.ask, span=self.ranges.span)
                refusals += found[0]
                self.used[name] = found[1]

    def empty_cache(self) -> None:
        """Leave the cache as it was: a fresh one is zeros."""
        if self.slab:
            self.cuda.call("synchronize")  # probes may be under way, in streams that the filling would not wait for
            self.cuda.call("fill", self.ranges.kv.address, 0, self.ranges.kv.mapped)
            self.cuda.call("synchronize")

    def judge(self) -> None:
        """Which graphs are refused, now that the GPU has nothing to do and the modules' variables can be read."""
        with _timed(self.saved, "globals"):
            self.functions.read_globals(self.owners, self.ask)
            self._follow_pointers()
            strays = self._strays()
        refused = self.saved.refused
        for graph in self.tables.top():
            refusals = [*self.audited[graph.name], *module_refusals(self.tables, graph)]
            held = sorted(self.used.get(graph.name, set()) & strays.keys())
            refusals += [Refusal(graph.name, f"{name} holds an address of {strays[name]}") for name in held]
            if refusals:
                refused[graph.name] = summarize(refusals)
        refused |= dict.fromkeys(self.native.random - set(refused), "uses random-number state")

    def _follow_pointers(self) -> None:
        """Add to what each graph uses what it reaches by way of buffers and of its modules' variables."""
        beyond = {each.name: self._touched(each.data) for each in self.contents}
        for name, names in self.used.items():
            functions = self.tables.functions_of(self._top(name))
            for image in {self.tables.functions[index].image for index in functions} - {-1}:
                for _, value in self.tables.images[image].globals:
                    names |= self._touched(value)
            fresh = names
            while fresh:
                fresh = {further for name in fresh for further in beyond.get(name, ())} - names
                names |= fresh

    def _strays(self) -> dict[str, str]:
        """Small buffers whose contents point out of the arena, and to what."""
        found = {each.name: stray(each.data, self.owners, self.ask, span=self.ranges.span) for each in self.contents}
        return {name: f"{kind} outside the arena" for name, kind in found.items() if kind}

    def _touched(self, data: bytes) -> set[str]:
        return self.owners.touched(np.frombuffer(data[: len(data) // 8 * 8], "<u8"))

    def _top(self, name: str) -> Graph:
        return next(graph for graph in self.tables.top() if graph.name == name)

    def facts(self) -> dict[str, Any]:
        """What a later process has to know, beside what the caller knows."""
        ranges, graphs, saved = self.ranges, self.graphs, self.saved
        slab = self.slab or 2 * graphs.largest_kv_bytes() + PATTERN
        places = {owner.name: number for number, owner in enumerate(self.owned)}
        return {
            "kv": {"bytes": ranges.kv.mapped, "slab": slab, "deep": bool(self.slab)},
            "ranges": {
                each.name: {"address": each.address, "used": each.used, "mapped": each.mapped} for each in ranges.all
            },
            "owners": [(owner.name, owner.address, owner.size) for owner in self.owned],
            "uses": {
                name: sorted({places[each] for each in found if each in places}) for name, found in self.used.items()
            },
            "refused": saved.refused,
            "weights": layout_digest(graphs.weights()),
            "outputs": {name_of(size): describe(outputs) for size, outputs in self.captured.outputs.items()},
            "digests": {g.name: self.tables.digest(g) for g in self.tables.top() if g.name in saved.kept},
            "created": time.time(),
        }

    def _walk(self, size: int) -> Graph | None:
        """The graph of a batch size in the tables; None where it cannot be read, or was not captured."""
        name, tables, captured = name_of(size), self.tables, self.captured
        before = len(tables.graphs)
        if size not in captured.graphs:
            self.saved.refused[name] = captured.troubles.get(size, "was not captured")
            return None
        try:
            handle = int(captured.graphs[size].raw_cuda_graph())
            return tables.graphs[walk(self.cuda, handle, name, tables, self.functions)]
        except FerError as error:
            del tables.graphs[before:]
            self.saved.refused[name] = str(error)
            return None


def tensors(graphs: DecodeGraphs) -> list[Owner]:
    """The engine's named tensors as owners."""
    return [
        Owner(f"tensor/{name}", tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for name, tensor in graphs.tensors().items()
    ]


def layout_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over where tensors lie and what they look like, none of it their values."""
    rows = sorted(
        (name, each.data_ptr(), str(each.dtype), tuple(each.shape), each.stride()) for name, each in tensors.items()
    )
    return hashlib.sha256(repr(rows).encode()).hexdigest()


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


def _content(cuda: Cuda, owner: Owner) -> Content:
    data = ctypes.create_string_buffer(owner.size)
    cuda.call("to_host", ctypes.addressof(data), owner.address, owner.size)
    return Content(owner.name, owner.address, data.raw)


def _slab(graphs: DecodeGraphs, ranges: Ranges) -> int:
    """Bytes of the slab that can stand for the cache; 0 where there are no deep probes."""
    if not graphs.deep:
        return 0
    found, kv = graphs.tensors(), ranges.kv
    layers = []
    for names in graphs.cache_layers():
        storages = [found[name].untyped_storage() for name in names]
        spans = [(each.data_ptr() - kv.address, each.nbytes()) for each in storages]
        if any(offset < 0 or offset + size > kv.mapped for offset, size in spans):
            return 0  # a cache outside the range could not be filled, nor emptied
        layers.append(spans)
    return alias(layers, PATTERN)


def _probes(captured: Captured, graphs: DecodeGraphs, ranges: Ranges, *, deep: bool) -> Native:
    kv = ranges.kv
    inputs = {
        name: tensor
        for name, tensor in graphs.tensors().items()
        if _is_small_input(tensor) and not kv.address <= tensor.data_ptr() < kv.address + kv.mapped
    }
    replays = {name_of(size): (size, graph.replay, captured.outputs[size]) for size, graph in captured.graphs.items()}
    return Native(graphs, replays, inputs, (DEEP, SHALLOW) if deep else (SHALLOW,))


def _is_small_input(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and 0 < tensor.nbytes <= INPUT


class _timed:
    def __init__(self, saved: Saved, name: str) -> None:
        self._saved, self._name = saved, name

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = self._saved.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + time.perf_counter() - self._begin


__all__ = ["Refusal", "Saved", "describe", "layout_digest", "name_of", "only", "save", "tensors"]
