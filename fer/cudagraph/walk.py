"""From a driver's graph to tables: nodes, parameters, launch attributes, edges.

The same walk reads a graph that was captured (every function it meets is described anew) and one that was rebuilt (the
functions are known), so what is compared afterwards was read in one way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import byref, c_size_t, memmove
from dataclasses import dataclass, field

import numpy as np

from fer.cudagraph.libcuda import (
    BUFFER_POINTER,
    BUFFER_SIZE,
    KERNEL_PARAMS,
    MEMCPY_PARAMS,
    MEMSET_PARAMS,
    Cuda,
    address,
)
from fer.cudagraph.records import (
    ATTRIBUTE,
    ATTRIBUTE_IDS,
    CHILD,
    EDGE,
    FUNCTION_ATTRIBUTES,
    KERNEL,
    MEMCPY,
    MEMSET,
    NODE,
    UNREADABLE,
    VIA_BUFFER,
    VIA_POINTERS,
    Array,
    Function,
    Graph,
    Tables,
)
from fer.errors import GraphRefused

_MAX_PARAMETERS = 1024
_MAX_BUFFER = 1 << 16  # kernels take at most 32 KiB of arguments

Resolve = Callable[[int, int], int]
"""From the ``func`` and ``kern`` of a node to an index into ``Tables.functions``."""


def describe(cuda: Cuda, function: int, image: int) -> Function:
    """What the driver says of a function. Raises DriverError."""
    name = ctypes.string_at(cuda.value("function_name", function, first=True)).decode()
    layout: list[tuple[int, int]] = []
    offset, size = c_size_t(), c_size_t()
    # There is no call for the number of parameters in every driver this runs on: ask until it says no.
    while len(layout) < _MAX_PARAMETERS:
        if cuda.function_parameter(function, len(layout), byref(offset), byref(size)):
            break
        layout.append((offset.value, size.value))
    return Function(name=name, image=image, layout=tuple(layout), attributes=attributes_of(cuda, function))


def attributes_of(cuda: Cuda, function: int) -> tuple[int, ...]:
    """Function attributes 0 to 15, :data:`UNREADABLE` where the driver gives none."""
    values = []
    out = ctypes.c_int()
    for number in range(FUNCTION_ATTRIBUTES):
        values.append(UNREADABLE if cuda.function_attribute(byref(out), number, function) else out.value)
    return tuple(values)


@dataclass(frozen=True)
class Given:
    """Launch attributes that nodes of one function were given.

    Attributes:
        rows: which rows of a set they are, with the driver's number of each.
        plain: the whole set as the driver gives it for a node that was given none.
        seen: indices of the sets met so far, by what was read.
    """

    rows: tuple[tuple[int, int], ...]
    plain: bytes
    seen: dict[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """What is known of a graph that this process built, and need not be asked for.

    Attributes:
        handles: its nodes, in the order wanted.
        kinds: their kinds.
        given: launch attributes by function; only these are read, the rest is as for a plain node.
    """

    handles: Array
    kinds: Array
    given: Mapping[int, Given]


def walk(cuda: Cuda, handle: int, name: str, tables: Tables, resolve: Resolve, *, built: Built | None = None) -> int:
    """Read a graph, with its children, into ``tables``; its index there.

    Nodes of a kind that cannot be kept are recorded with their kind alone; the audit refuses them by name.

    Args:
        handle: the ``CUgraph``.
        built: for one that this process built. Its nodes are read in that order (the driver's own by default), and
            of launch attributes those that were set.

    Raises:
        DriverError, GraphRefused: a node could not be read.
    """
    nodes = _nodes(cuda, handle) if built is None else built.handles
    table = np.zeros(len(nodes), NODE)
    table["function"] = table["attributes"] = table["child"] = -1
    graph = Graph(name, table, _edges(cuda, handle, nodes), np.zeros(0, "<u1"))
    place = len(tables.graphs)
    tables.graphs.append(graph)
    table["kind"] = _kinds(cuda, nodes) if built is None else built.kinds
    blocks: dict[int, bytes] = {}
    for index in np.flatnonzero((table["kind"] == MEMSET) | (table["kind"] == MEMCPY)).tolist():
        blocks[index] = _plain(cuda, int(nodes[index]), int(table["kind"][index]))
    kernels = np.flatnonzero(table["kind"] == KERNEL)
    packed = _kernels(cuda, nodes, kernels, table, tables, resolve, built)
    graph.params = _merged(table, kernels, packed, blocks)
    for index in np.flatnonzero(table["kind"] == CHILD).tolist():
        inner = cuda.value("child_graph", int(nodes[index]))
        child = walk(cuda, inner, f"{name}/{index}", tables, resolve)
        tables.graphs[child].parent = place
        table["child"][index] = child
    return place


def _nodes(cuda: Cuda, handle: int) -> Array:
    count = c_size_t()
    cuda.call("graph_nodes", handle, None, byref(count))
    nodes = np.zeros(count.value, "<u8")
    if count.value:
        cuda.call("graph_nodes", handle, address(nodes), byref(count))
    return nodes


def _kinds(cuda: Cuda, nodes: Array) -> list[int]:
    kinds, out = [], ctypes.c_int()
    place, read = byref(out), cuda.node_type
    for node in nodes.tolist():
        cuda.check("node_type", read(node, place))
        kinds.append(out.value)
    return kinds


def _edges(cuda: Cuda, handle: int, nodes: Array) -> Array:
    count = c_size_t()
    cuda.call("graph_edges", handle, None, None, None, byref(count))
    ends, data = np.zeros((2, count.value), "<u8"), np.zeros(count.value, "<u8")
    if count.value:
        # With no place for the edge data the driver refuses graphs with programmatic launches.
        cuda.call("graph_edges", handle, address(ends[0]), address(ends[1]), address(data), byref(count))
    order = np.argsort(nodes)
    found = np.searchsorted(nodes, ends, sorter=order)
    edges = np.zeros(count.value, EDGE)
    if count.value:
        edges["source"], edges["target"] = order[np.minimum(found, len(nodes) - 1)]
    edges["data"] = data
    return edges


def _plain(cuda: Cuda, node: int, kind: int) -> bytes:
    raw = ctypes.create_string_buffer((MEMSET_PARAMS if kind == MEMSET else MEMCPY_PARAMS).itemsize)
    cuda.call("memset_params" if kind == MEMSET else "memcpy_params", node, ctypes.addressof(raw))
    return raw.raw


def _kernels(
    cuda: Cuda, nodes: Array, kernels: Array, table: Array, tables: Tables, resolve: Resolve, built: Built | None
) -> Array:
    """Fill the table's rows of kernels; their parameter blocks, one after another."""
    found = np.zeros(len(kernels), KERNEL_PARAMS)
    base, step, read = address(found), KERNEL_PARAMS.itemsize, cuda.kernel_params
    handles = nodes[kernels].tolist()
    for number, node in enumerate(handles):
        code = read(node, base + number * step)
        if code:
            cuda.check("kernel_params", code)
    known: dict[tuple[int, int], int] = {}
    functions = []
    for pair in zip(found["func"].tolist(), found["kern"].tolist(), strict=True):
        if pair not in known:
            known[pair] = resolve(*pair)
        functions.append(known[pair])
    table["function"][kernels] = functions
    for name in ("grid", "block", "shared"):
        table[name][kernels] = found[name]
    via = np.where(found["pointers"] != 0, VIA_POINTERS, np.where(found["extra"] != 0, VIA_BUFFER, VIA_POINTERS))
    table["via"][kernels] = via
    if built is None:
        table["attributes"][kernels] = _attributes(cuda, handles, tables)
    else:
        table["attributes"][kernels] = _set_attributes(cuda, handles, functions, tables, built.given)
    return _parameters(found, via, functions, tables, table, kernels)


def _attributes(cuda: Cuda, handles: list[int], tables: Tables) -> list[int]:
    answers = np.zeros((len(handles), len(ATTRIBUTE_IDS)), ATTRIBUTE)
    place, size, read = address(answers) + 8, ATTRIBUTE.itemsize, cuda.kernel_attribute
    failed: list[tuple[int, int]] = []
    for node in handles:  # each answer is the status, then the union, of which the driver writes what it means
        for number in ATTRIBUTE_IDS:
            code = read(node, number, place)
            if code:
                failed.append((place - 8 - address(answers), code))
            place += size
    flat = answers.reshape(-1)
    for offset, code in failed:
        flat["status"][offset // size] = code
    text, step = answers.tobytes(), len(ATTRIBUTE_IDS) * size
    return [tables.attribute_set(text[at : at + step]) for at in range(0, len(text), step)]


def _set_attributes(
    cuda: Cuda, handles: list[int], functions: list[int], tables: Tables, given: Mapping[int, Given]
) -> list[int]:
    """Sets of launch attributes where only some were given: the rest is as for a plain node of the function."""
    size, read = ATTRIBUTE.itemsize, cuda.kernel_attribute
    for function in set(functions):
        given[function].seen.setdefault(b"", tables.attribute_set(given[function].plain))
    rows = [given[function].rows for function in functions]
    answers = np.zeros(sum(len(each) for each in rows), ATTRIBUTE)
    place = address(answers) + 8  # each is the status, then the union, of which the driver writes what it means
    for node, each in zip(handles, rows, strict=True):
        for _, number in each:
            code = read(node, number, place)
            if code:
                answers["status"][(place - 8 - address(answers)) // size] = code
            place += size
    text, at, indices = answers.tobytes(), 0, []
    for function, each in zip(functions, rows, strict=True):
        answer = text[at : at + len(each) * size]
        at += len(answer)
        index = given[function].seen.get(answer)
        if index is None:
            index = given[function].seen[answer] = tables.attribute_set(_overlaid(given[function], answer))
        indices.append(index)
    return indices


def _overlaid(known: Given, answer: bytes) -> bytes:
    size, whole = ATTRIBUTE.itemsize, bytearray(known.plain)
    for position, (row, _) in enumerate(known.rows):
        whole[row * size : (row + 1) * size] = answer[position * size : (position + 1) * size]
    return bytes(whole)


def _parameters(found: Array, via: Array, functions: list[int], tables: Tables, table: Array, kernels: Array) -> Array:
    """Copy what the nodes hold, at once: the memory is the nodes' own."""
    whole = {function: tables.functions[function].bytes for function in set(functions)}
    sizes = [whole[function] for function in functions]
    sources = found["pointers"].tolist()
    buffered = np.flatnonzero(via == VIA_BUFFER).tolist()
    for number, source, size in zip(buffered, *_buffers(found["extra"][buffered].tolist()), strict=True):
        sources[number], sizes[number] = source, size
    by_pointer = np.flatnonzero((via == VIA_POINTERS) & (np.array(sizes, np.int64) > 0)).tolist()
    apart = _follow(sources, by_pointer, functions, tables)
    packed = np.zeros(sum(sizes), "<u1")
    at, base = 0, address(packed)
    for number, (source, size) in enumerate(zip(sources, sizes, strict=True)):
        if number in apart:
            for place, (offset, length) in zip(apart[number], tables.functions[functions[number]].layout, strict=True):
                memmove(base + at + offset, place, length)
        elif size:
            memmove(base + at, source, size)
        at += size
    table["size"][kernels] = sizes
    _clear_gaps(packed, via, functions, sizes, tables)
    return packed


def _follow(sources: list[int], chosen: list[int], functions: list[int], tables: Tables) -> dict[int, list[int]]:
    """Replace arrays of pointers by the block they point into; where they point apart, all of them by number.

    A node's parameters lie in one block of the driver's, at their offsets. Where the pointers say so, one copy takes
    them all; the bytes between them are the driver's and are cleared afterwards.
    """
    if not chosen:
        return {}
    offsets = [tables.offsets(functions[number]) for number in chosen]
    lengths = [len(each) for each in offsets]
    pointers = np.zeros(sum(lengths), "<i8")
    at, base = 0, address(pointers)
    begins = []
    for number, count in zip(chosen, lengths, strict=True):
        memmove(base + at * 8, sources[number], count * 8)
        begins.append(at)
        at += count
    blocks = pointers - np.concatenate(offsets)
    firsts = blocks[begins]
    wrong = np.repeat(firsts, lengths) != blocks
    apart = set(np.repeat(np.arange(len(chosen)), lengths)[wrong].tolist()) if wrong.any() else set()
    for place, (number, first) in enumerate(zip(chosen, firsts.tolist(), strict=True)):
        if place not in apart:
            sources[number] = first
    return {chosen[place]: pointers[begins[place] : begins[place] + lengths[place]].tolist() for place in apart}


def _clear_gaps(packed: Array, via: Array, functions: list[int], sizes: list[int], tables: Tables) -> None:
    """Zero the bytes between parameters, of kernels that get pointers: nobody wrote them."""
    whole = {size: np.ones(size, "<u1") for size in set(sizes)}
    masks = [
        whole[size] if how == VIA_BUFFER else tables.written(function)
        for how, function, size in zip(via.tolist(), functions, sizes, strict=True)
    ]
    if masks:
        packed *= np.concatenate(masks)


def _buffers(extras: list[int]) -> tuple[list[int], list[int]]:
    """Addresses and sizes out of kernels' ``extra``: tagged pairs, in either order."""
    words, sizes = np.zeros((len(extras), 4), "<u8"), np.zeros(len(extras), "<u8")
    base = address(words)
    for number, extra in enumerate(extras):
        memmove(base + number * 32, extra, 32)
    swapped = words[:, 0] == BUFFER_SIZE
    words[swapped] = words[swapped][:, [2, 3, 0, 1]]
    if len(extras) and not (words[:, [0, 2]] == (BUFFER_POINTER, BUFFER_SIZE)).all():
        tags = sorted({int(tag) for tag in words[:, [0, 2]].reshape(-1)})
        raise GraphRefused("a kernel's arguments cannot be read", why=f"unknown tags {tags} in extra")
    base = address(sizes)
    for number, place in enumerate(words[:, 3].tolist()):
        memmove(base + number * 8, place, 8)
    if len(extras) and int(sizes.max()) > _MAX_BUFFER:
        raise GraphRefused("a kernel's arguments cannot be read", why=f"a buffer of {int(sizes.max())} bytes")
    return words[:, 1].tolist(), sizes.tolist()


def _merged(table: Array, kernels: Array, packed: Array, blocks: dict[int, bytes]) -> Array:
    """Blocks of all nodes in node order, from the kernels' and the others'."""
    if not blocks:
        return packed
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(table["size"][kernels], dtype=np.int64)])
    parts, taken = [np.zeros(0, "<u1")], 0
    for index, before in zip(sorted(blocks), np.searchsorted(kernels, sorted(blocks)).tolist(), strict=True):
        table["size"][index] = len(blocks[index])
        parts += [packed[taken : ends[before]], np.frombuffer(blocks[index], "<u1")]
        taken = ends[before]
    return np.concatenate([*parts, packed[taken:]])
