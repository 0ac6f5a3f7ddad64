"""The only file that touches private names of torch.

Private names move between releases, so each stands in :data:`NAMES` with its purpose and the versions it was seen in,
and a contract test walks that table on every supported torch.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fer.errors import FerBug, MappingError
from fer.memory.base import Mapping


@dataclass(frozen=True, kw_only=True)
class PrivateName:
    """One private name of torch.

    Attributes:
        path: dotted, below ``torch``.
        purpose: what FER needs it for.
        seen: torch versions the contract test passed on.
        cuda_only: absent in CPU builds of torch.
    """

    path: str
    purpose: str
    seen: tuple[str, ...]
    cuda_only: bool = False


NAMES: Final = (
    PrivateName(
        path="_C._construct_storage_from_data_pointer",
        purpose="a storage over memory that torch did not allocate",
        seen=("2.11.0", "2.13.0", "2.14.1"),
    ),
    PrivateName(
        path="multiprocessing.reductions.StorageWeakRef",
        purpose="see whether a storage that was moved into a slab is still alive somewhere",
        seen=("2.11.0", "2.13.0", "2.14.1"),
    ),
    PrivateName(
        path="_foreach_copy_",
        purpose="copy many small storages in a few launches",
        seen=("2.11.0", "2.13.0", "2.14.1"),
    ),
    PrivateName(
        path="Tensor._base",
        purpose="a view keeps the tensor it was taken from alive, and with that its storage: both have to move",
        seen=("2.11.0", "2.13.0", "2.14.1"),
    ),
    PrivateName(
        path="_C._cuda_customAllocator",
        purpose="let torch allocate inside the arena's named ranges",
        seen=("2.11.0", "2.13.0", "2.14.1"),
        cuda_only=True,
    ),
)


def lookup(path: str) -> Any:
    """The object behind a private name of torch, or None where this torch has none."""
    found: Any = torch
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


@functools.cache  # asked for each of thousands of tensors
def _need(path: str) -> Any:
    found = lookup(path)
    if found is None:
        raise MappingError(
            f"this torch ({torch.__version__}) has no torch.{path}",
            why=next((name.purpose for name in NAMES if name.path == path), ""),
            fix="Use a torch release listed in fer.memory.torch_private.NAMES, or report it.",
        )
    return found


@functools.cache
def _device(device: torch.device | str) -> torch.device:
    return torch.device(device)


def storage_over(address: int, device: torch.device | str, nbytes: int, owner: object) -> torch.UntypedStorage:
    """A storage over foreign memory.

    Args:
        address: first byte, in the address space of ``device``.
        nbytes: length; 0 gives an ordinary empty storage, for which torch wants no pointer.
        owner: kept alive until torch frees the storage, that is until the last tensor over it is gone.
    """
    if nbytes == 0:
        return torch.UntypedStorage(0, device=torch.device(device))
    make = _need("_C._construct_storage_from_data_pointer")
    storage: torch.UntypedStorage = make(address, _device(device), nbytes)
    # torch keeps a storage's Python object for as long as the C++ storage lives, though no Python reference is left,
    # and drops it with the storage. That makes an attribute the right place for the owner; the contract test holds it.
    storage._fer_owner = owner  # type: ignore[attr-defined]
    return storage


def storage_within(mapping: Mapping, offset: int, nbytes: int, device: str) -> torch.UntypedStorage:
    """A storage over part of a mapping, which it keeps alive; what backends answer to :meth:`Backend.storage`.

    Raises:
        FerBug: the part reaches outside of the mapping.
    """
    if offset < 0 or nbytes < 0 or offset + nbytes > mapping.size:
        raise FerBug(f"bytes {offset} to {offset + nbytes} of a slab of {mapping.size}")
    return storage_over(mapping.address + offset, device, nbytes, mapping)


def owner_of(storage: torch.UntypedStorage) -> object | None:
    """The owner given to :func:`storage_over`; None for any other storage."""
    return getattr(storage, "_fer_owner", None)


def tensor_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor over a storage; ``stride`` and ``offset`` are in elements, as torch counts them.

    Raises:
        FerBug: the tensor would reach past its storage (torch would silently try to grow it).
    """
    reach = offset + 1
    for count, step in zip(shape, stride, strict=True):
        if count == 0:
            reach = 0
            break
        reach += (count - 1) * step
    if reach * dtype.itemsize > storage.nbytes():
        raise FerBug(f"a tensor of {reach * dtype.itemsize} bytes over a storage of {storage.nbytes()}")
    # A shallow copy of an empty tensor, half the price of a new one; thousands are made on the path of an attach.
    tensor = _empty(dtype, storage.device).data
    return tensor.set_(storage, offset, tuple(shape), tuple(stride))  # type: ignore[call-overload, no-any-return]


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=device)


def rebind(tensors: Sequence[torch.Tensor], storage: torch.UntypedStorage) -> None:
    """Put tensors, and the tensors they are views of, over another storage with the same bytes.

    Their Python objects stay the same, with their shapes, strides and offsets (``tensor.data = ...``; ``set_`` is
    refused by inference tensors).
    """
    bases = {id(tensor._base): tensor._base for tensor in tensors if tensor._base is not None}
    with torch.no_grad():
        for tensor in (*tensors, *bases.values()):
            tensor.data = tensor_over(
                storage, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
            )


def copy_many(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, all on one device and of one dtype; the device may still be at it on return."""
    with torch.no_grad():
        _need("_foreach_copy_")(list(targets), list(sources))


class WeakStorage:
    """A weak reference to a torch storage (not to its Python object, which comes and goes).

    Usage: make it while the storage lives, drop the tensors, then ask :meth:`expired`.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def expired(self) -> bool:
        """True once torch has freed the storage."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]


def custom_allocator(allocate: int, free: int) -> Any:
    """A torch CUDA allocator over two C functions, for ``torch.cuda.MemPool``.

    Args:
        allocate: address of ``void *(ssize_t size, int device, cudaStream_t stream)``.
        free: address of ``void (void *pointer, ssize_t size, int device, cudaStream_t stream)``.

    Raises:
        MappingError: this is a CPU build of torch.
    """
    return _need("_C._cuda_customAllocator")(allocate, free)


_failed: list[Any] = []


def end_failed_capture(pool: tuple[int, int], graph: Any) -> None:
    """Take torch's device allocator out of a capture that failed, and keep the graph, which it may still ask.

    Where ending a capture fails, torch before 2.12 raises before it tells its allocators (pytorch #180395). From then
    on the device's one refuses to capture into the same pool and to give its cache back. Nothing reaches the one of
    pinned memory, which refuses the same pool too: go on with another.
    """
    _failed.append(graph)
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # later releases have done it
        return
    torch._C._cuda_releasePool(device, pool)


_for_good = False


def captures_for_good() -> bool:
    """Whether what a graph allocates stays for the rest of the process: under torch's cudaMallocAsync allocator.

    There the memory of an output belongs to its graph, until the graph was replayed. Freeing it before, or after the
    graph is gone, is an error of the driver inside a destructor, and ends the process.
    """
    return torch.cuda.is_available() and torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def captured_for_good() -> bool:
    """Whether :func:`keep_captured` keeps a graph."""
    return _for_good


def keep_captured(graph: Any, outputs: Any) -> None:
    """Where graphs are for good, keep one and its outputs to the process's end, and beyond the interpreter's."""
    global _for_good
    if captures_for_good():
        _for_good = True
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((graph, outputs)))
