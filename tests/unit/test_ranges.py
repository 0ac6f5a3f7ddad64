"""Named ranges: their books with the driver. The driver is a pretended one; torch's side is tested on a GPU."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import pytest

from fer.errors import DriverError, MappingError, OutOfMemory
from fer.memory import arena, driver, gpus
from fer.memory import ranges as memory
from fer.memory.device import CudaDevice
from fer.memory.fdpass import close_all
from fer.memory.ranges import Ranges
from tests.support.memory_driver import GIB, FakeDriver, Status

pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="the allocator has no code")
MIB = 1 << 20


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    pretended = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: pretended)
    monkeypatch.setattr(gpus, "_sysfs_buses", lambda devices: ["0000:0a:00.0", "0000:1b:00.0"])
    monkeypatch.setattr(memory, "_granules", {})
    gpus.arena_index.cache_clear()
    yield pretended
    assert pretended.depth == 0, "a context was pushed and not popped"


@pytest.fixture
def ranges(fake: FakeDriver) -> Ranges:
    return memory.reserve(CudaDevice(0))


def test_ranges_lie_where_the_arena_says(fake: FakeDriver, ranges: Ranges) -> None:
    base = arena.BASE + arena.SPAN
    assert ranges.span == (base, base + arena.SPAN)
    assert {each.name: each.address - base for each in ranges.all} == {
        "kv": 512 * GIB, "static": 768 * GIB, "scratch": 800 * GIB, "pool": 832 * GIB,
    }  # fmt: skip
    assert fake.used() == 0


def test_a_taken_address_is_refused_and_leaves_nothing(fake: FakeDriver) -> None:
    fake.reserved[arena.BASE + arena.SPAN + arena.SCRATCH.offset] = 4096
    before = dict(fake.reserved)
    with pytest.raises(MappingError, match="scratch cannot lie"):
        memory.reserve(CudaDevice(0))
    assert fake.reserved == before


def test_memory_is_mapped_ahead_cleared_and_handed_out_in_order(fake: FakeDriver, ranges: Ranges) -> None:
    pool = ranges.pool
    assert pool.allocator.take(1) == 0
    pool.map(130 * MIB)
    assert pool.mapped == 130 * MIB
    assert fake.cleared == [
        (pool.address, 64 * MIB),
        (pool.address + 64 * MIB, 64 * MIB),
        (pool.address + 128 * MIB, 2 * MIB),
    ]
    assert [pool.allocator.take(3 * MIB), pool.allocator.take(1)] == [pool.address, pool.address + 4 * MIB]
    assert pool.used == 6 * MIB
    assert pool.allocator.take(128 * MIB) == 0


def test_what_nobody_took_goes_back(fake: FakeDriver, ranges: Ranges) -> None:
    pool = ranges.pool
    pool.map(256 * MIB)
    pool.allocator.take(65 * MIB)
    pool.trim()
    assert (pool.mapped, fake.used()) == (128 * MIB, 128 * MIB)
    assert pool.allocator.take(63 * MIB) == 0
    assert pool.allocator.take(62 * MIB) == pool.address + 66 * MIB


def test_only_the_granules_of_parts_are_mapped(fake: FakeDriver, ranges: Ranges) -> None:
    scratch = ranges.scratch
    base = scratch.address
    scratch.map_parts([(base + 900 * MIB, 512), (base + 5 * MIB, 4 * MIB), (base + 8 * MIB + 512, 64)])
    assert fake.cleared == [(base + 4 * MIB, 6 * MIB), (base + 900 * MIB, 2 * MIB)]
    assert fake.used() == 8 * MIB
    with pytest.raises(MappingError, match="in use"):
        scratch.map_parts([(base, 1)])
    scratch.close()
    assert fake.used() == 0
    with pytest.raises(MappingError, match="outside"):
        scratch.map_parts([(base + scratch.size, 1)])
    scratch.map_parts([])
    assert (fake.used(), scratch.mapped) == (0, 0)


def test_parts_without_memory_leave_nothing(fake: FakeDriver, ranges: Ranges) -> None:
    base = ranges.scratch.address
    with pytest.raises(OutOfMemory, match="range scratch"):
        ranges.scratch.map_parts([(base, GIB), (base + 2 * GIB, 20 * GIB)])
    assert (fake.used(), ranges.scratch.mapped) == (0, 0)


def test_no_memory_says_which_range_and_keeps_the_rest(fake: FakeDriver, ranges: Ranges) -> None:
    ranges.kv.map(7 * GIB, chunk=GIB)
    with pytest.raises(OutOfMemory, match="range pool") as caught:
        ranges.pool.map(2 * GIB, chunk=GIB)
    assert caught.value.fields == {"needed": GIB, "free": 0}
    assert ranges.pool.mapped == GIB


@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemsetD8"])
def test_a_failed_map_leaves_nothing(fake: FakeDriver, ranges: Ranges, call: str) -> None:
    fake.fail(call)
    with pytest.raises(DriverError):
        ranges.static.map(MIB)
    assert fake.fired == [call]
    assert (fake.used(), ranges.static.mapped, fake.mapped) == (0, 0, {})


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8"])
def test_whatever_lacks_memory_says_so(fake: FakeDriver, ranges: Ranges, call: str) -> None:
    ways: list[Callable[[], None]] = [
        lambda: ranges.static.map(MIB),
        lambda: ranges.scratch.map_parts([(ranges.scratch.address, MIB)]),
        lambda: ranges.kv.map_over_and_over(64 * MIB, MIB),
    ]
    for way in ways:
        fake.fail(call, status=Status.CUDA_ERROR_OUT_OF_MEMORY)
        with pytest.raises(OutOfMemory, match=r"the range .* needs"):
            way()
        assert (fake.used(), fake.mapped) == (0, {})


def test_more_than_the_range_has(ranges: Ranges) -> None:
    with pytest.raises(MappingError, match="range static"):
        ranges.static.map(33 * GIB)


def test_one_slab_stands_in_for_a_whole_cache(fake: FakeDriver, ranges: Ranges) -> None:
    kv = ranges.kv
    kv.map_over_and_over(1000 * MIB, 64 * MIB)
    assert sum(size for size, _ in fake.mapped.values()) == 1000 * MIB
    assert fake.used() == (64 + 1000 % 64) * MIB  # the slab, and a smaller one for what is left over
    assert sorted(fake.mapped)[0] == kv.address
    assert sum(size for _, size in fake.cleared) == fake.used(), "both of them"
    with pytest.raises(MappingError, match="mapped already"):
        kv.map_over_and_over(64 * MIB, 64 * MIB)
    kv.close()
    assert (fake.used(), fake.mapped, kv.mapped) == (0, {}, 0)


@pytest.mark.parametrize(
    ("call", "after"),
    [("cuMemCreate", 0), ("cuMemCreate", 1), ("cuMemMap", 0), ("cuMemMap", 9), ("cuMemSetAccess", 0),
     ("cuMemsetD8", 0), ("cuCtxSynchronize", 0)],
)  # fmt: skip
def test_a_slab_that_cannot_be_made_leaves_nothing_and_is_made_again(
    fake: FakeDriver, ranges: Ranges, call: str, after: int
) -> None:
    fake.fail(call, after=after)
    with pytest.raises(DriverError):
        ranges.kv.map_over_and_over(1000 * MIB, 64 * MIB)
    assert (fake.used(), fake.mapped, ranges.kv.mapped) == (0, {}, 0)
    ranges.kv.map_over_and_over(1000 * MIB, 64 * MIB)
    assert fake.used() == (64 + 1000 % 64) * MIB


def test_a_closed_range_can_be_mapped_again(fake: FakeDriver, ranges: Ranges) -> None:
    ranges.scratch.map(MIB)
    ranges.scratch.close()
    assert fake.used() == 0
    ranges.scratch.map(MIB)
    assert ranges.scratch.allocator.take(1) == ranges.scratch.address


def parked(ranges: Ranges) -> memory.NamedRange:
    """A cache of 150 MiB over one slab."""
    kv = ranges.kv
    kv.map_over_and_over(1000 * MIB, 64 * MIB)
    assert kv.allocator.take(150 * MIB) == kv.address
    return kv


def test_memory_takes_the_place_of_a_slab_and_goes_again(fake: FakeDriver, ranges: Ranges) -> None:
    kv = parked(ranges)
    for _ in range(2):
        del fake.cleared[:]
        kv.back()
        assert (kv.mapped, fake.used()) == (150 * MIB, 150 * MIB), "as much as was handed out"
        assert [(at - kv.address, size) for at, (size, _) in sorted(fake.mapped.items())] == [
            (0, 64 * MIB), (64 * MIB, 64 * MIB), (128 * MIB, 22 * MIB),
        ]  # fmt: skip
        assert sum(size for _, size in fake.cleared) == 150 * MIB
        with pytest.raises(MappingError, match="has its memory"):
            kv.back()
        kv.rest()
        assert (kv.mapped, fake.used(), fake.mapped) == (0, 0, {}), "not a byte is left"
        assert kv.allocator.take(1) == 0, "nothing more is handed out"
    kv.close()
    assert (fake.used(), fake.mapped, kv.mapped) == (0, {}, 0)


def test_a_cache_at_rest_that_gets_no_memory_rests_on(fake: FakeDriver, ranges: Ranges) -> None:
    kv = parked(ranges)
    kv.rest()
    ranges.pool.map(8 * GIB - 100 * MIB, chunk=8 * GIB)
    with pytest.raises(OutOfMemory, match="range kv"):
        kv.back()
    assert (kv.mapped, fake.used()) == (0, 8 * GIB - 100 * MIB)
    ranges.pool.close()
    kv.back()
    assert (kv.mapped, fake.used()) == (150 * MIB, 150 * MIB)


@pytest.mark.parametrize(
    ("call", "after"), [("cuMemMap", 0), ("cuMemMap", 2), ("cuMemSetAccess", 0), ("cuMemsetD8", 1)]
)
@pytest.mark.parametrize("status", [Status.CUDA_ERROR_OUT_OF_MEMORY, Status.CUDA_ERROR_INVALID_VALUE])
def test_a_cache_that_cannot_be_mapped_is_at_rest(
    fake: FakeDriver, ranges: Ranges, call: str, after: int, status: Status
) -> None:
    kv = parked(ranges)
    fake.fail(call, after=after, status=status)
    with pytest.raises(OutOfMemory if status == Status.CUDA_ERROR_OUT_OF_MEMORY else DriverError):
        kv.back()
    assert (kv.mapped, fake.used(), fake.mapped, kv.backed) == (0, 0, {}, False)
    kv.back()
    assert (kv.mapped, fake.used()) == (150 * MIB, 150 * MIB)


def test_a_cache_without_memory_stays_parked(fake: FakeDriver, ranges: Ranges) -> None:
    kv = parked(ranges)
    before, used = dict(fake.mapped), fake.used()
    ranges.pool.map(8 * GIB - used - 100 * MIB, chunk=8 * GIB)
    pool = dict(fake.mapped)
    with pytest.raises(OutOfMemory, match="range kv") as caught:
        kv.back()
    assert caught.value.fields == {"needed": 86 * MIB, "free": 36 * MIB}
    assert (fake.mapped, kv.mapped, fake.used()) == (pool, 1000 * MIB, 8 * GIB - 100 * MIB)
    assert before.items() <= fake.mapped.items()
    ranges.pool.close()
    kv.back()
    assert fake.used() == 150 * MIB


def test_an_empty_cache_needs_nothing(fake: FakeDriver, ranges: Ranges) -> None:
    ranges.kv.map_over_and_over(64 * MIB, 64 * MIB)
    ranges.kv.back()
    assert (ranges.kv.mapped, fake.used(), fake.mapped) == (0, 0, {})
    ranges.kv.rest()
    assert fake.used() == 0


def test_memory_that_was_exported_is_mapped_again_as_it_is(fake: FakeDriver, ranges: Ranges, no_fd_leak: None) -> None:
    kv = ranges.kv
    kv.map(150 * MIB)
    kv.allocator.take(130 * MIB)
    kept = kv.export()
    assert [size for size, _ in kept] == [64 * MIB, 64 * MIB, 22 * MIB]
    kv.rest()
    assert fake.used() == 150 * MIB, "it lives by its descriptors"
    del fake.cleared[:]
    kv.back(kept=kept)
    assert (kv.mapped, fake.used(), fake.cleared, kv.backed) == (150 * MIB, 150 * MIB, [], True)
    assert [at - kv.address for at in sorted(fake.mapped)] == [0, 64 * MIB, 128 * MIB]
    kv.rest()
    fake.fail("cuMemImportFromShareableHandle", after=1, status=Status.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory):
        kv.back(kept=kept)
    assert (fake.mapped, fake.handles, kv.backed) == ({}, {}, False)
    kv.back(kept=kept)
    close_all([fd for _, fd in kept])
    kv.rest()
    assert (fake.mapped, fake.handles) == ({}, {})


@pytest.mark.parametrize("taken", [20, 64, 160])
def test_kept_memory_of_another_size_is_refused_and_nothing_changes(
    fake: FakeDriver, ranges: Ranges, taken: int, no_fd_leak: None
) -> None:
    kv = ranges.kv
    kv.map(150 * MIB)
    kept = kv.export()
    kv.close()
    kv.map_over_and_over(200 * MIB, 64 * MIB)
    assert kv.allocator.take(taken * MIB)
    before, used = dict(fake.mapped), fake.used()
    with pytest.raises(MappingError, match="does not fit"):
        kv.back(kept=kept)
    assert (fake.mapped, fake.used(), kv.backed) == (before, used, False)
    close_all([fd for _, fd in kept])
    kv.back()
    assert kv.backed


def test_a_slab_that_stands_for_a_cache_is_not_exported(fake: FakeDriver, ranges: Ranges) -> None:
    kv = parked(ranges)
    with pytest.raises(MappingError, match="cannot be exported"):
        kv.export()
    kv.rest()
    assert kv.export() == []
