"""What the CUDA backends keep books on: addresses, handles, descriptors, rollback. The driver is a pretended one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fer.errors import DriverError, MappingError, OutOfMemory, SlabLost
from fer.memory import arena, driver, gpus, ipc
from fer.memory.cuda import CudaBackend
from fer.memory.fd import Fd
from tests.support.descriptors import leaked, open_descriptors
from tests.support.memory_driver import GIB, FakeDriver, Status

MIB = 1 << 20
SIZE = 4 * MIB


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    pretended = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: pretended)
    monkeypatch.setattr(gpus, "_sysfs_buses", lambda devices: ["0000:0a:00.0", "0000:1b:00.0"])
    gpus.arena_index.cache_clear()
    yield pretended
    assert pretended.depth == 0, "a context was pushed and not popped"


def _state(fake: FakeDriver) -> tuple[object, ...]:
    return dict(fake.handles), dict(fake.mapped), dict(fake.reserved), fake.used() - _exported_bytes(fake)


def _exported_bytes(fake: FakeDriver) -> int:
    held = set(fake.handles.values()) | {number for _, number in fake.mapped.values()}
    return sum(fake.allocations[number] for number in fake.exported - held)


def _exports(backend: CudaBackend, count: int, *, size: int = SIZE) -> list[Fd]:
    made = [backend.create(size) for _ in range(count)]
    fds = [mapping.export() for mapping in made]
    for mapping in made:
        mapping.close()
    return fds


def test_the_base_follows_the_hosts_bus_order(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    assert backend.base == 0x3A7B_0000_0000 + (1 << 40)
    assert fake.reserved == {backend.base: 512 * GIB}
    assert backend.gpu == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert (backend.kind, backend.device, backend.granularity, backend.fixed) == ("cuda", "cuda:0", 2 * MIB, True)


def test_a_slab_is_made_writable_and_closed_without_a_trace(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    before = _state(fake)
    mapping = backend.create(SIZE - 1, address=backend.base + 2 * MIB)
    assert (mapping.address, mapping.size, mapping.moved) == (backend.base + 2 * MIB, SIZE, False)
    assert fake.allowed == [(mapping.address, SIZE, "READWRITE")]
    mapping.protect()
    mapping.protect()
    assert fake.allowed[1:] == [(mapping.address, SIZE, "PROT_READ"[5:])]
    mapping.close()
    mapping.close()
    assert _state(fake) == before
    with pytest.raises(MappingError):
        mapping.export()


def test_a_dropped_mapping_closes_itself(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    mapping = backend.create(SIZE, address=backend.base)
    del mapping
    assert fake.used() == 0 and not fake.mapped
    again = backend.create(SIZE, address=backend.base)
    assert not again.moved


def test_two_slabs_never_share_addresses(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    first = backend.create(SIZE, address=backend.base)
    second = backend.create(SIZE, address=backend.base + 2 * MIB)
    assert second.moved and second.address != first.address
    second.close()
    assert set(fake.reserved) == {backend.base}


@pytest.mark.parametrize("off", [-2 * MIB, 512 * GIB - 2 * MIB, 4096])
def test_addresses_outside_the_range_are_moved(fake: FakeDriver, off: int) -> None:
    backend = CudaBackend(0)
    assert backend.create(SIZE, address=backend.base + off).moved


def test_a_taken_base_moves_every_slab(fake: FakeDriver) -> None:
    fake.grant_hint = False
    backend = CudaBackend(0)
    assert not backend.fixed and fake.reserved == {}
    mapping = backend.create(SIZE, address=backend.base)
    assert mapping.moved
    mapping.close()
    assert fake.reserved == {}


def test_a_base_the_driver_refuses_moves_every_slab(fake: FakeDriver) -> None:
    fake.fail("cuMemAddressReserve", status=Status.CUDA_ERROR_OUT_OF_MEMORY)
    backend = CudaBackend(0)
    assert not backend.fixed
    assert backend.create(SIZE, address=backend.base).moved


def test_attached_slabs_side_by_side_take_one_access_call(fake: FakeDriver, no_fd_leak: None) -> None:
    backend = CudaBackend(0)
    fds = _exports(backend, 4)
    fake.allowed.clear()
    addresses = [backend.base, backend.base + SIZE, backend.base + 2 * SIZE, backend.base + 8 * SIZE]
    mappings = backend.attach_many([(fd, SIZE, address) for fd, address in zip(fds, addresses, strict=True)])
    assert fake.allowed == [(backend.base, 3 * SIZE, "READ"), (backend.base + 8 * SIZE, SIZE, "READ")]
    assert all(fd.closed for fd in fds) and not fake.handles, "the mapping alone keeps the memory"
    assert [mapping.address for mapping in mappings] == addresses
    with pytest.raises(MappingError):
        mappings[0].export()
    for mapping in mappings:
        mapping.close()
    assert not fake.mapped


STEPS = (
    "cuMemImportFromShareableHandle",
    "cuMemGetAllocationPropertiesFromHandle",
    "cuMemMap",
    "cuMemSetAccess",
)


@pytest.mark.parametrize("call", STEPS)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_failed_attach_leaves_nothing(fake: FakeDriver, call: str, after: int, fixed: bool) -> None:
    fake.grant_hint = fixed
    backend = CudaBackend(0)
    fds_before = open_descriptors()
    fds = _exports(backend, 3)
    before = _state(fake)
    fake.fail(call, after=0 if fixed and call == "cuMemSetAccess" else after)
    with pytest.raises((SlabLost, MappingError)):
        backend.attach_many([(fd, SIZE, backend.base + n * SIZE) for n, fd in enumerate(fds)])
    assert fake.fired == [call]
    assert _state(fake) == before
    assert all(fd.closed for fd in fds) and not leaked(fds_before, open_descriptors())
    assert backend.create(SIZE, address=backend.base).moved is not fixed, "the addresses are free again"


@pytest.mark.parametrize("call", ["cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_an_attach_without_memory_speaks_against_no_slab(fake: FakeDriver, call: str) -> None:
    backend = CudaBackend(0)
    fds = _exports(backend, 1)
    before = _state(fake)
    fake.fail(call, status=Status.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory):
        backend.attach_many([(fd, SIZE, backend.base) for fd in fds])
    assert fake.fired == [call] and _state(fake) == before


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("fixed", [True, False])
def test_a_failed_create_leaves_nothing(fake: FakeDriver, call: str, fixed: bool) -> None:
    fake.grant_hint = fixed
    backend = CudaBackend(0)
    before = _state(fake)
    fake.fail(call)
    with pytest.raises(MappingError):
        backend.create(SIZE, address=0 if call == "cuMemAddressReserve" else backend.base)
    assert fake.fired == [call] and _state(fake) == before


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_no_memory_says_how_much_was_needed(fake: FakeDriver, call: str) -> None:
    backend = CudaBackend(0)
    before = _state(fake)
    fake.fail(call, status=Status.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(OutOfMemory) as caught:
        backend.create(SIZE)
    assert caught.value.fields["needed"] == SIZE and caught.value.fields["free"] > 0
    assert _state(fake) == before


def test_more_than_the_device_has(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    with pytest.raises(OutOfMemory) as caught:
        backend.create(9 * GIB)
    assert caught.value.fields == {"needed": 9 * GIB, "free": 8 * GIB}
    assert backend.room().free == 8 * GIB


def test_descriptors_that_are_no_slabs(fake: FakeDriver, no_fd_leak: None) -> None:
    backend = CudaBackend(0)
    with pytest.raises(SlabLost):
        backend.attach(Fd(os.open("/dev/null", os.O_RDONLY)), SIZE)
    (fd,) = _exports(backend, 1)
    with pytest.raises(SlabLost):
        backend.attach(fd, 2 * SIZE)
    with pytest.raises(SlabLost):
        backend.attach(Fd(os.open("/dev/null", os.O_RDONLY)), 4096)


def test_a_slab_of_another_card_is_never_mapped(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    (fd,) = _exports(backend, 1)
    fake.holder_ordinal = 1
    with pytest.raises(MappingError, match="cuda:1"):
        backend.attach(fd, SIZE)
    assert not fake.mapped


def test_memory_dropped_during_a_capture_is_given_back_later(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    mapping = backend.create(SIZE, address=backend.base)
    fake.fail("cuCtxSynchronize", status=Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    mapping.close()
    assert fake.mapped, "nothing is unmapped under a capture"
    assert backend.create(SIZE, address=backend.base).moved is False
    assert backend.room().free == 8 * GIB


def test_what_cannot_be_unmapped_is_not_mapped_over(fake: FakeDriver) -> None:
    backend = CudaBackend(0)
    mapping = backend.create(SIZE, address=backend.base)
    fake.fail("cuMemUnmap")
    mapping.close()
    assert backend.create(SIZE, address=backend.base).moved


def test_a_device_without_descriptors_points_to_the_other_transport(fake: FakeDriver) -> None:
    fake.shares = 0
    with pytest.raises(MappingError, match="cuda-ipc"):
        CudaBackend(0)


def test_mig_instances_carry_their_own_uuid(fake: FakeDriver) -> None:
    fake.name = b"Pretended GPU MIG 1g.10gb"
    assert CudaBackend(0).gpu.startswith("MIG-0001")


def test_an_error_keeps_the_drivers_code(fake: FakeDriver) -> None:
    fake.fail("cuDeviceGet", status=Status.CUDA_ERROR_OUT_OF_MEMORY)
    with pytest.raises(DriverError, match="cuDeviceGet failed with CUDA_ERROR_OUT_OF_MEMORY") as caught:
        CudaBackend(0)
    assert driver.code_of(caught.value) == 2 and caught.value.fields["call"] == "cuDeviceGet"


def test_spans_refuse_overlaps_and_free_exactly() -> None:
    spans = arena.Spans(1000, 100)
    assert spans.take(1000, 10) and spans.take(1020, 10) and spans.take(1010, 10)
    for address, size in ((1000, 1), (1005, 10), (1029, 2), (999, 5), (1095, 6), (1050, 0), (990, 200)):
        assert not spans.take(address, size), (address, size)
    spans.give(1015)
    assert not spans.take(1010, 10)
    spans.give(1010)
    assert spans.take(1010, 10) and spans.take(1030, 70)


def test_the_ranges_fill_a_span_without_overlap_and_stay_below_programs() -> None:
    end = 0
    for part in arena.RANGES:
        assert part.offset == end
        end += part.size
    assert end == arena.SPAN
    assert arena.address_of(0) == 0x3A7B_0000_0000
    assert arena.address_of(arena.DEVICES - 1) + arena.SPAN <= 0x5500_0000_0000
    with pytest.raises(ValueError):
        arena.address_of(arena.DEVICES)


def test_ipc_slabs_travel_as_sealed_frames(fake: FakeDriver, no_fd_leak: None) -> None:
    backend = ipc.IpcBackend(0)
    made = backend.create(SIZE)
    made.protect()
    fd = made.export()
    got = backend.attach(fd.dup(), SIZE, address=made.address)
    assert got.kind == "cuda-ipc" and got.moved and got.size == SIZE
    with pytest.raises(MappingError):
        got.export()
    got.close()
    got.close()
    assert set(fake.opened.values()) == {0}
    with pytest.raises(SlabLost):
        backend.attach(fd.dup(), SIZE * 2)
    made.close()
    assert fake.used() == 0
    with pytest.raises(SlabLost):
        backend.attach(fd, SIZE)
    with pytest.raises(SlabLost):
        backend.attach(Fd(os.open("/dev/null", os.O_RDONLY)), SIZE)


def test_tensors_of_one_block_keep_their_own_offsets(fake: FakeDriver) -> None:
    backend = ipc.IpcBackend(0)
    block = backend.create(SIZE)
    ranges = [(block.address, 512), (block.address + 1024, 4096), (block.address + SIZE - 512, 512)]
    fds = backend.export_ranges(ranges)
    assert fake.calls.count("cuIpcGetMemHandle") == 1
    got = backend.attach_many([(fd, size, 0) for fd, (_, size) in zip(fds, ranges, strict=True)])
    base = got[0].address
    assert [mapping.address - base for mapping in got] == [0, 1024, SIZE - 512]


def test_what_legacy_ipc_cannot_share_is_refused_by_name(
    fake: FakeDriver, no_fd_leak: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = ipc.IpcBackend(0)
    block = backend.create(SIZE)
    with pytest.raises(MappingError, match="too early"):
        backend.export_ranges([(block.address, 512), (block.address + SIZE - 512, 513)])
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:32, expandable_segments:True")
    with pytest.raises(MappingError, match="expandable_segments:True"):
        backend.export_ranges([(block.address, 512), (0x1234, 512)])


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native,expandable_segments:true"}, True),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, False),
    ],
)
def test_expandable_segments_are_read_from_torchs_settings(environ: dict[str, str], expected: bool) -> None:
    assert ipc.expandable_segments(environ) is expected


def test_a_machine_without_the_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_libcuda() -> object:
        class Bindings:
            @staticmethod
            def cuInit(flags: int) -> object:
                raise RuntimeError("Failed to dlopen libcuda.so.1")

        return Bindings

    monkeypatch.setattr(driver, "bindings", no_libcuda)
    with pytest.raises(DriverError, match="libcuda"):
        CudaBackend(0)
