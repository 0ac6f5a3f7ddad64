"""CUDA slabs on a real device: addresses, survival, protection, and memory that comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest
import torch

from fer.errors import MappingError, OutOfMemory, SlabLost
from fer.memory import arena, gpus, seal
from fer.memory.base import Mapping
from fer.memory.cuda import CudaBackend, open_device
from fer.memory.fd import Fd
from fer.memory.open import open_backend
from fer.memory.torch_private import tensor_over
from tests.support.memory_gpu import SLACK, child, free_bytes, wait_for_free
from tests.support.processes import Children

pytestmark = pytest.mark.usefixtures("hbm_flat")

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def backend() -> CudaBackend:
    return open_device(0)


def _words(backend: CudaBackend, mapping: Mapping) -> torch.Tensor:
    storage = backend.storage(mapping, 0, mapping.size)
    return tensor_over(storage, torch.int64, (mapping.size // 8,), (1,), 0)


def _published(backend: CudaBackend, size: int, address: int) -> tuple[Mapping, Fd]:
    """A read-only slab that counts 0, 1, 2, ..., and a descriptor of it."""
    mapping = backend.create(size, address=address)
    torch.arange(mapping.size // 8, out=_words(backend, mapping))
    mapping.protect()
    return mapping, mapping.export()


def test_the_device_is_the_one_torch_and_the_driver_mean(backend: CudaBackend) -> None:
    assert open_backend("cuda") is open_backend("cuda:0") is backend
    assert backend.kind == "cuda" and backend.granularity == 2 * MIB and backend.fixed
    assert backend.gpu == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    inventory = gpus.inventory()
    assert gpus.resolve(0, os.environ, inventory) == backend.gpu
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout
    assert backend.gpu in listed
    assert (backend.base - arena.BASE) % arena.SPAN == 0
    print(inventory, hex(backend.base), "arena index", (backend.base - arena.BASE) // arena.SPAN)


def test_made_protected_and_attached_beside_itself(backend: CudaBackend, no_fd_leak: None) -> None:
    size = 64 * MIB
    mapping, fd = _published(backend, size - 1, backend.base)
    assert (mapping.address, mapping.size, mapping.moved) == (backend.base, size, False)
    print("an exported descriptor is open on", os.readlink(f"/proc/self/fd/{fd.fileno()}"))
    assert not os.get_inheritable(fd.fileno())
    beside = backend.attach(fd, size, address=backend.base)
    assert fd.closed and beside.moved, "the addresses are in use here, so it lies elsewhere"
    assert torch.equal(_words(backend, beside), _words(backend, mapping))
    assert int(_words(backend, mapping)[-1]) == size // 8 - 1
    with pytest.raises(MappingError):
        beside.export()
    mapping.close()
    mapping.close()
    assert int(_words(backend, beside)[5]) == 5, "the reader's mapping keeps the memory"
    beside.close()
    again = backend.create(size, address=backend.base)
    assert not again.moved, "the addresses are free again"
    again.close()


def test_closed_memory_comes_back_only_when_nothing_holds_it(backend: CudaBackend) -> None:
    before = free_bytes()
    mapping = backend.create(GIB)
    assert free_bytes() <= before - GIB + SLACK
    fd = mapping.export()
    mapping.close()
    assert free_bytes() <= before - GIB + SLACK, "the descriptor holds it"
    fd.close()
    wait_for_free(before)


def test_tensors_keep_their_mapping(backend: CudaBackend) -> None:
    before = free_bytes()
    mapping = backend.create(GIB)
    tensor = _words(backend, mapping)[-100:].fill_(4)
    del mapping
    assert free_bytes() <= before - GIB + SLACK
    assert int(tensor.sum()) == 400
    del tensor
    wait_for_free(before)


def test_more_than_the_device_has(backend: CudaBackend) -> None:
    before = backend.room()
    with pytest.raises(OutOfMemory) as caught:
        backend.create(before.total + GIB, address=backend.base)
    assert caught.value.fields["needed"] == -(-(before.total + GIB) // (2 * MIB)) * 2 * MIB
    assert 0 < caught.value.fields["free"] < before.total
    backend.create(2 * MIB, address=backend.base).close()


def test_descriptors_that_are_no_slabs(backend: CudaBackend, no_fd_leak: None) -> None:
    mapping, fd = _published(backend, 4 * MIB, backend.base)
    bad = [
        (Fd(os.open("/dev/null", os.O_RDONLY)), 4 * MIB),
        (seal.sealed_bytes("host", bytes(4 * MIB)), 4 * MIB),
        (Fd(os.open("/dev/nvidiactl", os.O_RDWR)), 4 * MIB),
        (fd.dup(), 8 * MIB),
        (fd.dup(), 4096),
    ]
    for wrong, size in bad:
        with pytest.raises(SlabLost) as caught:
            backend.attach(wrong, size, address=backend.base + GIB)
        print(caught.value)
        assert wrong.closed
    with pytest.raises(SlabLost):  # all or none
        backend.attach_many([(fd.dup(), 4 * MIB, backend.base + GIB), (seal.sealed_bytes("x", b"x"), 4 * MIB, 0)])
    good = backend.attach(fd, 4 * MIB, address=backend.base + GIB)
    assert not good.moved and int(_words(backend, good)[7]) == 7
    good.close()
    mapping.close()


_MAKER = """
backend = open_backend("cuda:0")
size = int(arguments[0])
mapping = backend.create(size, address=backend.base + (1 << 30))
fill(backend, mapping.address, 0x5A, size)
fill(backend, mapping.address + size - 16, 0xA5, 16)
mapping.protect()
fdpass.send(sock, b"slab", [mapping.export()])
say(hex(mapping.address))
die()
"""

_READER = """
backend = open_backend("cuda:0")
size = int(arguments[0])
_, (fd,), _ = fdpass.receive(sock, 100)
mapping = backend.attach(fd, size, address=backend.base + (1 << 30))
edges = read(backend, mapping.address, 16) + read(backend, mapping.address + size - 32, 32)
say("torch" in sys.modules, hex(mapping.address), mapping.moved, edges == b"\\x5a" * 32 + b"\\xa5" * 16)
if "write" in arguments:
    try:
        fill(backend, mapping.address, 0, size)
        say("WRITTEN")
    except FerError as error:
        say("refused:", error)
if "kernel" in arguments:
    import torch
    from fer.memory.torch_private import tensor_over
    tensor = tensor_over(backend.storage(mapping, 0, size), torch.int64, (size // 8,), (1,), 0)
    try:
        tensor.add_(1)
        torch.cuda.synchronize()
        say("WRITTEN")
    except RuntimeError as error:
        say("refused:", str(error).splitlines()[0])
"""


def test_a_slab_outlives_its_killed_maker_and_no_reader_harms_it(children: Children) -> None:
    before, size = free_bytes(), GIB
    code, out, fds = child(children, _MAKER, size)
    assert code == -signal.SIGKILL and len(fds) == 1
    (fd,) = fds
    address = out.strip()
    assert free_bytes() <= before - size + SLACK, "held by nobody but the descriptor"
    seen = f"False {address} False True\n"
    assert child(children, _READER, size, fds=[fd])[:2] == (0, seen)
    for way in ("write", "kernel"):
        _, out, _ = child(children, _READER, size, way, fds=[fd])
        assert out.startswith(f"{seen}refused: ") and "WRITTEN" not in out
    assert child(children, _READER, size, fds=[fd])[:2] == (0, seen)
    fd.close()
    wait_for_free(before)


_PUBLISHER = """
backend = open_backend("cuda:0")
mapping = backend.create(4 << 20, address=backend.base)
fill(backend, mapping.address, 7, mapping.size)
mapping.protect()
say(read(backend, mapping.address, 4) == b"\\x07" * 4)
try:
    fill(backend, mapping.address, 8, mapping.size)
    say("WRITTEN")
except FerError as error:
    say("refused")
"""


def test_the_publisher_cannot_write_either(children: Children) -> None:
    assert child(children, _PUBLISHER)[1] == "True\nrefused\n"


_TAKEN = """
from fer.memory import arena
driver.call("cuInit", 0)
base = int(arguments[0])
driver.call("cuDevicePrimaryCtxRetain", driver.call("cuDeviceGet", 0))
taken = int(driver.call("cuMemAddressReserve", 1 << 40, 0, base, 0))
backend = open_backend("cuda:0")
_, (fd,), _ = fdpass.receive(sock, 100)
mapping = backend.attach(fd, 4 << 20, address=backend.base)
say(taken == base, backend.fixed, backend.base == base, mapping.moved)
say(int.from_bytes(read(backend, mapping.address + 8 * 77, 8), "little"))
made = backend.create(4 << 20, address=backend.base)
fill(backend, made.address, 1, 4 << 20)
say(made.moved)
made.close()
mapping.close()
"""


def test_a_taken_base_moves_slabs_and_says_so(backend: CudaBackend, children: Children) -> None:
    mapping, fd = _published(backend, 4 * MIB, backend.base)
    with fd:
        code, out, _ = child(children, _TAKEN, backend.base, fds=[fd])
    assert (code, out) == (0, "True False True True\n77\nTrue\n")
    mapping.close()


_BY_UUID = """
backend = open_backend("cuda:0")
say(backend.gpu, hex(backend.base))
"""


def test_a_device_named_by_uuid_is_the_same_one(backend: CudaBackend, children: Children) -> None:
    for name in (backend.gpu, backend.gpu[:12]):
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": name}
        code, out, _ = child(children, _BY_UUID, env=environment)
        assert (code, out) == (0, f"{backend.gpu} {backend.base:#x}\n")


_BEFORE_TORCH = """
backend = open_backend("cuda:0")
mapping = backend.create(4 << 20, address=backend.base)
import torch
from fer.memory.torch_private import custom_allocator, tensor_over
tensor = tensor_over(backend.storage(mapping, 0, 1024), torch.float32, (16, 16), (16, 1), 0)
torch.eye(16, out=tensor)
say(torch.equal((tensor @ torch.ones(16, 1, device="cuda")).cpu(), torch.ones(16, 1)), mapping.moved)

# Memory dropped while a graph is captured: the capture survives, the memory comes back afterwards.
free = backend.room().free
doomed = backend.create(1 << 30)
held = backend.room().free
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = tensor * 2
    del doomed
graph.replay()
torch.cuda.synchronize()
say(float(out[3, 3]), held <= free - (1 << 30) + (64 << 20), backend.room().free > held + (1 << 29))

# A pool of torch over our own allocation functions.
asked = []
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
def allocate(size, device, stream):
    asked.append(int(driver.call("cuMemAlloc", size)))
    return asked[-1]
@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
def release(pointer, size, device, stream):
    pass
address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
pool = torch.cuda.MemPool(custom_allocator(address(allocate), address(release)))
with torch.cuda.use_mem_pool(pool):
    inside = torch.zeros(1 << 20, device="cuda")
say(inside.data_ptr() in asked)
sys.stdout.flush()
os._exit(0)
"""


def test_a_context_made_before_torch_serves_torch(children: Children) -> None:
    code, out, _ = child(children, _BEFORE_TORCH)
    assert (code, out) == (0, "True False\n2.0 True True\nTrue\n")


_MANY = """
backend = open_backend("cuda:0")
size, count = int(arguments[0]), int(arguments[1])
fds = []
while len(fds) < count:
    fds += fdpass.receive(sock, 100)[1]
begin = time.perf_counter()
mappings = backend.attach_many([(fd, size, backend.base + n * size) for n, fd in enumerate(fds)])
took = time.perf_counter() - begin
say(any(mapping.moved for mapping in mappings), len(mappings))
say([int.from_bytes(read(backend, mapping.address, 8), "little") for mapping in mappings] == list(range(count)))
print(f"{count} slabs of {size >> 20} MiB attached in {took * 1e3:.2f} ms", file=sys.stderr)
begin = time.perf_counter()
for mapping in mappings:
    mapping.close()
print(f"closed in {(time.perf_counter() - begin) * 1e3:.2f} ms", file=sys.stderr)
"""


@pytest.mark.parametrize(("count", "size"), [(64, 16 * MIB), (1, 16 * GIB), (64, 256 * MIB)])
def test_slabs_lie_side_by_side_in_the_next_process(
    backend: CudaBackend, children: Children, count: int, size: int
) -> None:
    if free_bytes() < 17 * GIB:
        pytest.skip("needs 17 GiB of free device memory")
    mappings = [backend.create(size, address=backend.base + n * size) for n in range(count)]
    for n, mapping in enumerate(mappings):
        _words(backend, mapping).fill_(n)
    begin = time.perf_counter()
    for mapping in mappings:
        mapping.protect()
    print(f"{count} slabs of {size >> 20} MiB protected in {(time.perf_counter() - begin) * 1e3:.2f} ms")
    fds = [mapping.export() for mapping in mappings]
    for mapping in mappings:
        mapping.close()
    code, out, _ = child(children, _MANY, size, count, fds=fds)
    for fd in fds:
        fd.close()
    assert (code, out) == (0, f"False {count}\nTrue\n")
