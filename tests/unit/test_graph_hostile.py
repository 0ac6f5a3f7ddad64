"""Archives whose checksums are right and whose content is not: refused as a whole, and nothing is read beside them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from fer.cudagraph import archive as archives
from fer.cudagraph import sections, store
from fer.cudagraph.archive import Archive
from fer.cudagraph.records import CHILD, KERNEL, NODE, Function, Graph, Image, Tables
from fer.errors import ArchiveError

RECORDED = Path(__file__).parent.parent / "data" / "h200.fergraph"
PARTS = {name: bytes(sections.Sections(RECORDED).read(name)) for name in sections.Sections(RECORDED).entries}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    path = tmp_path / f"model{archives.SUFFIX}"
    shutil.copy(RECORDED, path)
    return path


def rewritten(path: Path, **parts: bytes) -> None:
    sections.write(path, {**PARTS, **parts}, raw=frozenset({"binaries"}))


def table(name: str, kind: Any, change: Callable[[Any], None]) -> bytes:
    rows = np.frombuffer(PARTS[name], kind).copy()
    change(rows)
    return bytes(rows.tobytes())


def of_nodes(field: str, value: int, row: int = 0) -> dict[str, bytes]:
    def change(rows: Any) -> None:
        rows[field][row] = value

    return {"nodes": table("nodes", NODE, change)}


def of_graphs(field: str, value: int) -> dict[str, bytes]:
    def change(rows: Any) -> None:
        rows[field][1] = value

    return {"graphs": table("graphs", archives._GRAPH, change)}


def of_blocks(field: str, value: int) -> dict[str, bytes]:
    def change(rows: Any) -> None:
        rows[field][-1] = value

    return {"blocks": table("blocks", archives._BLOCK, change)}


def of_functions(field: str, value: int) -> dict[str, bytes]:
    def change(rows: Any) -> None:
        rows[field][0] = value

    return {"functions": table("functions", archives._FUNCTION, change)}


def of_names(key: str, value: Any) -> dict[str, bytes]:
    return {"names": json.dumps({**json.loads(PARTS["names"]), key: value}).encode()}


MEMCPY_ROW = 2


@pytest.mark.parametrize(
    "parts",
    [
        of_nodes("function", 7),
        of_nodes("function", -1),  # the last function would stand in for it
        of_nodes("function", -9),
        of_nodes("attributes", 99),
        of_nodes("child", 1),  # a kernel with a child
        of_nodes("kind", CHILD),  # a child without a graph
        of_nodes("size", 40),  # less than its parameters: the driver would read on
        of_nodes("size", 1 << 31),
        of_nodes("size", 8, row=MEMCPY_ROW),
        of_graphs("node", 1 << 63),
        of_graphs("nodes", 1 << 63),
        of_graphs("nodes", 1000),
        of_graphs("edge", 1 << 40),
        of_graphs("edges", (1 << 64) - 1),
        of_graphs("parent", 5),
        of_graphs("parent", -7),
        of_blocks("offset", (1 << 64) - 8),
        of_blocks("offset", len(PARTS["params"])),
        of_blocks("size", 0),
        of_functions("image", 3),
        of_functions("count", 1),  # parameters are missing
        of_functions("layout", 1 << 20),
        of_names("graphs", ["decode/2"]),
        of_names("contents", [["scratch/0", 1, -5]]),
        of_names("contents", [["scratch/0", 1, 1 << 40]]),
        of_names("contents", [["scratch/0", None, 1]]),
        of_names("globals", [[["scale", "zz"]]]),
        of_names("globals", [5]),
        {"names": b"[]"},
        {"names": b"{"},
        {"facts": b"[]"},
        {"facts": b"{"},
        {"facts": b"\xff"},
        {"nodes": PARTS["nodes"][:-1]},
        {"used": struct.pack("<I", 1 << 31) * (len(PARTS["used"]) // 4)},
        {"edges": b"\xff" * len(PARTS["edges"])},
    ],
    ids=lambda parts: next(iter(parts)),
)
def test_unsound_content_is_refused(copy: Path, parts: dict[str, bytes]) -> None:
    rewritten(copy, **parts)
    with pytest.raises(ArchiveError):
        archives.read(copy)
    assert store.damage(copy)
    assert store.look(copy).trouble or "facts" not in parts


def with_children() -> Tables:
    """A graph with a child that has a child."""
    image = Image(b"", "00" * 32)
    function = Function("plain", 0, (), (0,) * 16)
    graphs = []
    for depth in range(3):
        nodes = np.zeros(1, NODE)
        nodes["function"], nodes["attributes"], nodes["child"] = 0, -1, -1
        nodes["kind"] = KERNEL
        if depth < 2:
            nodes["kind"], nodes["function"], nodes["child"] = CHILD, -1, depth + 1
        graphs.append(
            Graph("decode/1" + "/0" * depth, nodes, np.zeros(0, archives.EDGE), np.zeros(0, "<u1"), depth - 1)
        )
    return Tables(graphs=graphs, functions=[function], images=[image])


def test_children_are_read(copy: Path) -> None:
    archives.write(copy, Archive(with_children()))
    assert [graph.parent for graph in archives.read(copy).tables.graphs] == [-1, 0, 1]


@pytest.mark.parametrize("child", [0, 1, 2])
def test_a_graph_that_holds_itself_is_refused(copy: Path, child: int) -> None:
    tables = with_children()
    tables.graphs[1].nodes["child"] = child
    if child == 2:
        tables.graphs[2].parent = 0  # the child of another graph
    archives.write(copy, Archive(tables))
    with pytest.raises(ArchiveError):
        archives.read(copy)


def test_a_section_takes_no_more_memory_than_its_directory_says(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    plain = sections.zstandard.ZstdCompressor

    class Packer:
        def __init__(self, level: int) -> None:
            self.packer = plain(level=level)

        def compress(self, data: bytes) -> bytes:
            return bomb if data == PARTS["facts"] else self.packer.compress(data)

    unpacked: list[int] = []

    class Unpacker:
        def decompress(self, data: bytes, max_output_size: int) -> bytes:
            unpacked.append(len(data))
            return zstandard_decompress(data, max_output_size)

    zstandard_decompress = sections.zstandard.ZstdDecompressor().decompress
    monkeypatch.setattr(sections.zstandard, "ZstdCompressor", Packer)
    rewritten(copy)
    monkeypatch.setattr(sections.zstandard, "ZstdDecompressor", Unpacker)
    with pytest.raises(ArchiveError, match="facts"):
        archives.facts_of(copy)
    assert unpacked == []


def test_a_name_of_a_section_may_be_any_bytes(copy: Path) -> None:
    entry = sections._ENTRY.pack(b"\xff\xfe", 0, 0, 4096, 0, 0, bytes(32))
    header = sections._HEADER.pack(sections.MAGIC, sections.VERSION, 1, sections.hashlib.sha256(entry).digest())
    copy.write_bytes(header + entry + bytes(8192))
    with pytest.raises(ArchiveError):
        archives.read(copy)
    assert store.damage(copy)


def test_a_section_that_wants_all_memory_is_refused(copy: Path) -> None:
    entry = sections._ENTRY.pack(b"facts", 1, 0, 4096, 10, 1 << 40, bytes(32))
    header = sections._HEADER.pack(sections.MAGIC, sections.VERSION, 1, sections.hashlib.sha256(entry).digest())
    copy.write_bytes(header + entry + bytes(8192))
    with pytest.raises(ArchiveError, match="facts"):
        archives.read(copy)
