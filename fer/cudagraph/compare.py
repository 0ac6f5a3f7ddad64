"""Where two archives differ: their facts, their graphs, and in a graph the first node that is another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fer.cudagraph.archive import Archive
from fer.cudagraph.records import KERNEL, KINDS, Graph, Tables

_IGNORED = ("created", "golden", "digests", "refused")


@dataclass(frozen=True)
class Difference:
    """One difference: what differs, and both sides for people."""

    what: str
    left: str
    right: str


def compare(left: Archive, right: Archive) -> list[Difference]:
    """All differences between facts and graphs; of a graph the first one in each respect."""
    found = list(_facts(left.facts, right.facts))
    sides = [{graph.name: graph for graph in archive.tables.top()} for archive in (left, right)]
    for name in sorted(sides[0].keys() | sides[1].keys(), key=_natural):
        mine, other = sides[0].get(name), sides[1].get(name)
        if mine is None or other is None:
            reasons = [archive.facts.get("refused", {}).get(name, "absent") for archive in (left, right)]
            found.append(Difference(name, "kept" if mine else reasons[0], "kept" if other else reasons[1]))
        elif left.tables.digest(mine) != right.tables.digest(other):
            found += [
                Difference(f"{name}: {each.what}", each.left, each.right) for each in graphs(left, mine, right, other)
            ]
    return found


def graphs(left: Archive, mine: Graph, right: Archive, other: Graph) -> Iterator[Difference]:
    """Differences of two graphs with different digests."""
    if len(mine.nodes) != len(other.nodes):
        yield Difference("nodes", str(len(mine.nodes)), str(len(other.nodes)))
        return
    for index in range(len(mine.nodes)):
        names = [_describe(tables, graph, index) for tables, graph in ((left.tables, mine), (right.tables, other))]
        if names[0] != names[1]:
            yield Difference(f"node {index}", *names)
            return
        blocks = [_block(graph, index) for graph in (mine, other)]
        if blocks[0] != blocks[1]:
            at = next((i for i, (a, b) in enumerate(zip(*blocks, strict=False)) if a != b), 0) & ~7
            words = [block[at : at + 8][::-1].hex() for block in blocks]
            yield Difference(f"node {index}, {names[0].split(' ')[0]}, parameters at byte {at}", *words)
            return
    if len(mine.edges) != len(other.edges) or not np.array_equal(np.sort(mine.edges), np.sort(other.edges)):
        yield Difference("edges", str(len(mine.edges)), str(len(other.edges)))
        return
    yield Difference("binaries, attributes or children", "one", "another")


def _describe(tables: Tables, graph: Graph, index: int) -> str:
    row = graph.nodes[index]
    if row["kind"] != KERNEL:
        return KINDS.get(int(row["kind"]), "unknown")
    name = tables.functions[int(row["function"])].name
    shape = "x".join(str(n) for n in (*row["grid"].tolist(), *row["block"].tolist()))
    return f"{name} grid and block {shape}, shared {int(row['shared'])}"


def _block(graph: Graph, index: int) -> bytes:
    start = int(graph.starts[index])
    return graph.params[start : start + int(graph.nodes["size"][index])].tobytes()


def _facts(left: Mapping[str, Any], right: Mapping[str, Any], path: str = "") -> Iterator[Difference]:
    for key in sorted(left.keys() | right.keys()):
        if not path and key in _IGNORED:
            continue
        a, b = left.get(key, "(absent)"), right.get(key, "(absent)")
        where = f"{path}.{key}" if path else key
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _facts(a, b, where)
        elif a != b:
            yield Difference(where, _short(a), _short(b))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _natural(name: str) -> tuple[str, int]:
    head, _, tail = name.rpartition("/")
    return (head, int(tail)) if tail.isdigit() else (name, 0)
