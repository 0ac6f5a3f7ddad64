"""The plan of slabs, over random models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fer.memory.base import ALIGNMENT
from fer.weights import layout
from fer.weights.layout import Piece

GRANULARITY = {"cpu": 4096, "cuda": 2 << 20}
PIECES = st.lists(st.tuples(st.sampled_from(["cpu", "cuda"]), st.integers(0, 5 << 20)), max_size=40)


def pieces_of(sizes: list[tuple[str, int]]) -> list[Piece]:
    at, pieces = 1 << 30, []
    for number, (device, size) in enumerate(sizes):
        pieces.append(Piece(storage=number, device=device, address=at, nbytes=size))
        at += size + 512
    return pieces


@given(PIECES, st.sampled_from([0, 1 << 20, 8 << 20]))
def test_every_storage_has_one_place_of_its_own(sizes: list[tuple[str, int]], wanted: int) -> None:
    pieces = pieces_of(sizes)
    slabs = layout.plan(pieces, GRANULARITY, wanted=wanted)
    placed = [(slab, index, offset) for slab in slabs for index, offset in slab.placed]
    assert sorted(index for _, index, _ in placed) == [p.storage for p in pieces if p.nbytes]
    for slab in slabs:
        assert slab.size % GRANULARITY[slab.device] == 0
        end = 0
        for index, offset in slab.placed:
            assert pieces[index].device == slab.device
            assert offset % ALIGNMENT == 0
            assert offset >= end
            end = offset + pieces[index].nbytes
        assert end <= slab.size


@given(PIECES)
def test_storages_keep_the_order_of_their_addresses(sizes: list[tuple[str, int]]) -> None:
    pieces = pieces_of(sizes)
    slabs = layout.plan(list(reversed(pieces)), GRANULARITY, wanted=4 << 20)
    for device in GRANULARITY:
        order = [pieces[index].address for slab in slabs if slab.device == device for index, _ in slab.placed]
        assert order == sorted(order)


def test_a_storage_larger_than_a_slab_has_one_of_its_own() -> None:
    slabs = layout.plan(pieces_of([("cpu", 100), ("cpu", 9 << 20), ("cpu", 100)]), GRANULARITY, wanted=1 << 20)
    assert [len(slab.placed) for slab in slabs] == [1, 1, 1]


def test_slab_size_grows_with_the_model_within_limits() -> None:
    assert layout.slab_bytes(1) == 64 << 20
    assert layout.slab_bytes(96 << 30) == 2 << 30
    assert layout.slab_bytes(1 << 40) == 4 << 30
    assert layout.slab_bytes(10 << 30) % (2 << 20) == 0
