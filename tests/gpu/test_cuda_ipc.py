"""Legacy CUDA IPC on a real device: offsets within blocks, and what it cannot share."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest
import torch

from fer.errors import MappingError, SlabLost
from fer.memory import driver, ipc
from fer.memory.cuda import open_device
from fer.memory.ipc import IpcBackend
from fer.memory.open import open_backend
from fer.memory.torch_private import tensor_over
from tests.support.memory_gpu import SLACK, child, free_bytes, wait_for_free
from tests.support.processes import Children

pytestmark = pytest.mark.usefixtures("hbm_flat")

MIB = 1 << 20


@pytest.fixture
def backend() -> IpcBackend:
    found = open_backend("cuda:0", transport="cuda-ipc")
    assert isinstance(found, IpcBackend)
    return found


_READER = """
backend = open_backend("cuda:0", transport="cuda-ipc")
sizes = [int(each) for each in arguments]
_, fds, _ = fdpass.receive(sock, 100)
mappings = backend.attach_many([(fd, size, 0) for fd, size in zip(fds, sizes)])
say([read(backend, mapping.address, size)[::size - 1].hex() for mapping, size in zip(mappings, sizes)])
addresses = [mapping.address for mapping in mappings]
say([address - addresses[0] for address in addresses])
for mapping in mappings:
    mapping.close()
"""


def test_a_slab_is_read_in_another_process(backend: IpcBackend, children: Children, no_fd_leak: None) -> None:
    before = free_bytes()
    mapping = backend.create(64 * MIB - 5)
    assert (mapping.kind, mapping.size) == ("cuda-ipc", 64 * MIB)
    storage = backend.storage(mapping, 0, mapping.size)
    tensor = tensor_over(storage, torch.uint8, (mapping.size,), (1,), 0)
    tensor.fill_(0x11)
    tensor[-1] = 0x22
    torch.cuda.synchronize()
    mapping.protect()  # nothing that legacy IPC could do
    with mapping.export() as fd:
        code, out, _ = child(children, _READER, mapping.size, fds=[fd])
        assert (code, out) == (0, "['1122']\n[0]\n")
        with pytest.raises(SlabLost):
            backend.attach(fd.dup(), 2 * mapping.size)
    del storage, tensor
    assert free_bytes() <= before - 64 * MIB + SLACK
    mapping.close()
    wait_for_free(before)
    children.end()


def test_tensors_of_one_allocator_block_keep_their_offsets(
    backend: IpcBackend, children: Children, no_fd_leak: None
) -> None:
    if ipc.expandable_segments(os.environ):
        pytest.skip("torch allocates expandable segments here")
    torch.cuda.empty_cache()
    tensors = [torch.full((1024,), value, dtype=torch.uint8, device="cuda") for value in (3, 4, 5)]
    torch.cuda.synchronize()
    starts = [tensor.data_ptr() for tensor in tensors]
    fds = backend.export_ranges([(start, 1024) for start in starts])
    code, out, _ = child(children, _READER, 1024, 1024, 1024, fds=fds)
    for fd in fds:
        fd.close()
    assert code == 0
    assert out == f"['0303', '0404', '0505']\n{[start - starts[0] for start in starts]}\n"
    children.end()


def test_descriptor_memory_is_refused_by_name(backend: IpcBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    slab = open_device(0).create(4 * MIB)  # what expandable segments are made of
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(MappingError, match="expandable_segments:True") as caught:
        backend.export_ranges([(slab.address, 512)])
    print(caught.value)
    slab.close()
    buffer = ctypes.create_string_buffer(512)
    with pytest.raises(MappingError):
        backend.export_ranges([(ctypes.addressof(buffer), 512)])


def test_the_exporter_cannot_open_its_own_handle(backend: IpcBackend, no_fd_leak: None) -> None:
    mapping = backend.create(2 * MIB)
    with pytest.raises(SlabLost, match="or is this one") as caught:
        backend.attach(mapping.export(), mapping.size)
    print(caught.value)
    mapping.close()
    assert driver.call("cuDriverGetVersion") > 0, "the context is none the worse"


_MAKER = """
backend = open_backend("cuda:0", transport="cuda-ipc")
mapping = backend.create(2 << 20)
fdpass.send(sock, b"handle", [mapping.export()])
die()
"""


def test_a_dead_exporters_handle_is_lost(backend: IpcBackend, children: Children, no_fd_leak: None) -> None:
    code, _, (fd,) = child(children, _MAKER)
    assert code == -signal.SIGKILL
    with pytest.raises(SlabLost, match="has ended") as caught:
        backend.attach(fd, 2 * MIB)
    print(caught.value)
    children.end()
