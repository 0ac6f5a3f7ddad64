"""From tables to a driver's graph, and back to see that it became the same one.

Each call takes addresses computed for all nodes at once; nothing is made for a node but the node.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_uint64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fer.cudagraph.libcuda import (
    BUFFER_POINTER,
    BUFFER_SIZE,
    INSTANTIATE_FLAGS,
    KERNEL_PARAMS,
    Cuda,
    address,
)
from fer.cudagraph.records import (
    ATTRIBUTE,
    ATTRIBUTE_IDS,
    CHILD,
    EMPTY,
    KERNEL,
    MEMCPY,
    MEMSET,
    VIA_BUFFER,
    Array,
    Graph,
    Tables,
    attributes_of,
)
from fer.cudagraph.walk import Built, Given, walk
from fer.errors import FerBug, GraphRefused


@dataclass
class Builder:
    """Builds graphs of one set of tables.

    Attributes:
        functions: driver handle of each function by its index in the tables; 0 where it is not loaded.
        context: the ``CUcontext`` memsets and copies run in.
    """

    cuda: Cuda
    tables: Tables
    functions: Sequence[int]
    context: int
    _names: dict[int, int] = field(default_factory=dict)
    _defaults: dict[int, dict[int, tuple[int, bytes]]] = field(default_factory=dict)
    _given: dict[int, Given] = field(default_factory=dict)
    _layouts: tuple[Array, Array, Array] | None = None
    _differing: dict[tuple[int, int], tuple[tuple[int, Any], ...]] = field(default_factory=dict)

    def build(self, graph: Graph) -> tuple[int, Array]:
        """A new ``CUgraph`` and its nodes' handles, in the order of the table.

        Raises:
            DriverError: the driver refused a node; nothing is left behind.
            GraphRefused: a node of a kind that cannot be built.
        """
        handle = _created(self.cuda)
        try:
            nodes = self._add_nodes(handle, graph)
            self._add_edges(handle, graph, nodes)
        except BaseException:
            self.cuda.graph_destroy(handle)
            raise
        return handle, nodes

    def read_back(self, handle: int, nodes: Array, graph: Graph) -> str:
        """The digest of what the driver holds now, to be compared with that of the tables. Raises DriverError."""
        if len(self._names) != len(self.functions) - list(self.functions).count(0):
            self._names = {int(value): index for index, value in enumerate(self.functions) if value}

        def known(func: int, kern: int) -> int:
            if func not in self._names and kern:
                func = self.cuda.value("kernel_function", kern, first=True)
            return self._names.get(func, -1)

        seen = self.tables.again()
        built = Built(nodes, graph.nodes["kind"], self._given)
        place = walk(self.cuda, handle, graph.name, seen, known, built=built)
        return seen.digest(seen.graphs[place])

    def make(self, graph: Graph) -> int:
        """Build, read back and compare, instantiate: an executable graph. The graph itself is given back.

        Raises:
            DriverError: the driver refused it.
            GraphRefused: what the driver holds is not what was recorded.
        """
        handle, nodes = self.build(graph)
        try:
            if self.read_back(handle, nodes, graph) != self.tables.digest(graph):
                raise GraphRefused(
                    f"graph {graph.name} did not become what was recorded", why="read-back differs", graph=graph.name
                )
            return instantiate(self.cuda, handle)
        finally:
            self.cuda.graph_destroy(handle)

    # -- nodes

    def _add_nodes(self, handle: int, graph: Graph) -> Array:
        kinds = graph.nodes["kind"]
        params = np.ascontiguousarray(graph.params)
        kernels = np.flatnonzero(kinds == KERNEL)
        launches, keep = self._launches(graph, kernels, params)
        base, step = address(launches), KERNEL_PARAMS.itemsize
        nodes = np.zeros(len(kinds), "<u8")
        place, size = address(nodes), nodes.itemsize
        add = self.cuda.add_kernel
        for number, index in enumerate(kernels.tolist()):
            code = add(place + index * size, handle, None, 0, base + number * step)
            if code:
                self._explain(code, graph, index)
        others = np.flatnonzero(kinds != KERNEL)
        blocks = graph.starts[others] + (address(params) if len(params) else 0)
        for index, block in zip(others.tolist(), blocks.tolist(), strict=True):
            self._add_other(handle, graph, index, place + index * size, block)
        del keep, launches  # the driver has copied everything
        self._set_attributes(graph, kernels, nodes)
        return nodes

    def _launches(self, graph: Graph, kernels: Array, params: Array) -> tuple[Array, list[Any]]:
        """The driver's parameter structures of all kernels, and what they point to."""
        rows = graph.nodes[kernels]
        launches = np.zeros(len(rows), KERNEL_PARAMS)
        handles = np.array(self.functions, "<u8") if len(self.functions) else np.zeros(1, "<u8")
        launches["func"] = handles[rows["function"]]
        if len(rows) and not launches["func"].all():
            missing = int(rows["function"][np.flatnonzero(launches["func"] == 0)[0]])
            raise GraphRefused(
                f"graph {graph.name} launches {self.tables.functions[missing].name}",
                why="its binary could not be loaded",
                graph=graph.name,
            )
        for name in ("grid", "block", "shared"):
            launches[name] = rows[name]
        blocks = (address(params) + graph.starts[kernels]).astype("<u8")
        buffered = rows["via"] == VIA_BUFFER
        pointers = self._pointers(rows, blocks, ~buffered, launches)
        extra = np.zeros((len(rows), 6), "<u8")
        extra[:, 0], extra[:, 1], extra[:, 2] = BUFFER_POINTER, blocks, BUFFER_SIZE
        extra[:, 5] = rows["size"]  # the size lies behind the list's end, and the list points to it
        places = (address(extra) + np.arange(len(rows), dtype=np.int64) * extra.strides[0]).astype("<u8")
        extra[:, 3] = places + 5 * 8
        launches["extra"][buffered] = places[buffered]
        return launches, [pointers, extra, params]

    def _pointers(self, rows: Array, blocks: Array, chosen: Array, launches: Array) -> Array:
        """One array with each kernel's pointers to its parameters; fills ``launches["pointers"]``."""
        if self._layouts is None:
            counts = np.array([len(function.layout) for function in self.tables.functions] or [0])
            flat = np.array([o for f in self.tables.functions for o, _ in f.layout] or [0], dtype=np.int64)
            self._layouts = counts, flat, np.cumsum(counts) - counts
        counts, flat, begin = self._layouts
        wanted = np.where(chosen, counts[rows["function"]], 0)
        ends = np.cumsum(wanted)
        total = int(ends[-1]) if len(ends) else 0
        inner = np.arange(total) - np.repeat(ends - wanted, wanted)
        offsets = flat[np.repeat(begin[rows["function"]], wanted) + inner]
        pointers: Array = (np.repeat(blocks.astype(np.int64), wanted) + offsets).astype("<u8")
        if total == 0:
            pointers = np.zeros(1, "<u8")
        launches["pointers"][chosen] = (address(pointers) + (ends - wanted) * 8).astype("<u8")[chosen]
        return pointers

    def _add_other(self, handle: int, graph: Graph, index: int, place: int, block: int) -> None:
        kind = int(graph.nodes["kind"][index])
        if kind == MEMSET:
            self.cuda.call("add_memset", place, handle, None, 0, block, self.context)
        elif kind == MEMCPY:
            self.cuda.call("add_memcpy", place, handle, None, 0, block, self.context)
        elif kind == EMPTY:
            self.cuda.call("add_empty", place, handle, None, 0)
        elif kind == CHILD:
            inner, _ = self.build(self.tables.graphs[int(graph.nodes["child"][index])])
            try:
                self.cuda.call("add_child", place, handle, None, 0, inner)  # the node gets a copy
            finally:
                self.cuda.graph_destroy(inner)
        else:
            raise GraphRefused(f"graph {graph.name} cannot be built", why=f"node kind {kind}", graph=graph.name)

    # -- attributes

    def _set_attributes(self, graph: Graph, kernels: Array, nodes: Array) -> None:
        """Set what differs from a plain node of the same function: most nodes need nothing."""
        functions = graph.nodes["function"][kernels].tolist()
        sets = graph.nodes["attributes"][kernels].tolist()
        write = self.cuda.set_kernel_attribute
        for index, function, chosen in zip(kernels.tolist(), functions, sets, strict=True):
            key = (function, chosen)
            todo = self._differing.get(key)
            if todo is None:
                todo = self._differing[key] = self._compare(int(nodes[index]), function, chosen)
            for number, value in todo:
                code = write(int(nodes[index]), number, value)
                if code:
                    self.cuda.check("set_kernel_attribute", code)

    def _compare(self, node: int, function: int, chosen: int) -> tuple[tuple[int, Any], ...]:
        if function not in self._defaults:
            fresh: dict[int, tuple[int, bytes]] = {}
            for number in ATTRIBUTE_IDS:
                union = ctypes.create_string_buffer(64)
                fresh[number] = (self.cuda.kernel_attribute(node, number, union), union.raw)
            self._defaults[function] = fresh
        todo = []
        recorded = attributes_of(self.tables.attributes[chosen]) if chosen >= 0 else {}
        for number, (status, value) in recorded.items():
            if status == 0 and self._defaults[function][number] != (0, value):
                todo.append((number, ctypes.create_string_buffer(value, 64)))
        self._note(function, [number for number, _ in todo])
        return tuple(todo)

    def _note(self, function: int, numbers: Sequence[int]) -> None:
        """Remember which launch attributes nodes of a function are given: the read-back asks for those."""
        known = self._given.get(function)
        if known is None:
            rows = np.zeros(len(ATTRIBUTE_IDS), ATTRIBUTE)
            for row, number in enumerate(ATTRIBUTE_IDS):
                status, value = self._defaults[function][number]
                rows[row] = (status, np.void(value if status == 0 else bytes(64)))
            known = Given((), rows.tobytes())
        wanted = {number for _, number in known.rows} | set(numbers)
        rows_of = tuple((row, number) for row, number in enumerate(ATTRIBUTE_IDS) if number in wanted)
        self._given[function] = Given(rows_of, known.plain)

    # -- edges

    def _add_edges(self, handle: int, graph: Graph, nodes: Array) -> None:
        """Add edges, those of one kind at a time.

        Drivers 580 to 610 give all edges of one call the first one's data; calls with one kind cannot go wrong.
        """
        edges = graph.edges
        for data in np.unique(edges["data"]):
            chosen = edges[edges["data"] == data]
            ends = np.ascontiguousarray(np.stack([nodes[chosen["source"]], nodes[chosen["target"]]]))
            kinds = np.ascontiguousarray(chosen["data"])
            self.cuda.call("add_dependencies", handle, address(ends[0]), address(ends[1]), address(kinds), len(chosen))

    def _explain(self, code: int, graph: Graph, index: int) -> None:
        row = graph.nodes[index]
        function = self.tables.functions[int(row["function"])]
        try:
            self.cuda.check("add_kernel", code)
        except Exception as error:
            raise GraphRefused(
                f"graph {graph.name}: the driver refused node {index}, {function.name}",
                why=str(error),
                graph=graph.name,
            ) from error
        raise FerBug("a failed call had no code")


def _created(cuda: Cuda) -> int:
    out = c_uint64()
    cuda.call("graph_create", byref(out), 0)
    return out.value


def instantiate(cuda: Cuda, handle: int) -> int:
    """An executable graph, with the flags torch uses. Raises DriverError."""
    out = c_uint64()
    cuda.call("instantiate", byref(out), handle, INSTANTIATE_FLAGS)
    return out.value
