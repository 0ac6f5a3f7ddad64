"""Whether a graph may be replayed in another process: what its parameters point to, and what its nodes are.

A graph passes if every word of every parameter that is a device pointer lies in memory with a named owner, which a
later process has at the same address. Everything else is refused, by kernel and parameter. A word that looks like a
host address is no error by itself: argument structures contain padding that was never written.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from fer.cudagraph.libcuda import MEMCPY_PARAMS, MEMORYTYPE_DEVICE, MEMORYTYPE_UNIFIED
from fer.cudagraph.records import (
    ATTRIBUTE_NAMES,
    KERNEL,
    KINDS,
    MEMCPY,
    MEMSET,
    SUPPORTED,
    Array,
    Graph,
    Tables,
    attributes_of,
)

Memory = Literal["device", "host", ""]
Oracle = Callable[[int], Memory]
"""What the driver says of an address: memory of a device, pinned or mapped host memory, or nothing it knows."""

COLLECTIVES: Final = re.compile(
    r"ncclDevKernel|ncclSymk|ncclKernel|nvshmem|cross_device_reduce|multimem|"
    r"one_?shot_?all_?reduce|two_?shot_?all_?reduce|allreduce_fusion|all_?reduce_?(?:one|two)_?shot|deep_ep|mscclpp",
    re.IGNORECASE,
)
"""Kernels that hold pointers into other ranks' memory or a communicator's queues."""

RANDOM: Final = re.compile(r"philox|distribution_(?:elementwise|nullary)|fused_dropout|curand", re.IGNORECASE)
"""Kernels that read a generator's state, which torch rewrites before each replay of its own graphs."""

_LOWEST: Final = 1 << 32  # below it are numbers; the driver places nothing there
_HIGHEST: Final = 1 << 47


@dataclass(frozen=True)
class Owner:
    """Memory that a later process has at the same address. Names repeat where one thing has several parts."""

    name: str
    address: int
    size: int


@dataclass(frozen=True)
class Refusal:
    """Why one graph cannot be kept: the first place where it was seen, and how often."""

    graph: str
    reason: str
    count: int = 1

    def __str__(self) -> str:
        return f"{self.reason} (and {self.count - 1} more)" if self.count > 1 else self.reason


class Owners:
    """Owned memory, for looking up many addresses at once."""

    def __init__(self, owners: Iterable[Owner]) -> None:
        self.all = sorted((o for o in owners if o.size > 0), key=lambda owner: owner.address)
        self._starts = np.array([owner.address for owner in self.all], "<u8")
        self._sorted = self._starts.tolist()
        self._reach = np.maximum.accumulate(np.array([o.address + o.size for o in self.all] or [0], "<u8"))

    def covers(self, words: Array) -> Array:
        """For each word whether it lies in owned memory; the address behind its last byte does not."""
        if not self.all:
            return np.zeros(len(words), bool)
        place = np.searchsorted(self._starts, words, side="right").astype(np.int64) - 1
        inside: Array = (place >= 0) & (words < self._reach[np.maximum(place, 0)])
        return inside

    def name_of(self, address: int) -> str:
        """The owner of an address, ``""`` for none."""
        return next((owner.name for owner in self.holding(address)), "")

    def holding(self, address: int) -> Iterator[Owner]:
        """All owners of an address, those that begin nearest to it first."""
        place = bisect.bisect_right(self._sorted, address)
        while place and address < int(self._reach[place - 1]):
            place -= 1
            if address < self.all[place].address + self.all[place].size:
                yield self.all[place]

    def touched(self, words: Array) -> set[str]:
        """Names of all owners that any of these words points into."""
        inside = np.unique(words[self.covers(words)])
        places = np.searchsorted(self._starts, inside, side="right") - 1
        ends = np.array([owner.address + owner.size for owner in self.all], "<u8")
        plain = inside < ends[places] if len(inside) else np.zeros(0, bool)
        found = {self.all[place].name for place in np.unique(places[plain]).tolist()}
        nested = self._reach[places] != ends[places] if len(inside) else plain
        for word in inside[nested | ~plain].tolist():
            found |= {owner.name for owner in self.holding(word)}
        return found


def audit(
    tables: Tables,
    graph: Graph,
    owners: Owners,
    oracle: Oracle,
    *,
    span: tuple[int, int],
    ignore: Callable[[str], bool] | None = None,
) -> list[Refusal]:
    """All reasons against a graph and its children; none means it may be kept.

    Args:
        span: first and last address of the device's part of the arena: a word in it must have an owner, whether or
            not the driver knows it now.
        ignore: takes a kernel's name; True where what it is called does not count against it (tests).
    """
    nodes = audit_nodes(tables, graph, ignore=ignore)
    return nodes + audit_pointers(tables, graph, owners, oracle, span=span)[0]


def audit_nodes(tables: Tables, graph: Graph, *, ignore: Callable[[str], bool] | None = None) -> list[Refusal]:
    """Reasons that lie in what nodes are and what kernels are called; quick, and enough to say what may be replayed."""
    reasons: list[str] = []
    for index in np.flatnonzero(~np.isin(graph.nodes["kind"], list(SUPPORTED))).tolist():
        kind = int(graph.nodes["kind"][index])
        reasons.append(f"{KINDS.get(kind, f'unknown ({kind})')} node")
    for function in np.unique(graph.nodes["function"][graph.nodes["kind"] == KERNEL]).tolist():
        reasons += _function_trouble(tables, function, ignore)
    for chosen in np.unique(graph.nodes["attributes"]).tolist():
        if chosen >= 0 and _updatable(tables.attributes[chosen]):
            reasons.append("device-updatable node")
    reasons += _copies(graph)
    refusals = _counted(graph, reasons)
    for child in _children(graph):
        refusals += _inner(graph, audit_nodes(tables, tables.graphs[child], ignore=ignore))
    return refusals


def audit_pointers(
    tables: Tables, graph: Graph, owners: Owners, oracle: Oracle, *, span: tuple[int, int]
) -> tuple[list[Refusal], set[str]]:
    """Reasons that lie in what parameters point to, and the names of the owners they do point into."""
    words, where = _words(tables, graph)
    refusals = _counted(graph, _pointers(tables, graph, words, where, owners, oracle, span))
    used = owners.touched(words)
    for child in _children(graph):
        inner, more = audit_pointers(tables, tables.graphs[child], owners, oracle, span=span)
        refusals += _inner(graph, inner)
        used |= more
    return refusals, used


def _counted(graph: Graph, reasons: Iterable[str]) -> list[Refusal]:
    return [Refusal(graph.name, reason, count) for reason, count in Counter(reasons).items()]


def _children(graph: Graph) -> list[int]:
    return [int(child) for child in graph.nodes["child"] if child >= 0]


def _inner(graph: Graph, refusals: Iterable[Refusal]) -> list[Refusal]:
    return [Refusal(graph.name, f"in a child graph: {each.reason}", each.count) for each in refusals]


def module_refusals(tables: Tables, graph: Graph) -> list[Refusal]:
    """Reasons that lie in what became of a kernel's module, of a graph and its children."""
    found = []
    for index in tables.functions_of(graph):
        function = tables.functions[index]
        trouble = tables.images[function.image].trouble if function.image >= 0 else ""
        if trouble:
            found.append(Refusal(graph.name, f"kernel {function.name}: {trouble}"))
    return found


def _function_trouble(tables: Tables, index: int, ignore: Callable[[str], bool] | None) -> list[str]:
    if index < 0:
        return ["a kernel whose function the driver cannot name"]
    function = tables.functions[index]
    found = []
    if function.image < 0:
        found.append(f"kernel {function.name}: its binary was not seen when it was loaded")
    if ignore is not None and ignore(function.name):
        return found
    if COLLECTIVES.search(function.name):
        found.append(f"collective kernel {function.name}")
    if RANDOM.search(function.name):
        found.append(f"kernel {function.name} reads random-number state")
    return found


def _updatable(attributes: bytes) -> bool:
    (number,) = (n for n, name in ATTRIBUTE_NAMES.items() if name == "device-updatable")
    status, value = attributes_of(attributes)[number]
    return status == 0 and int.from_bytes(value[:4], "little") != 0


def _block(graph: Graph, index: int) -> bytes:
    start = int(graph.starts[index])
    return graph.params[start : start + int(graph.nodes["size"][index])].tobytes()


def _copies(graph: Graph) -> list[str]:
    """Copies that touch the host, or arrays, which are opaque handles."""
    found = []
    for index in np.flatnonzero(graph.nodes["kind"] == MEMCPY).tolist():
        row = np.frombuffer(_block(graph, index), MEMCPY_PARAMS)[0]
        for side, kind in (("from", int(row["src_type"])), ("to", int(row["dst_type"]))):
            if kind not in (MEMORYTYPE_DEVICE, MEMORYTYPE_UNIFIED):
                what = {1: "host memory", 3: "an array"}.get(kind, f"memory of kind {kind}")
                found.append(f"memcpy {side} {what}")
    return found


def _pointers(
    tables: Tables, graph: Graph, words: Array, where: Array, owners: Owners, oracle: Oracle, span: tuple[int, int]
) -> list[str]:
    likely = (words >= _LOWEST) & (words < _HIGHEST) & ~owners.covers(words)
    words, where = words[likely], where[likely]
    ours = (words >= span[0]) & (words < span[1])
    # Of what lies elsewhere the driver knows whether it is memory; of the arena it need not have any now.
    meant = ~(ours & _halves(graph, where, owners))
    words, where, ours = words[meant], where[meant], ours[meant]
    verdicts: dict[int, str] = {}
    for word in np.unique(words[~ours]).tolist():
        kind = oracle(word)
        if kind:
            verdicts[word] = "memory outside the arena" if kind == "device" else "pinned or mapped host memory"
    if not verdicts and not ours.any():
        return []
    found = []
    for word, offset, inside in zip(words.tolist(), where.tolist(), ours.tolist(), strict=True):
        verdict = "an address in the arena that nobody owns" if inside else verdicts.get(word, "")
        if verdict:
            found.append(f"{_place(tables, graph, offset)} points to {verdict}")
    return found


def _halves(graph: Graph, where: Array, owners: Owners) -> Array:
    """Which words of a packed structure are the halves of two: one beside it at its natural place is an owned pointer.

    The same bytes are not two pointers. The low half of one that lies some KiB behind a multiple of 4 GiB looks like
    the high half of an address of the arena.
    """
    blocks = np.searchsorted(graph.starts, where, side="right") - 1
    begins, sizes = graph.starts[blocks], graph.nodes["size"][blocks].astype(np.int64)
    odd = (where - begins) % 8 == 4
    padded = np.concatenate([graph.params, np.zeros(8, "<u1")])
    window = np.lib.stride_tricks.sliding_window_view(padded, 8)
    found: Array = np.zeros(len(where), bool)
    for step in (-4, 4):
        whole = odd & (where + step + 8 <= begins + sizes)
        beside = np.ascontiguousarray(window[np.where(whole, where + step, 0)]).view("<u8").reshape(-1)
        found |= whole & owners.covers(beside)
    return found


def stray(data: bytes, owners: Owners, oracle: Oracle, *, span: tuple[int, int]) -> str:
    """What kind of memory outside the arena a buffer's contents point to, ``""`` for none.

    Contents are numbers for the most part, and some of these look like addresses of the arena: only the driver's word
    for memory elsewhere counts, which no later process has there.
    """
    words = np.unique(np.frombuffer(data[: len(data) // 8 * 8], "<u8"))
    likely = (words >= _LOWEST) & (words < _HIGHEST) & ~owners.covers(words)
    outside = words[likely & ~((words >= span[0]) & (words < span[1]))]
    kinds = (oracle(word) for word in outside.tolist())
    return next(("host memory" if kind == "host" else "device memory" for kind in kinds if kind), "")


def _words(tables: Tables, graph: Graph) -> tuple[Array, Array]:
    """Every eight bytes that may be a pointer, and where each begins in params.

    They are read at offsets 0 and 4 (packed structures), but not across two parameters of a kernel: the half of one
    and the half of the next make a number that nobody meant, and that may look like an address of the arena.
    """
    inner = [_places(tables, *row) for row in graph.nodes[["kind", "function", "size"]].tolist()]
    counts = [len(each) for each in inner]
    where = np.repeat(graph.starts, counts) + np.concatenate([np.zeros(0, np.int64), *inner])
    padded = np.concatenate([graph.params, np.zeros(8, "<u1")])
    window = np.lib.stride_tricks.sliding_window_view(padded, 8)
    words: Array = np.ascontiguousarray(window[where]).view("<u8").reshape(-1)
    return words, where


def _places(tables: Tables, kind: int, function: int, size: int) -> Array:
    """Offsets of one node's words in its block."""
    if kind == KERNEL and function >= 0 and tables.functions[function].layout:
        return tables.words(function)
    if size not in _known_places:
        _known_places[size] = np.arange(0, max(size - 7, 0), 4, dtype=np.int64)
    return _known_places[size]


_known_places: dict[int, Array] = {}


def _place(tables: Tables, graph: Graph, offset: int) -> str:
    index = int(np.searchsorted(graph.starts, offset, side="right")) - 1
    while int(graph.nodes["size"][index]) == 0:  # nodes without parameters share their successor's start
        index -= 1
    row = graph.nodes[index]
    if row["kind"] == MEMSET:
        return "memset"
    if row["kind"] == MEMCPY:
        return "memcpy"
    function = tables.functions[int(row["function"])]
    inner = offset - int(graph.starts[index])
    return f"kernel {function.name}, parameter {function.parameter_at(inner)}"


def summarize(refusals: Sequence[Refusal], limit: int = 3) -> str:
    """Reasons for one line of a report."""
    texts = [str(refusal) for refusal in refusals[:limit]]
    return "; ".join(texts) + (f"; {len(refusals) - limit} more" if len(refusals) > limit else "")
