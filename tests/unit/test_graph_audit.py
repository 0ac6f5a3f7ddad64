"""What may be kept: owners of pointers, refusals by name. Over recorded tables, a real archive's among them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from fer.cudagraph import archive as archives
from fer.cudagraph.audit import Owner, Owners, Refusal, audit, audit_pointers, module_refusals, summarize
from fer.cudagraph.records import (
    ATTRIBUTE,
    ATTRIBUTE_IDS,
    FUNCTION_ATTRIBUTES,
    NODE,
    Function,
    Graph,
    Image,
    Tables,
)

RECORDED = Path(__file__).parent.parent / "data" / "h200.fergraph"
SPAN = (0x3A7B_0000_0000, 0x3B7B_0000_0000)
KV = Owner("kv", 0x3A7B_0000_0000, 1 << 20)
NOWHERE = 0x7F00_0000_0000
Layout = tuple[tuple[int, int], ...]


def oracle(address: int) -> str:
    return {0x7F: "device", 0x7E: "host"}.get(address >> 40, "")


def graph_of(
    kind: int, block: bytes, name: str = "kernel", *, image: int = 0, trouble: str = "", layout: Layout = ()
) -> Tables:
    nodes = np.zeros(1, NODE)
    nodes["kind"], nodes["size"], nodes["attributes"], nodes["child"] = kind, len(block), -1, -1
    nodes["function"] = 0 if kind == 0 else -1
    layout = layout or tuple((at, 8) for at in range(0, len(block), 8))
    function = Function(name, image, layout, (0,) * FUNCTION_ATTRIBUTES)
    edges = np.zeros(0, [("source", "<u4"), ("target", "<u4"), ("data", "<u8")])
    graph = Graph("decode/8", nodes, edges, np.frombuffer(block, "<u1"))
    return Tables(graphs=[graph], functions=[function], images=[Image(b"", "0" * 64, (), trouble)])


def reasons(tables: Tables) -> list[str]:
    found = audit(tables, tables.graphs[0], Owners([KV]), oracle, span=SPAN)  # type: ignore[arg-type]
    return [str(each) for each in found]


def kernel(*words: int, **more: object) -> Tables:
    return graph_of(0, struct.pack(f"<{len(words)}Q", *words), **more)  # type: ignore[arg-type]


def test_owned_pointers_and_numbers_pass() -> None:
    assert reasons(kernel(KV.address, KV.address + KV.size - 1, 7, 1 << 63)) == []


def test_the_end_of_one_owner_is_not_its_own() -> None:
    assert "nobody owns" in reasons(kernel(KV.address + KV.size))[0]


def test_what_looks_like_a_host_address_is_no_error() -> None:
    assert reasons(kernel(KV.address, 0x5555_0000_1000)) == []


def test_a_foreign_pointer_is_named_with_kernel_and_parameter() -> None:
    assert reasons(kernel(3, NOWHERE)) == ["kernel kernel, parameter 1 points to memory outside the arena"]


def test_mapped_host_memory_is_refused() -> None:
    assert reasons(kernel(0x7E00_0000_0040)) == ["kernel kernel, parameter 0 points to pinned or mapped host memory"]


def test_an_address_of_the_arena_needs_an_owner() -> None:
    assert "nobody owns" in reasons(kernel(KV.address + (1 << 30)))[0]


def test_packed_structures_are_read_at_half_words_too() -> None:
    block = struct.pack("<IQI", 1, NOWHERE, 2)
    assert "memory outside the arena" in reasons(graph_of(0, block, layout=((0, 16),)))[0]


@pytest.mark.parametrize("high", [(SPAN[0] >> 32) + 1, (SPAN[1] >> 32) - 1, NOWHERE >> 32])
def test_the_halves_of_two_parameters_make_no_address(high: int) -> None:
    # A functor of one byte, then a number that is as the high half of an address of the arena.
    block = struct.pack("<IB3xIIQ", 4096, 1, high, 0, KV.address)
    assert reasons(graph_of(0, block, layout=((0, 4), (4, 1), (8, 4), (12, 4), (16, 8)))) == []
    assert len(reasons(graph_of(0, block, layout=((0, 4), (4, 12), (16, 8))))) == 1, "within one it counts"


@pytest.mark.parametrize("before", [7, KV.address + 8])
def test_the_halves_of_two_words_of_a_structure_make_no_address(before: int) -> None:
    near = KV.address + (SPAN[1] >> 32) - 1  # its low half is the high half of an address at the arena's end
    layout = ((0, 24),)
    assert reasons(graph_of(0, struct.pack("<QQQ", before, near, 5), layout=layout)) == []
    packed = struct.pack("<IQIQ", 7, KV.address + (1 << 30), 0, 5)
    assert "nobody owns" in reasons(graph_of(0, packed, layout=layout))[0], "nothing else explains it"


@pytest.mark.parametrize("beside", [2, KV.address >> 32])
def test_a_packed_pointer_that_the_driver_knows_counts_whatever_is_beside_it(beside: int) -> None:
    block = struct.pack("<IQI", 1, NOWHERE, beside)
    assert "memory outside the arena" in reasons(graph_of(0, block, layout=((0, 16),)))[0]


def test_a_pointer_at_its_natural_place_counts_whatever_is_beside_it() -> None:
    for pair in ((NOWHERE, KV.address), (KV.address, NOWHERE), (KV.address + (1 << 30), KV.address)):
        assert len(reasons(graph_of(0, struct.pack("<QQ", *pair), layout=((0, 16),)))) == 1


def test_a_block_longer_than_its_parameters_is_read_where_they_are() -> None:
    block = struct.pack("<QQQ", KV.address, NOWHERE, NOWHERE)
    assert reasons(graph_of(0, block, layout=((0, 8),))) == []
    assert len(reasons(graph_of(0, block, layout=((0, 16),)))) == 1


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "_ZN4vllm19cross_device_reduce_1stageI13__nv_bfloat16Li2EEEvPNS_8RankDataE",
        "one_shot_all_reduce_kernel",
        "nvshmem_put_nbi",
    ],
)
def test_collectives_are_refused_by_name(name: str) -> None:
    assert reasons(kernel(1, name=name)) == [f"collective kernel {name}"]


def test_random_numbers_are_refused_by_name() -> None:
    assert "random-number state" in reasons(kernel(1, name="distribution_elementwise_grid_stride_kernel"))[0]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (3, "host function node"), (6, "event wait node"), (7, "event record node"), (10, "memory allocation node"),
        (11, "memory free node"), (13, "conditional node"), (8, "external semaphore signal node"),
        (99, "unknown (99) node"),
    ],
)  # fmt: skip
def test_nodes_of_other_kinds_are_refused_by_name(kind: int, what: str) -> None:
    assert reasons(graph_of(kind, b"")) == [what]


@pytest.mark.parametrize(
    ("source", "target", "what"), [(1, 2, "memcpy from host memory"), (2, 3, "memcpy to an array")]
)
def test_copies_stay_on_the_device(source: int, target: int, what: str) -> None:
    block = bytearray(200)
    struct.pack_into("<I", block, 32, source)
    struct.pack_into("<I", block, 120, target)
    assert what in reasons(graph_of(1, bytes(block)))


def test_a_memsets_target_needs_an_owner() -> None:
    assert reasons(graph_of(2, struct.pack("<QQIIQQ", NOWHERE, 0, 0, 1, 4, 1))) == [
        "memset points to memory outside the arena"
    ]


def test_a_device_updatable_node_is_refused() -> None:
    tables = kernel(1)
    rows = np.zeros(len(ATTRIBUTE_IDS), ATTRIBUTE)
    rows["value"][ATTRIBUTE_IDS.index(13)] = np.void(b"\x01".ljust(64, b"\0"))
    tables.graphs[0].nodes["attributes"] = tables.attribute_set(rows.tobytes())
    assert reasons(tables) == ["device-updatable node"]


def test_a_kernel_without_its_binary_is_refused() -> None:
    assert reasons(kernel(1, image=-1)) == ["kernel kernel: its binary was not seen when it was loaded"]


def test_a_module_that_may_not_be_copied_is_refused() -> None:
    tables = kernel(1, trouble="its module's variable queue was set to a pointer outside the arena")
    assert [str(each) for each in module_refusals(tables, tables.graphs[0])] == [
        "kernel kernel: its module's variable queue was set to a pointer outside the arena"
    ]


def test_children_are_looked_into() -> None:
    tables = kernel(NOWHERE)
    child = tables.graphs[0]
    parent = graph_of(4, b"").graphs[0]
    parent.nodes["child"] = 0
    tables.graphs.append(parent)
    child.parent = 1
    found = audit(tables, parent, Owners([KV]), oracle, span=SPAN)  # type: ignore[arg-type]
    assert "in a child graph" in str(found[0])


def test_what_a_graph_uses_is_named_by_all_its_owners() -> None:
    inside = Owner("tensor/view", KV.address + 4096, 4096)  # two names for one memory
    apart = Owner("scratch/0", KV.address + (4 << 20), 512)
    owners = Owners([KV, inside, apart])
    tables = kernel(KV.address + 8192 - 1, 7, NOWHERE)
    refusals, used = audit_pointers(tables, tables.graphs[0], owners, oracle, span=SPAN)  # type: ignore[arg-type]
    assert used == {"kv", "tensor/view"}
    assert "outside the arena" in str(refusals[0])
    assert owners.touched(np.array([KV.address + 8192, apart.address], "<u8")) == {"kv", "scratch/0"}
    assert owners.touched(np.zeros(0, "<u8")) == set()
    assert Owners([]).touched(np.array([5], "<u8")) == set()


def test_equal_reasons_are_counted() -> None:
    assert str(Refusal("g", "why", 3)) == "why (and 2 more)"
    assert summarize([Refusal("g", str(n)) for n in range(5)]) == "0; 1; 2; 2 more"


def test_a_recorded_archive_passes_with_its_owners_and_is_refused_without() -> None:
    archive = archives.read(RECORDED)
    pool = archive.facts["ranges"]["pool"]
    owners = [*(Owner(*row) for row in archive.facts["owners"]), Owner("pool", pool["address"], pool["used"])]
    for graph in archive.tables.top():
        assert audit(archive.tables, graph, Owners(owners), oracle, span=SPAN) == []  # type: ignore[arg-type]
        without = [owner for owner in owners if owner.name != "tensor/weight"]
        (refusal,) = audit(archive.tables, graph, Owners(without), oracle, span=SPAN)  # type: ignore[arg-type]
        assert refusal.reason == "kernel rms_norm, parameter 1 points to an address in the arena that nobody owns"
