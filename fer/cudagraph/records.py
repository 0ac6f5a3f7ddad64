"""What a graph is made of, as numpy tables: nodes, edges, kernels' parameters, functions and their binaries.

Tables and not objects, because a start reads, compares and rebuilds some ten thousand nodes in a fraction of a second.
Standard library and numpy only: archives are read, audited and compared on machines without a GPU.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

KERNEL: Final = 0
MEMCPY: Final = 1
MEMSET: Final = 2
HOST: Final = 3
CHILD: Final = 4
EMPTY: Final = 5
KINDS: Final = {
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host function",
    4: "child graph",
    5: "empty",
    6: "event wait",
    7: "event record",
    8: "external semaphore signal",
    9: "external semaphore wait",
    10: "memory allocation",
    11: "memory free",
    12: "batched memory operation",
    13: "conditional",
}
"""The driver's numbers of node types (``CUgraphNodeType``)."""

SUPPORTED: Final = frozenset({KERNEL, MEMCPY, MEMSET, CHILD, EMPTY})

VIA_POINTERS: Final = 0
VIA_BUFFER: Final = 1
"""How a kernel gets its arguments: an array of pointers (``kernelParams``) or one packed buffer (``extra``)."""

NODE: Final = np.dtype(
    [
        ("kind", "<u1"),
        ("via", "<u1"),
        ("spare", "<u2"),
        ("function", "<i4"),  # index into Tables.functions, -1 for no kernel
        ("grid", "<u4", 3),
        ("block", "<u4", 3),
        ("shared", "<u4"),  # dynamic shared memory, bytes
        ("attributes", "<i4"),  # index into Tables.attributes, -1 for none
        ("size", "<u4"),  # bytes of parameters
        ("child", "<i4"),  # index into Tables.graphs, -1 for none
    ]
)
EDGE: Final = np.dtype([("source", "<u4"), ("target", "<u4"), ("data", "<u8")])
"""``data``: the eight bytes of the driver's edge data (from port, to port, type, reserved)."""

ATTRIBUTE_IDS: Final = (1, 2, 4, 5, 8, 9, 10, 11, 13, 14, 16)
"""Launch attributes read from every kernel node, one by one, since drivers differ in which of them they can read."""

ATTRIBUTE_NAMES: Final = {
    1: "access policy window",
    2: "cooperative",
    4: "cluster dimension",
    5: "cluster scheduling policy",
    8: "priority",
    9: "memory sync domain map",
    10: "memory sync domain",
    11: "preferred cluster dimension",
    13: "device-updatable",
    14: "shared memory carveout",
    16: "NVLink utilisation",
}
ATTRIBUTE: Final = np.dtype([("status", "<i8"), ("value", "V64")])  # the union begins on eight bytes
"""One launch attribute: the driver's status when it was read (0: readable) and the 64 bytes of its union."""

FUNCTION_ATTRIBUTES: Final = 16
"""Function attributes 0 to 15 of ``CUfunction_attribute`` are recorded, :data:`UNREADABLE` where the driver cannot."""

UNREADABLE: Final = -(1 << 31)
MAX_DYNAMIC_SHARED: Final = 8
SETTABLE: Final = (8, 9, 14, 15)
"""Process state that a new copy of a function lacks: dynamic shared memory, carveout, wide clusters, scheduling."""

FIXED: Final = (0, 1, 2, 3, 4, 5, 6)
"""What compilation decided; another value in a later process means another binary."""


@dataclass(frozen=True)
class Function:
    """One kernel of one binary.

    Attributes:
        name: mangled name, which does not identify the binary by itself.
        image: index into :attr:`Tables.images`, -1 where the binary is not known.
        layout: offset and size of every parameter in bytes.
        attributes: values of function attributes 0 to 15.
    """

    name: str
    image: int
    layout: tuple[tuple[int, int], ...]
    attributes: tuple[int, ...]

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of a packed parameter block."""
        return max((offset + size for offset, size in self.layout), default=0)

    def parameter_at(self, offset: int) -> int:
        """Number of the parameter that holds this byte; the last one before it where it is padding."""
        return max((i for i, (start, _) in enumerate(self.layout) if start <= offset), default=0)


@dataclass(frozen=True)
class Image:
    """One binary (an ELF cubin) and the state its module had when it was saved.

    Attributes:
        data: the bytes, possibly a view of a mapped archive.
        digest: SHA-256, hex.
        globals: values of module globals that differ from the image, by symbol.
        trouble: why nothing of it may be reused, ``""`` if it may.
    """

    data: bytes | memoryview
    digest: str
    globals: tuple[tuple[str, bytes], ...] = ()
    trouble: str = ""


@dataclass
class Graph:
    """One graph. ``params`` holds the parameter blocks of all nodes one after another, in node order, unpadded.

    A kernel's block has its parameters at their offsets and zeros between them; a memset's or memcpy's block is the
    driver's structure.
    """

    name: str
    nodes: Array
    edges: Array
    params: Array
    parent: int = -1

    @property
    def starts(self) -> Array:
        """Where each node's block begins in ``params``."""
        ends: Array = np.cumsum(self.nodes["size"], dtype=np.int64)
        begins: Array = ends - self.nodes["size"]
        return begins


@dataclass
class Tables:
    """Graphs and what they share."""

    graphs: list[Graph] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    attributes: list[bytes] = field(default_factory=list)  # each ATTRIBUTE x len(ATTRIBUTE_IDS)
    _attribute_index: dict[bytes, int] = field(default_factory=dict, repr=False)
    _identities: dict[int, bytes] = field(default_factory=dict, repr=False)
    _offsets: dict[int, Array] = field(default_factory=dict, repr=False)
    _written: dict[int, Array] = field(default_factory=dict, repr=False)
    _words: dict[int, Array] = field(default_factory=dict, repr=False)

    def attribute_set(self, value: bytes) -> int:
        """Index of a set of launch attributes, added where it is new."""
        if len(self._attribute_index) != len(self.attributes):
            self._attribute_index = {known: i for i, known in enumerate(self.attributes)}
        found = self._attribute_index.get(value)
        if found is None:
            found = self._attribute_index[value] = len(self.attributes)
            self.attributes.append(value)
        return found

    def top(self) -> list[Graph]:
        """Graphs that are nobody's child."""
        return [graph for graph in self.graphs if graph.parent < 0]

    def functions_of(self, graph: Graph) -> list[int]:
        """Indices of the functions a graph and its children launch."""
        found = {int(i) for i in np.unique(graph.nodes["function"]) if i >= 0}
        for child in graph.nodes["child"][graph.nodes["child"] >= 0]:
            found |= set(self.functions_of(self.graphs[int(child)]))
        return sorted(found)

    def identity(self, index: int) -> bytes:
        """32 bytes that name a function by binary, name, parameters and compiled properties."""
        if index not in self._identities:
            function = self.functions[index]
            image = self.images[function.image].digest if function.image >= 0 else "unknown"
            fixed = [function.attributes[i] for i in FIXED]
            text = repr((image, function.name, function.layout, fixed)).encode()
            self._identities[index] = hashlib.sha256(text).digest()
        return self._identities[index]

    def offsets(self, function: int) -> Array:
        """Offsets of a function's parameters in bytes, ``(parameters,)`` int64."""
        if function not in self._offsets:
            self._offsets[function] = np.array([offset for offset, _ in self.functions[function].layout], np.int64)
        return self._offsets[function]

    def written(self, function: int) -> Array:
        """Which bytes of a function's parameter block belong to a parameter: ones, and zeros in the gaps between."""
        if function not in self._written:
            mask = np.zeros(self.functions[function].bytes, "<u1")
            for offset, size in self.functions[function].layout:
                mask[offset : offset + size] = 1
            self._written[function] = mask
        return self._written[function]

    def words(self, function: int) -> Array:
        """Offsets in a function's parameter block at which a pointer may lie: of eight bytes within one parameter."""
        if function not in self._words:
            layout = self.functions[function].layout
            places = [at for start, size in layout for at in range(start, start + size - 7, 4)]
            self._words[function] = np.array(sorted(places), np.int64)
        return self._words[function]

    def again(self) -> Tables:
        """Tables without graphs over the same everything else, for reading back what was built of these."""
        return Tables(
            functions=self.functions,
            images=self.images,
            attributes=self.attributes,
            _attribute_index=self._attribute_index,
            _identities=self._identities,
            _offsets=self._offsets,
            _written=self._written,
        )

    def digest(self, graph: Graph) -> str:
        """SHA-256 over all that the driver can give back of a graph, children included; the read-back compares it."""
        total = hashlib.sha256()
        nodes = graph.nodes.copy()
        for name in ("function", "attributes", "child"):  # indices mean nothing outside these tables
            nodes[name] = 0
        total.update(nodes.tobytes())
        total.update(b"".join(_indexed(self.identity, graph.nodes["function"])))
        total.update(b"".join(_indexed(self._attribute_digest, graph.nodes["attributes"])))
        total.update(np.ascontiguousarray(graph.params).tobytes())
        total.update(np.sort(graph.edges, order=("source", "target", "data")).tobytes())
        for child in graph.nodes["child"][graph.nodes["child"] >= 0]:
            total.update(self.digest(self.graphs[int(child)]).encode())
        return total.hexdigest()

    def _attribute_digest(self, index: int) -> bytes:
        return hashlib.sha256(self.attributes[index]).digest()


def _indexed(describe: Any, indices: Array) -> list[bytes]:
    known = {int(i): (describe(int(i)) if i >= 0 else bytes(32)) for i in np.unique(indices)}
    return [known[i] for i in indices.tolist()]


def attributes_of(value: bytes) -> dict[int, tuple[int, bytes]]:
    """Launch attributes of one set: status and 64 bytes by id."""
    rows = np.frombuffer(value, ATTRIBUTE)
    return {
        number: (int(row["status"]), row["value"].tobytes()) for number, row in zip(ATTRIBUTE_IDS, rows, strict=True)
    }
