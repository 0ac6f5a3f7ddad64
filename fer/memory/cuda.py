"""Slabs in GPU memory: CUDA virtual memory, shared by POSIX descriptors.

The physical memory lives as long as any descriptor, handle or mapping of it does, in whichever process. So the keeper,
which has no CUDA, holds the descriptors, and no engine's death frees a byte. Descriptors import in milliseconds and
map at the address they had in their maker, which recorded pointers need.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fer.errors import DriverError, MappingError, OutOfMemory, SlabLost
from fer.memory import arena, driver, gpus
from fer.memory.base import Backend, Mapping, Room
from fer.memory.device import CudaDevice, current_ordinal
from fer.memory.fd import Fd
from fer.memory.vmm import Vmm, require_sharing

if TYPE_CHECKING:
    import torch

__all__ = ["CudaBackend", "CudaMapping", "current_ordinal", "open_device"]

_log = logging.getLogger("fer.memory")


@dataclass(frozen=True)
class _Held:
    """What one mapping holds and :meth:`CudaBackend._release` gives back."""

    address: int
    size: int
    reserved: bool  # has an address reservation of its own, outside of the weights range
    handle: Any  # the maker's allocation handle, None for readers


class CudaMapping(Mapping):
    """A VMM allocation in this process. Closed at the latest when nothing refers to it any more."""

    kind = "cuda"

    def __init__(self, backend: CudaBackend, held: _Held, *, moved: bool) -> None:
        self.address, self.size, self.moved = held.address, held.size, moved
        self.writable = held.handle is not None
        self._backend, self._handle = backend, held.handle
        self._closer = weakref.finalize(self, backend._release, held)
        self._closer.atexit = False  # the driver frees everything with the process, in an order of its own

    def export(self) -> Fd:
        if self._handle is None or not self._closer.alive:
            raise MappingError(
                "only the process that made a slab can export it", why="this one attached it or closed it"
            )
        return self._backend._export(self._handle)

    def protect(self) -> None:
        if not self.writable:
            return
        if not self._closer.alive:
            raise MappingError("a closed slab cannot be protected")
        self._backend._protect(self.address, self.size)
        self.writable = False

    def close(self) -> None:
        self._handle = None
        self._closer()

    @property
    def closed(self) -> bool:
        return not self._closer.alive


class CudaBackend(Backend):
    """Slabs of one GPU. Use :func:`open_device`: the address range can be reserved once in a process.

    Raises:
        DriverError: no driver or no such device.
        MappingError: the device cannot share memory by descriptor.
    """

    kind = "cuda"

    def __init__(self, ordinal: int) -> None:
        self._cuda = CudaDevice(ordinal)
        self.device, self.gpu = f"cuda:{ordinal}", self._cuda.uuid
        require_sharing(self._cuda)
        self._vmm = Vmm()
        self._properties = self._vmm.properties(ordinal)
        self.granularity = max(
            int(driver.call("cuMemGetAllocationGranularity", self._properties, option))
            for option in self._vmm.granularities
        )
        self.base = arena.address_of(gpus.arena_index(self._cuda.pci_bus))
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()  # addresses given back, possibly by the garbage collector inside of _place
        self._deferred: deque[_Held] = deque()  # unmapped later: a graph was being captured
        self._spans = self._reserve_weights()

    def create(self, size: int, *, address: int = 0) -> CudaMapping:
        if size <= 0:
            raise ValueError(f"a slab of {size} bytes")
        size = -(-size // self.granularity) * self.granularity
        self._release_deferred()
        with self._cuda.current(), ExitStack() as undo:
            handle = self._allocate(size)
            undo.callback(driver.quietly, "cuMemRelease", handle)
            where, reserved = self._place(size, address)
            undo.callback(self._unplace, where, size, reserved)
            try:
                driver.call("cuMemMap", where, size, 0, handle, 0)
                undo.callback(driver.quietly, "cuMemUnmap", where, size)
                self._allow(where, size, self._vmm.read_write)
            except DriverError as error:
                raise self._trouble(error, size) from error
            undo.pop_all()
        held = _Held(where, size, reserved, handle)
        return CudaMapping(self, held, moved=bool(address) and where != address)

    def attach(self, fd: Fd, size: int, *, address: int = 0) -> CudaMapping:
        return self._attach([(fd, size, address)])[0]

    def attach_many(self, slabs: Sequence[tuple[Fd, int, int]]) -> list[Mapping]:
        return list(self._attach(slabs))

    def _attach(self, slabs: Sequence[tuple[Fd, int, int]]) -> list[CudaMapping]:
        self._release_deferred()
        try:
            with self._cuda.current(), ExitStack() as undo:
                held = [self._import(fd, size, address, undo) for fd, size, address in slabs]
                fixed = [(each.address, each.size) for each in held if not each.reserved]
                apart = [(each.address, each.size) for each in held if each.reserved]
                # Setting access costs a driver call each; slabs of one edition lie side by side and share one.
                for where, length in arena.runs(fixed) + apart:
                    try:
                        self._allow(where, length, self._vmm.read)
                    except DriverError as error:
                        raise self._trouble(error, length) from error
                undo.pop_all()
        finally:
            for fd, _, _ in slabs:
                fd.close()
        return [
            CudaMapping(self, each, moved=bool(address) and each.address != address)
            for each, (_, _, address) in zip(held, slabs, strict=True)
        ]

    def room(self) -> Room:
        self._release_deferred()
        return self._cuda.room()

    def storage(self, mapping: Mapping, offset: int, nbytes: int) -> torch.UntypedStorage:
        from fer.memory import torch_private

        return torch_private.storage_within(mapping, offset, nbytes, self.device)

    @property
    def fixed(self) -> bool:
        """True where the weights range could be reserved at its address."""
        return self._spans is not None

    def _reserve_weights(self) -> arena.Spans | None:
        size = arena.WEIGHTS.size
        try:
            with self._cuda.current():
                where = int(driver.call("cuMemAddressReserve", size, 0, self.base, 0))
                if where == self.base:
                    return arena.Spans(self.base, size)
                driver.call("cuMemAddressFree", where, size)
        except DriverError as error:
            _log.warning("the weights range of %s could not be reserved: %s", self.device, error)
        _log.warning("addresses at %#x are taken; slabs of %s will be mapped elsewhere", self.base, self.device)
        return None

    def _allocate(self, size: int) -> Any:
        try:
            return driver.call("cuMemCreate", size, self._properties, 0)
        except DriverError as error:
            raise self._trouble(error, size) from error

    def _place(self, size: int, address: int) -> tuple[int, bool]:
        """Addresses for a slab: those asked for, else a reservation of its own (True)."""
        with self._lock:
            while self._freed and self._spans is not None:
                self._spans.give(self._freed.popleft())
            aligned = address and address % self.granularity == 0
            if aligned and self._spans is not None and self._spans.take(address, size):
                return address, False
        try:
            return int(driver.call("cuMemAddressReserve", size, 0, 0, 0)), True
        except DriverError as error:
            raise MappingError(f"no addresses for a slab of {size} bytes on {self.device}", why=str(error)) from error

    def _unplace(self, where: int, size: int, reserved: bool) -> None:
        if reserved:
            driver.quietly("cuMemAddressFree", where, size)
        else:
            self._freed.append(where)

    def _import(self, fd: Fd, size: int, address: int, undo: ExitStack) -> _Held:
        """Import and map one descriptor, without access yet; ``undo`` learns how to take it back."""
        if size <= 0 or size % self.granularity:
            raise SlabLost(f"a slab of {size} bytes", why=f"sizes on {self.device} are multiples of {self.granularity}")
        try:
            handle = driver.call("cuMemImportFromShareableHandle", fd.fileno(), self._vmm.descriptor)
        except DriverError as error:
            if driver.code_of(error) == driver.OUT_OF_MEMORY:
                raise self._trouble(error, size) from error
            raise SlabLost(
                "a kept descriptor does not import", why=str(error), fix="Its edition is lost; load the weights again."
            ) from error
        fd.close()
        try:
            self._check_device(handle)
            where, reserved = self._place(size, address)
            undo.callback(self._unplace, where, size, reserved)
            try:
                driver.call("cuMemMap", where, size, 0, handle, 0)
            except DriverError as error:
                if driver.code_of(error) == driver.OUT_OF_MEMORY:
                    raise self._trouble(error, size) from error
                raise SlabLost(f"a kept descriptor is no slab of {size} bytes", why=str(error)) from error
            undo.callback(driver.quietly, "cuMemUnmap", where, size)
        finally:
            driver.quietly("cuMemRelease", handle)  # from here on the mapping alone keeps the memory
        return _Held(where, size, reserved, None)

    def _check_device(self, handle: Any) -> None:
        """Refuse memory of another card: it would map, through peer access, and be read over the link for good.

        The handle's properties tell where it lies, in this process's numbers. Asking the mapped pointer does not: for
        memory of this kind the driver answers device 0, wherever it is (seen on driver 580, two GPUs).
        """
        try:
            ordinal = int(driver.call("cuMemGetAllocationPropertiesFromHandle", handle).location.id)
        except DriverError as error:
            raise SlabLost("a kept descriptor imports as nothing the driver knows", why=str(error)) from error
        if ordinal != self._cuda.ordinal:
            raise MappingError(
                f"a slab lies on cuda:{ordinal}, not on {self.device}",
                why="an edition belongs to one physical GPU",
                fix="Load the weights on this GPU.",
            )

    def _allow(self, where: int, size: int, flags: Any) -> None:
        driver.call("cuMemSetAccess", where, size, [self._vmm.access(self._cuda.ordinal, flags)], 1)

    def _export(self, handle: Any) -> Fd:
        fd = Fd(int(driver.call("cuMemExportToShareableHandle", handle, self._vmm.descriptor, 0)))
        os.set_inheritable(fd.fileno(), False)
        return fd

    def _protect(self, where: int, size: int) -> None:
        try:
            with self._cuda.current():
                self._cuda.synchronize()
                self._allow(where, size, self._vmm.read)
        except DriverError as error:
            raise MappingError(f"a slab of {size} bytes could not be made read-only", why=str(error)) from error

    def _trouble(self, error: DriverError, size: int) -> MappingError | OutOfMemory:
        if driver.code_of(error) != driver.OUT_OF_MEMORY:
            return MappingError(f"a slab of {size} bytes could not be mapped on {self.device}", why=str(error))
        free = self._cuda.room().free
        return OutOfMemory(
            f"a slab of {size} bytes does not fit on {self.device}",
            why=f"{free} bytes are free ({error.fields.get('call')})",
            fix="Free memory on the GPU, or evict kept weights with `fer evict`.",
            needed=size,
            free=free,
        )

    def _release(self, held: _Held) -> None:
        """Unmap and free; never raises, because the garbage collector calls it too."""
        if os.getpid() != self._cuda.pid:
            return  # a forked child: the driver is not usable here and the mapping is the parent's
        try:
            with self._cuda.current():
                if not self._cuda.quiet():
                    self._deferred.append(held)
                    return
                driver.call("cuMemUnmap", held.address, held.size)
                self._unplace(held.address, held.size, held.reserved)
        except DriverError as error:
            # The addresses stay taken: what could not be unmapped must not be mapped over.
            _log.warning("a slab of %d bytes at %#x was not unmapped: %s", held.size, held.address, error)
        if held.handle is not None:
            driver.quietly("cuMemRelease", held.handle)

    def _release_deferred(self) -> None:
        for _ in range(len(self._deferred)):
            with suppress(IndexError):
                self._release(self._deferred.popleft())


_opening = threading.Lock()
_open: dict[tuple[int, int], CudaBackend] = {}


def open_device(ordinal: int) -> CudaBackend:
    """The backend of one CUDA device, made on first use; a process has one for each device.

    Raises:
        DriverError, MappingError: as :class:`CudaBackend`.
    """
    key = (os.getpid(), ordinal)
    with _opening:
        if key not in _open:
            _open[key] = CudaBackend(ordinal)
        return _open[key]
