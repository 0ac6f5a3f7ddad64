"""A pretended driver behind real ctypes callbacks: graphs, functions, libraries and memory in Python's memory.

The structures that the code under test fills and reads are the real ones; only what is behind them is pretended.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from fer.cudagraph.libcuda import KERNEL_PARAMS, PROTOTYPES, Cuda
from fer.cudagraph.records import ATTRIBUTE_IDS, FUNCTION_ATTRIBUTES

BAD = 1
HANDLE = 400
ELF_HEAD = 64


@dataclass
class FakeFunction:
    name: str
    layout: list[tuple[int, int]]
    attributes: list[int] = field(default_factory=lambda: [7] * FUNCTION_ATTRIBUTES)
    library: int = 0
    module: int = 0


@dataclass
class FakeNode:
    kind: int
    raw: bytes = b""  # KERNEL_PARAMS, memset or memcpy structure
    attributes: dict[int, bytes] = field(default_factory=dict)
    child: int = 0
    keep: list[Any] = field(default_factory=list)


@dataclass
class FakeGraph:
    nodes: list[int] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)


def cubin(*names: str, variables: dict[str, bytes] | None = None, salt: bytes = b"") -> bytes:
    """A small ELF file with these kernels and variables, as far as FER looks into one."""
    variables = variables or {}
    strings, shstr = b"\0", b"\0"
    symbols = bytes(24)
    init = b""
    sections: list[tuple[str, int, bytes, int, int]] = [("", 0, b"", 0, 0)]
    sections += [(f".text.{name}", 1, b"code" + salt, 0, 0) for name in names]
    place = len(sections)
    for name, value in variables.items():
        symbols += struct.pack("<IBBHQQ", len(strings), 1 << 4 | 1, 0, place, len(init), len(value))
        strings += name.encode() + b"\0"
        init += value
    sections += [
        (".nv.global.init", 1, init, 0, 0),
        (".symtab", 2, symbols, place + 2, 24),
        (".strtab", 3, strings, 0, 0),
    ]
    body, rows, at = b"", b"", ELF_HEAD
    for name, kind, data, link, entry in sections:
        rows += struct.pack("<IIQQQQIIQQ", len(shstr), kind, 0, 0, at, len(data), link, 0, 8, entry)
        shstr += name.encode() + b"\0"
        body += data
        at += len(data)
    rows += struct.pack("<IIQQQQIIQQ", len(shstr), 3, 0, 0, at, len(shstr) + 10, 0, 0, 1, 0)
    shstr += b".shstrtab\0"
    body += shstr
    header = (
        b"\x7fELF"
        + bytes(28)
        + struct.pack("<QQIHHHHHH", 0, ELF_HEAD + len(body), 0, 64, 0, 0, 64, len(sections) + 1, len(sections))
    )
    return header.ljust(ELF_HEAD, b"\0")[:ELF_HEAD] + body + rows


class FakeDriver:
    """The state, and one method for each call; ``cuda`` is what the code under test is given."""

    def __init__(self) -> None:
        self.graphs: dict[int, FakeGraph] = {}
        self.nodes: dict[int, FakeNode] = {}
        self.functions: dict[int, FakeFunction] = {}
        self.kernels: dict[int, int] = {}  # CUkernel -> CUfunction
        self.libraries: dict[int, bytes] = {}
        self.layouts: dict[str, FakeFunction] = {}  # what functions of a loaded binary look like, by name
        self.execs: dict[int, int] = {}
        self.launched: list[int] = []
        self.device_memory: list[tuple[int, int]] = []
        self.host_memory: list[tuple[int, int]] = []
        self.variables: dict[tuple[int, str], bytearray] = {}
        self.refuse: dict[str, int] = {}  # symbol -> code
        self.unreadable: set[int] = set()  # launch attributes
        self.first_edge_wins = True
        self.lose_attribute = 0
        self.calls: list[str] = []
        self._next = 0x1000
        self._keep: list[Any] = []
        self.cuda = Cuda(self._library())

    def _library(self) -> Any:
        made = {}
        for name, (symbol, arguments) in PROTOTYPES.items():
            method = getattr(self, name, None)
            made[symbol] = ctypes.CFUNCTYPE(c_int, *arguments)(self._counted(symbol, method))
        self._keep.append(made)
        return SimpleNamespace(**made)

    def _counted(self, symbol: str, method: Any) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(symbol)
            if symbol in self.refuse:
                return self.refuse[symbol]
            return 0 if method is None else int(method(*arguments) or 0)

        return call

    def number(self) -> int:
        self._next += 0x10
        return self._next

    def put(self, place: int, value: int, kind: Any = ctypes.c_uint64) -> None:
        kind.from_address(place).value = value

    # -- making things as a capture would

    def function(self, name: str, layout: list[tuple[int, int]], **more: Any) -> int:
        handle = self.number()
        self.functions[handle] = FakeFunction(name, layout, **more)
        return handle

    def graph(self) -> int:
        handle = self.number()
        self.graphs[handle] = FakeGraph()
        return handle

    def kernel(
        self, graph: int, function: int, *parameters: bytes, extra: bytes | None = None, swapped: bool = False,
        grid: tuple[int, int, int] = (1, 1, 1), shared: int = 0, attributes: dict[int, bytes] | None = None,
    ) -> int:  # fmt: skip
        row = np.zeros(1, KERNEL_PARAMS)
        row["func"], row["grid"], row["block"], row["shared"] = function, grid, (128, 1, 1), shared
        keep: list[Any] = []
        if extra is None:
            buffers = [ctypes.create_string_buffer(p, len(p)) for p in parameters]
            pointers = (ctypes.c_uint64 * max(1, len(buffers)))(*[ctypes.addressof(b) for b in buffers])
            row["pointers"] = ctypes.addressof(pointers)
            keep += [buffers, pointers]
        else:
            buffer, size = ctypes.create_string_buffer(extra, len(extra)), ctypes.c_size_t(len(extra))
            pairs = [(1, ctypes.addressof(buffer)), (2, ctypes.addressof(size))]
            words = [w for pair in (reversed(pairs) if swapped else pairs) for w in pair]
            array = (ctypes.c_uint64 * 5)(*words, 0)
            row["extra"] = ctypes.addressof(array)
            keep += [buffer, size, array]
        place = ctypes.c_uint64()
        assert self.add_kernel(ctypes.addressof(place), graph, None, 0, row.ctypes.data) == 0
        self.nodes[place.value].attributes |= attributes or {}
        return place.value

    def other(self, graph: int, kind: int, raw: bytes = b"", child: int = 0) -> int:
        handle = self.number()
        self.nodes[handle] = FakeNode(kind, raw, child=child)
        self.graphs[graph].nodes.append(handle)
        return handle

    # -- graph calls

    def graph_create(self, out: int, flags: int) -> None:
        self.put(out, self.graph())

    def graph_destroy(self, graph: int) -> None:
        del self.graphs[graph]

    def graph_nodes(self, graph: int, out: int | None, count: int) -> None:
        nodes = self.graphs[graph].nodes
        self.put(count, len(nodes))
        if out:
            (ctypes.c_uint64 * len(nodes)).from_address(out)[:] = nodes

    def graph_edges(self, graph: int, sources: int, targets: int, data: int, count: int) -> None:
        edges = self.graphs[graph].edges
        self.put(count, len(edges))
        for place, column in ((sources, 0), (targets, 1), (data, 2)):
            if place:
                (ctypes.c_uint64 * len(edges)).from_address(place)[:] = [edge[column] for edge in edges]

    def node_type(self, node: int, out: int) -> None:
        self.put(out, self.nodes[node].kind, c_int)

    def kernel_params(self, node: int, out: int) -> None:
        ctypes.memmove(out, self.nodes[node].raw, KERNEL_PARAMS.itemsize)

    def kernel_attribute(self, node: int, number: int, out: int) -> int:
        if number in self.unreadable:
            return 801
        value = self.nodes[node].attributes.get(number)
        if value:
            ctypes.memmove(out, value, len(value))
        return 0

    def set_kernel_attribute(self, node: int, number: int, value: int) -> int:
        assert number in ATTRIBUTE_IDS
        if number != self.lose_attribute:
            self.nodes[node].attributes[number] = ctypes.string_at(value, 64)
        return 0

    def memset_params(self, node: int, out: int) -> None:
        ctypes.memmove(out, self.nodes[node].raw, len(self.nodes[node].raw))

    memcpy_params = memset_params

    def child_graph(self, node: int, out: int) -> None:
        self.put(out, self.nodes[node].child)

    def add_kernel(self, out: int, graph: int, dependencies: int, count: int, params: int) -> int:
        row = np.frombuffer(ctypes.string_at(params, KERNEL_PARAMS.itemsize), KERNEL_PARAMS)[0]
        found = self.functions.get(int(row["func"]))
        if found is None or int(row["shared"]) > found.attributes[8]:
            return BAD
        fresh = np.array([row])
        keep: list[Any] = []
        if row["pointers"]:
            size = max((offset + n for offset, n in found.layout), default=0)
            block = ctypes.create_string_buffer(size or 1)
            pointers = (ctypes.c_uint64 * max(1, len(found.layout)))()
            for i, (offset, n) in enumerate(found.layout):
                source = ctypes.c_uint64.from_address(int(row["pointers"]) + 8 * i).value
                ctypes.memmove(ctypes.addressof(block) + offset, source, n)
                pointers[i] = ctypes.addressof(block) + offset
            fresh["pointers"] = ctypes.addressof(pointers)
            keep = [block, pointers]
        else:
            words = (ctypes.c_uint64 * 5).from_address(int(row["extra"]))
            pairs = {words[0]: words[1], words[2]: words[3]}
            size = ctypes.c_size_t.from_address(pairs[2]).value
            block, length = ctypes.create_string_buffer(ctypes.string_at(pairs[1], size), size), ctypes.c_size_t(size)
            array = (ctypes.c_uint64 * 5)(2, ctypes.addressof(length), 1, ctypes.addressof(block), 0)
            fresh["extra"] = ctypes.addressof(array)
            keep = [block, length, array]
        handle = self.number()
        self.nodes[handle] = FakeNode(0, fresh.tobytes(), keep=keep)
        self.graphs[graph].nodes.append(handle)
        self.put(out, handle)
        return 0

    def _add(self, out: int, graph: int, kind: int, params: int, size: int) -> None:
        self.put(out, self.other(graph, kind, ctypes.string_at(params, size)))

    def add_memset(self, out: int, graph: int, deps: int, count: int, params: int, context: int) -> None:
        self._add(out, graph, 2, params, 40)

    def add_memcpy(self, out: int, graph: int, deps: int, count: int, params: int, context: int) -> None:
        self._add(out, graph, 1, params, 200)

    def add_empty(self, out: int, graph: int, deps: int, count: int) -> None:
        self.put(out, self.other(graph, 5))

    def add_child(self, out: int, graph: int, deps: int, count: int, child: int) -> None:
        copy = self.graph()
        names = {}
        for node in self.graphs[child].nodes:
            names[node] = self.number()
            self.nodes[names[node]] = self.nodes[node]
        self.graphs[copy].nodes = list(names.values())
        self.graphs[copy].edges = [(names[a], names[b], data) for a, b, data in self.graphs[child].edges]
        self.put(out, self.other(graph, 4, child=copy))

    def add_dependencies(self, graph: int, sources: int, targets: int, data: int, count: int) -> None:
        columns = [(ctypes.c_uint64 * count).from_address(place)[:] for place in (sources, targets, data)]
        if self.first_edge_wins:  # the bug of drivers 580 to 610
            columns[2] = [columns[2][0]] * count
        self.graphs[graph].edges += list(zip(*columns, strict=True))

    def instantiate(self, out: int, graph: int, flags: int) -> None:
        handle = self.number()
        self.execs[handle] = flags
        self.put(out, handle)

    def exec_destroy(self, handle: int) -> None:
        del self.execs[handle]

    def launch(self, handle: int, stream: int | None) -> int:
        if handle not in self.execs:
            return HANDLE
        self.launched.append(handle)
        return 0

    # -- functions and libraries

    def function_name(self, out: int, function: int) -> int:
        if function not in self.functions:
            return HANDLE
        text = ctypes.create_string_buffer(self.functions[function].name.encode())
        self._keep.append(text)
        self.put(out, ctypes.addressof(text))
        return 0

    def function_module(self, out: int, function: int) -> int:
        if function not in self.functions:
            return HANDLE
        self.put(out, self.functions[function].module)
        return 0

    def function_parameter(self, function: int, index: int, offset: int, size: int) -> int:
        layout = self.functions[function].layout
        if index >= len(layout):
            return BAD
        self.put(offset, layout[index][0])
        self.put(size, layout[index][1])
        return 0

    def function_attribute(self, out: int, number: int, function: int) -> None:
        self.put(out, self.functions[function].attributes[number], c_int)

    def set_function_attribute(self, function: int, number: int, value: int) -> None:
        self.functions[function].attributes[number] = value

    def kernel_function(self, out: int, kernel: int) -> int:
        if kernel not in self.kernels:
            return HANDLE
        self.put(out, self.kernels[kernel])
        return 0

    def kernel_library(self, out: int, kernel: int) -> int:
        if kernel not in self.kernels:
            return HANDLE
        self.put(out, self.functions[self.kernels[kernel]].library)
        return 0

    def library_load(self, out: int, image: int, *rest: Any) -> None:
        from fer.cudagraph.images import look

        handle = self.number()
        self.libraries[handle] = look(image).data
        self.put(out, handle)

    def library_unload(self, library: int) -> None:
        del self.libraries[library]

    def library_kernel(self, out: int, library: int, name: int) -> int:
        from fer.cudagraph.images import kernels_in

        text = ctypes.string_at(name).decode()
        if text not in kernels_in(self.libraries[library]) or text not in self.layouts:
            return 500
        model = self.layouts[text]
        kernel = self.number()
        self.kernels[kernel] = self.function(
            text, list(model.layout), attributes=list(model.attributes), library=library
        )
        self.put(out, kernel)
        return 0

    def library_module(self, out: int, library: int) -> int:
        if library not in self.libraries:
            return HANDLE
        self.put(out, library + 1)
        return 0

    def _variable(self, out: int, size: int, owner: int, name: int) -> int:
        value = self.variables.get((owner, ctypes.string_at(name).decode()))
        if value is None:
            return 500
        self.put(out, ctypes.addressof((ctypes.c_char * len(value)).from_buffer(value)))
        self.put(size, len(value))
        return 0

    library_global = _variable
    module_global = _variable

    def pointer_attribute(self, out: int, number: int, address: int) -> int:
        for kind, parts in ((2, self.device_memory), (1, self.host_memory)):
            if any(start <= address < start + size for start, size in parts):
                self.put(out, kind, ctypes.c_uint)
                return 0
        return BAD

    def to_host(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def to_device(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def device_copy(self, target: int, source: int, size: int) -> None:
        ctypes.memmove(target, source, size)

    def fill(self, target: int, value: int, size: int) -> None:
        ctypes.memset(target, value, size)
