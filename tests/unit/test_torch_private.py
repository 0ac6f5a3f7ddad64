"""The contract with torch's private names: every name exists, and does what FER builds on."""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref

import pytest
import torch

from fer.errors import FerBug, MappingError
from fer.memory import torch_private
from fer.memory.torch_private import WeakStorage, owner_of, storage_over, tensor_over


class Owner:
    """Stands for a mapping: memory with a lifetime that can be watched."""

    def __init__(self, size: int = 4096) -> None:
        self.buffer = (ctypes.c_uint8 * size)()
        self.address = ctypes.addressof(self.buffer)


def _alive(reference: weakref.ref[Owner]) -> bool:
    gc.collect()
    return reference() is not None


@pytest.mark.parametrize("name", torch_private.NAMES, ids=lambda name: name.path)
def test_the_name_exists(name: torch_private.PrivateName) -> None:
    if name.cuda_only and not torch.backends.cuda.is_built():
        with pytest.raises(MappingError, match=name.path):
            torch_private.custom_allocator(0, 0)
        pytest.skip(f"a CPU build of torch has no {name.path}")
    assert torch_private.lookup(name.path) is not None
    assert name.purpose
    release = torch.__version__.partition("+")[0]
    if release not in name.seen:
        text = f"torch {release} is not among those that torch.{name.path} was seen in: run scripts/torch-contract"
        warnings.warn(text, stacklevel=1)


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="a CPU build of torch has no CUDA allocators")
def test_an_allocator_is_made_of_two_addresses() -> None:
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(lambda *_: 0)
    release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)(lambda *_: None)
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (allocate, release)]
    assert torch_private.custom_allocator(*addresses) is not None


def test_a_storage_sees_the_foreign_memory() -> None:
    owner = Owner()
    storage = storage_over(owner.address, "cpu", 4096, owner)
    assert storage.data_ptr() == owner.address and storage.nbytes() == 4096
    tensor = tensor_over(storage, torch.int32, (2, 3), (3, 1), 4)
    owner.buffer[16] = 77
    assert int(tensor[0, 0]) == 77
    tensor[1, 2] = -1
    assert owner.buffer[4 * (4 + 5)] == 255
    assert tensor.data_ptr() == owner.address + 16 and tensor.storage_offset() == 4


def test_the_owner_lives_as_long_as_any_tensor_over_the_storage() -> None:
    owner = Owner()
    reference = weakref.ref(owner)
    storage = storage_over(owner.address, "cpu", 4096, owner)
    del owner
    view = tensor_over(storage, torch.float32, (4, 4), (4, 1), 0)[1]
    del storage
    assert _alive(reference)
    parameter = torch.nn.Parameter(view.detach(), requires_grad=False)
    del view
    assert _alive(reference)
    assert isinstance(owner_of(parameter.untyped_storage()), Owner)
    module = torch.nn.Linear(2, 2)
    module.weight.data = parameter.data
    del parameter
    assert _alive(reference)
    del module
    assert not _alive(reference)


def test_rebinding_by_data_keeps_the_owner_under_inference_mode() -> None:
    owner = Owner()
    reference = weakref.ref(owner)
    with torch.inference_mode():
        held = torch.zeros(4)
        held.data = tensor_over(storage_over(owner.address, "cpu", 4096, owner), torch.float32, (4,), (1,), 0)
    del owner
    assert _alive(reference)
    del held
    assert not _alive(reference)


def test_two_storages_share_an_owner() -> None:
    owner = Owner()
    reference = weakref.ref(owner)
    first = storage_over(owner.address, "cpu", 512, owner)
    second = storage_over(owner.address + 512, "cpu", 512, owner)
    del owner, first
    assert _alive(reference)
    del second
    assert not _alive(reference)


def test_an_empty_storage_needs_no_memory() -> None:
    storage = storage_over(0, "cpu", 0, None)
    tensor = tensor_over(storage, torch.bfloat16, (0, 5), (5, 1), 0)
    assert tensor.shape == (0, 5) and storage.nbytes() == 0 and owner_of(storage) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8])
def test_dtypes_strides_and_scalars(dtype: torch.dtype) -> None:
    owner = Owner()
    storage = storage_over(owner.address, "cpu", 4096, owner)
    transposed = tensor_over(storage, dtype, (3, 5), (1, 3), 2)
    assert transposed.stride() == (1, 3) and transposed.dtype == dtype
    scalar = tensor_over(storage, dtype, (), (), 7)
    assert scalar.dim() == 0 and scalar.data_ptr() == owner.address + 7 * dtype.itemsize
    expanded = tensor_over(storage, dtype, (1000, 2), (0, 1), 0)
    assert expanded.stride() == (0, 1)


def test_the_default_device_and_mode_do_not_matter() -> None:
    owner = Owner()
    with torch.device("meta"):
        tensor = tensor_over(storage_over(owner.address, "cpu", 4096, owner), torch.float32, (4,), (1,), 0)
    assert tensor.device.type == "cpu" and tensor.data_ptr() == owner.address


def test_a_tensor_never_reaches_past_its_storage() -> None:
    owner = Owner()
    storage = storage_over(owner.address, "cpu", 64, owner)
    tensor_over(storage, torch.float32, (16,), (1,), 0)
    for shape, stride, offset in (((17,), (1,), 0), ((16,), (1,), 1), ((2, 2), (15, 1), 0)):
        with pytest.raises(FerBug):
            tensor_over(storage, torch.float32, shape, stride, offset)
    assert storage.nbytes() == 64


def test_a_weak_storage_tells_when_torch_has_freed_it() -> None:
    tensor = torch.ones(4)
    weak = WeakStorage(tensor.untyped_storage())
    view = tensor[:2]
    del tensor
    gc.collect()
    assert not weak.expired()
    del view
    gc.collect()
    assert weak.expired()


def test_thousands_of_storages_share_one_mapping() -> None:
    owner = Owner()
    reference = weakref.ref(owner)
    tensors = [
        tensor_over(storage_over(owner.address, "cpu", 512, owner), torch.float32, (8, 8), (8, 1), 0)
        for _ in range(8000)
    ]
    del owner
    assert _alive(reference)
    assert len({id(t.untyped_storage()) for t in tensors[:10]}) == 10
    del tensors
    assert not _alive(reference)
