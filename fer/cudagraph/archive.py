"""An archive of graphs on disk: tables, binaries, contents of small buffers, and the facts that decide its use.

Reading, verifying, comparing and pruning need neither GPU nor torch. Parameter blocks and binaries that are equal are
stored once. Binaries lie uncompressed at page boundaries, so that the driver can load them from the mapped file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fer.cudagraph import sections
from fer.cudagraph.libcuda import MEMCPY_PARAMS, MEMSET_PARAMS
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
    VIA_POINTERS,
    Array,
    Function,
    Graph,
    Image,
    Tables,
)
from fer.errors import ArchiveError

SUFFIX: Final = ".fergraph"
FORMAT: Final = 2
"""What the facts mean; another number is a miss."""

_RAW: Final = frozenset({"binaries"})
_GRAPH: Final = np.dtype([("node", "<u8"), ("nodes", "<u8"), ("edge", "<u8"), ("edges", "<u8"), ("parent", "<i4")])
_FUNCTION: Final = np.dtype(
    [("image", "<i4"), ("layout", "<u4"), ("count", "<u4"), ("attributes", "<i4", FUNCTION_ATTRIBUTES)]
)
_LAYOUT: Final = np.dtype([("offset", "<u4"), ("size", "<u4")])
_IMAGE: Final = np.dtype([("offset", "<u8"), ("size", "<u8"), ("digest", "V32")])
_BLOCK: Final = np.dtype([("offset", "<u8"), ("size", "<u4")])
_UNSOUND: Final = (AttributeError, KeyError, IndexError, OverflowError, TypeError, ValueError)
_PAGE: Final = 4096
_SMALL: Final = 64


@dataclass(frozen=True)
class Content:
    """Bytes of one small buffer that kernels read and no step writes first: workspaces, semaphores, pointer tables."""

    name: str
    address: int
    data: bytes


@dataclass
class Archive:
    """A saved set of graphs.

    Attributes:
        facts: plain data: ``fingerprint`` (must match), ``ranges`` and ``owners`` (addresses), ``weights`` (digest of
            their layout), ``uses`` (graph to indices of owners), ``outputs`` by graph, ``refused`` (graph to reasons),
            ``golden`` (digests of the probes by checkpoint content, then graph), ``unlike`` (graphs that two replays of
            a probe disagree on, and how far), ``kv`` (size, and the slab that stands for it in a proof).
        digest: names this very file; empty for one that was not written yet.
    """

    tables: Tables
    facts: dict[str, Any] = field(default_factory=dict)
    contents: list[Content] = field(default_factory=list)
    path: Path | None = None
    digest: str = ""

    @property
    def scratch(self) -> list[Content]:
        """Contents that a restore writes."""
        return [each for each in self.contents if each.name.startswith("scratch/")]

    @property
    def probes(self) -> list[Content]:
        """Inputs of the recorded outputs, which only the proof writes: in an engine they are the engine's."""
        return [each for each in self.contents if each.name.startswith("probe/")]

    def graph(self, name: str) -> Graph:
        """A graph by name. Raises KeyError."""
        for graph in self.tables.top():
            if graph.name == name:
                return graph
        raise KeyError(name)


def write(path: Path, archive: Archive) -> None:
    """Write atomically.

    Raises:
        ArchiveError: the folder cannot be written to or the disk is full.
    """
    tables = archive.tables
    nodes = np.concatenate([np.zeros(0, NODE), *(graph.nodes for graph in tables.graphs)])
    edges = np.concatenate([np.zeros(0, EDGE), *(graph.edges for graph in tables.graphs)])
    blocks, params, used = _deduplicated(tables.graphs)
    binaries, images = _binaries(tables.images)
    layouts, functions = _functions(tables.functions)
    names = {
        "graphs": [graph.name for graph in tables.graphs],
        "functions": [function.name for function in tables.functions],
        "trouble": [image.trouble for image in tables.images],
        "globals": [[(name, value.hex()) for name, value in image.globals] for image in tables.images],
        "contents": [(each.name, each.address, len(each.data)) for each in archive.contents],
    }
    sections.write(
        path,
        {
            "facts": _dump(archive.facts),
            "names": _dump(names),
            "graphs": _graph_table(tables.graphs).tobytes(),
            "nodes": nodes.tobytes(),
            "edges": edges.tobytes(),
            "used": used.tobytes(),
            "blocks": blocks.tobytes(),
            "params": params,
            "functions": functions.tobytes(),
            "layouts": layouts.tobytes(),
            "attributes": b"".join(tables.attributes),
            "images": images.tobytes(),
            "contents": b"".join(each.data for each in archive.contents),
            "binaries": binaries,
        },
        raw=_RAW,
    )


def read(path: Path, *, binaries: bool = True) -> Archive:
    """Read everything but the binaries, which stay in the mapped file until :func:`check_image` looks at them.

    Args:
        binaries: False leaves them out altogether, for looking at the tables alone.

    Raises:
        ArchiveError: the file is damaged, in which section, or is no archive.
    """
    file = sections.Sections(path)
    try:
        return _assemble(file, binaries)
    except ArchiveError:
        raise
    except _UNSOUND as error:  # sound checksums around unsound content
        raise ArchiveError(f"{path} does not hold what an archive must", why=repr(error), section="names") from error


def facts_of(path: Path) -> tuple[dict[str, Any], str]:
    """The facts of an archive and its digest, without reading the rest. Raises ArchiveError."""
    file = sections.Sections(path)
    try:
        return _facts(file), file.digest
    except ValueError as error:
        raise ArchiveError(f"{path} does not hold what an archive must", why=repr(error), section="facts") from error


def check_image(image: Image) -> None:
    """Raises:
    ArchiveError: the binary's bytes are not those that were saved.
    """
    if hashlib.sha256(image.data).hexdigest() != image.digest:
        raise ArchiveError("a binary in the archive is damaged", why="its digest does not match", section="binaries")


def _assemble(file: sections.Sections, binaries: bool) -> Archive:
    def table(name: str, kind: np.dtype[Any]) -> Array:
        return np.frombuffer(file.read(name), kind)

    facts, names = _facts(file), json.loads(bytes(file.read("names")))
    nodes, edges, used = table("nodes", NODE), table("edges", EDGE), table("used", np.dtype("<u4"))
    blocks, params = table("blocks", _BLOCK), bytes(file.read("params"))
    begins, sizes = blocks["offset"].tolist(), blocks["size"].tolist()  # of structured rows one by one it takes long
    pieces = [params[start : start + size] for start, size in zip(begins, sizes, strict=True)]
    if len(used) != len(nodes) or (len(used) and int(used.max()) >= len(blocks)):
        raise ValueError("nodes without a parameter block")
    if [len(piece) for piece in pieces] != sizes or (blocks["size"][used] != nodes["size"]).any():
        raise ValueError("parameters have another length than their nodes say")
    graphs = []
    for name, row in zip(names["graphs"], table("graphs", _GRAPH), strict=True):
        part = slice(int(row["node"]), int(row["node"]) + int(row["nodes"]))
        arcs = edges[int(row["edge"]) : int(row["edge"]) + int(row["edges"])]
        inside = nodes[part]
        if len(inside) != int(row["nodes"]) or len(arcs) != int(row["edges"]):
            raise ValueError(f"{name} has more nodes or edges than there are")
        gathered = np.frombuffer(b"".join([pieces[i] for i in used[part].tolist()]), "<u1")
        if len(arcs) and max(int(arcs["source"].max()), int(arcs["target"].max())) >= len(inside):
            raise ValueError(f"an edge of {name} leads outside of it")
        graphs.append(Graph(str(name), inside, arcs, gathered, int(row["parent"])))
    tables = Tables(
        graphs=graphs,
        functions=_read_functions(names["functions"], table("functions", _FUNCTION), table("layouts", _LAYOUT)),
        images=_read_images(names, table("images", _IMAGE), file.view("binaries") if binaries else memoryview(b"")),
        attributes=_read_attributes(bytes(file.read("attributes"))),
    )
    _check_indices(tables, nodes)
    packed = np.array([function.bytes for function in tables.functions] or [0], np.int64)
    for index, graph in enumerate(graphs):
        _check_nodes(tables, index, graph, packed)
    contents, at, data = [], 0, file.read("contents")
    for name, address, size in names["contents"]:
        if not 0 <= size <= len(data) - at:
            raise ValueError(f"the contents of {name} are not there")
        contents.append(Content(str(name), int(address), bytes(data[at : at + size])))
        at += size
    return Archive(tables, facts, contents, file.path, file.digest)


def _check_indices(tables: Tables, nodes: Array) -> None:
    for name, limit in (
        ("function", len(tables.functions)),
        ("attributes", len(tables.attributes)),
        ("child", len(tables.graphs)),
    ):
        if len(nodes) and (int(nodes[name].max()) >= limit or int(nodes[name].min()) < -1):
            raise ValueError(f"a node names a {name} that is not there")
    if any(function.image >= len(tables.images) for function in tables.functions):
        raise ValueError("a function names a binary that is not there")


def _check_nodes(tables: Tables, index: int, graph: Graph, packed: Array) -> None:
    """Each node has what its kind needs, and as many bytes as the driver will read of it; children come later."""
    nodes, kinds = graph.nodes, graph.nodes["kind"]
    if (nodes["function"][kinds == KERNEL] < 0).any() or ((nodes["child"] >= 0) != (kinds == CHILD)).any():
        raise ValueError(f"a node of {graph.name} has no kernel or no graph")
    for child in nodes["child"][kinds == CHILD].tolist():
        if child <= index or tables.graphs[child].parent != index:
            raise ValueError(f"a child of {graph.name} is another's")
    if not -1 <= graph.parent < max(index, 1):
        raise ValueError(f"the parent of {graph.name} is not there")
    wanted, buffered = nodes["size"].astype(np.int64), nodes["via"] != VIA_POINTERS
    for kind, size in ((MEMSET, MEMSET_PARAMS.itemsize), (MEMCPY, MEMCPY_PARAMS.itemsize)):
        wanted[kinds == kind] = size
    pointers = (kinds == KERNEL) & ~buffered
    wanted[pointers] = packed[nodes["function"][pointers]]
    if (nodes["size"] != wanted).any():
        raise ValueError(f"the parameters of a node of {graph.name} have another size than it takes")


def _facts(file: sections.Sections) -> dict[str, Any]:
    found = json.loads(bytes(file.read("facts")))
    if not isinstance(found, dict):
        raise ValueError("the facts are no object")
    return found


def _deduplicated(graphs: Sequence[Graph]) -> tuple[Array, bytes, Array]:
    """Parameter blocks stored once: their table, their bytes, and which one each node uses."""
    known: dict[bytes, int] = {}
    parts: list[bytes] = []
    used = []
    for graph in graphs:
        data = graph.params.tobytes()
        for start, size in zip(graph.starts.tolist(), graph.nodes["size"].tolist(), strict=True):
            block = data[start : start + size]
            if block not in known:
                known[block] = len(parts)
                parts.append(block)
            used.append(known[block])
    table = np.zeros(len(parts), _BLOCK)
    table["size"] = [len(part) for part in parts]
    table["offset"] = np.cumsum(table["size"], dtype=np.int64) - table["size"]
    return table, b"".join(parts), np.array(used, "<u4")


def _graph_table(graphs: Sequence[Graph]) -> Array:
    table = np.zeros(len(graphs), _GRAPH)
    node = edge = 0
    for row, graph in zip(table, graphs, strict=True):
        row["node"], row["nodes"], row["parent"] = node, len(graph.nodes), graph.parent
        row["edge"], row["edges"] = edge, len(graph.edges)
        node, edge = node + len(graph.nodes), edge + len(graph.edges)
    return table


def _binaries(images: Sequence[Image]) -> tuple[bytes, Array]:
    table = np.zeros(len(images), _IMAGE)
    parts: list[bytes] = []
    offset = 0
    for row, image in zip(table, images, strict=True):
        data = bytes(image.data)
        align = _PAGE if len(data) >= _PAGE else _SMALL
        gap = -offset % align
        parts += [bytes(gap), data]
        row["offset"], row["size"] = offset + gap, len(data)
        row["digest"] = np.void(bytes.fromhex(image.digest))
        offset += gap + len(data)
    return b"".join(parts), table


def _functions(functions: Sequence[Function]) -> tuple[Array, Array]:
    table = np.zeros(len(functions), _FUNCTION)
    layouts: list[tuple[int, int]] = []
    for row, function in zip(table, functions, strict=True):
        row["image"], row["layout"], row["count"] = function.image, len(layouts), len(function.layout)
        row["attributes"] = function.attributes
        layouts += function.layout
    return np.array(layouts, _LAYOUT), table


def _read_functions(names: Sequence[str], table: Array, layouts: Array) -> list[Function]:
    rows = list(zip(layouts["offset"].tolist(), layouts["size"].tolist(), strict=True))
    columns = (table[name].tolist() for name in ("image", "layout", "count", "attributes"))
    return [
        Function(name=name, image=image, layout=tuple(rows[first : first + count]), attributes=tuple(attributes))
        for name, image, first, count, attributes in zip(names, *columns, strict=True)
    ]


def _read_images(names: dict[str, Any], table: Array, binaries: memoryview) -> list[Image]:
    digests = [bytes(each).hex() for each in table["digest"].tolist()]
    begins, sizes = table["offset"].tolist(), table["size"].tolist()
    images = []
    for start, size, digest, trouble, values in zip(
        begins, sizes, digests, names["trouble"], names["globals"], strict=True
    ):
        images.append(
            Image(
                data=binaries[start : start + size],
                digest=digest,
                globals=tuple((str(name), bytes.fromhex(value)) for name, value in values),
                trouble=str(trouble),
            )
        )
    return images


def _read_attributes(data: bytes) -> list[bytes]:
    size = ATTRIBUTE.itemsize * len(ATTRIBUTE_IDS)
    return [data[at : at + size] for at in range(0, len(data), size)]


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
