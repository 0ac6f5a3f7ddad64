"""Named ranges at fixed addresses: where an engine's graphs find what they point to, in every process.

A range is reserved whole, mapped as far as it is needed, and handed out by a bump allocator that torch calls through a
``MemPool``; a torch pool routes the allocations of the thread and device that entered it, and no others. A start that
restores graphs maps what was recorded and replays no allocation.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from fer.errors import DriverError, MappingError, OutOfMemory
from fer.memory import arena, driver, gpus
from fer.memory.device import CudaDevice, DeviceFacts
from fer.memory.fd import Fd
from fer.memory.stub import BumpAllocator
from fer.memory.vmm import Vmm, require_sharing

_log = logging.getLogger("fer.memory")

CHUNK: Final = 64 << 20
"""Bytes mapped by one allocation in ranges whose size is not known beforehand, and given back by trimming."""

NAMES: Final = {part.name: part for part in (arena.KV, arena.STATIC, arena.SCRATCH, arena.POOL)}


@dataclass
class _Chunk:
    address: int
    size: int
    handle: Any


@dataclass
class NamedRange:
    """One range of one device. Make it with :func:`reserve`.

    Attributes:
        name: ``kv``, ``static``, ``scratch`` or ``pool``.
        address: first address, the same in every process.
        mapped: bytes mapped so far, from ``address`` on, without gaps but after :meth:`map_parts`.
    """

    name: str
    address: int
    size: int
    device: CudaDevice
    vmm: Vmm
    allocator: BumpAllocator
    mapped: int = 0
    _chunks: list[_Chunk] = field(default_factory=list)
    _aliases: list[_Chunk] = field(default_factory=list)
    _pool: Any = None

    @property
    def used(self) -> int:
        """Bytes handed out so far, in whole granules."""
        return self.allocator.cursor - self.address

    @property
    def backed(self) -> bool:
        """Whether it has memory, and no slab that stands for it."""
        return bool(self._chunks)

    @property
    def pool(self) -> Any:
        """The ``torch.cuda.MemPool`` over the range, also the pool to capture into (``pool.id``)."""
        if self._pool is None:
            import torch

            from fer.memory import torch_private

            torch.cuda.init()
            allocator = torch_private.custom_allocator(self.allocator.allocate, self.allocator.free)
            self._pool = torch.cuda.MemPool(allocator)
        return self._pool

    def renew(self) -> Any:
        """Another pool over the rest of the range, after a capture into :attr:`pool` failed; the new pool."""
        _lost.append(self._pool)  # torch ends the process when such a pool is destroyed
        self._pool = None
        return self.pool

    @contextmanager
    def place(self) -> Iterator[None]:
        """Torch's allocations of this thread on this device come from the range.

        Where its mapped memory is used up, torch raises its own error for lack of memory.
        """
        import torch

        with torch.cuda.use_mem_pool(self.pool, device=torch.device("cuda", self.device.ordinal)):
            yield

    def map(self, size: int, *, chunk: int = CHUNK) -> None:
        """Map further memory until ``size`` bytes are mapped; it reads as zeros.

        Raises:
            OutOfMemory: the device has not that much; what was mapped before stays.
            MappingError: the range is smaller, or the driver refused.
        """
        size = -(-size // arena_granule(self.vmm, self.device)) * arena_granule(self.vmm, self.device)
        if size > self.size:
            raise MappingError(f"the range {self.name} has {self.size} bytes of addresses, {size} are needed")
        with self.device.current():
            while self.mapped < size:
                self._add(self.address + self.mapped, min(chunk, size - self.mapped), size)
            self.device.synchronize()
        self.allocator.limit = self.address + self.mapped

    def map_parts(self, parts: Sequence[tuple[int, int]]) -> None:
        """Map only the granules that hold any of these spans (address, bytes); they read as zeros.

        For memory whose inhabitants are known and few: what lay between them when they were recorded is not needed.

        Raises:
            OutOfMemory: the device has not that much; nothing stays mapped.
            MappingError: a span lies outside the range, or something is mapped already.
        """
        granule, end = arena_granule(self.vmm, self.device), self.address + self.size
        if self.mapped or any(start < self.address or start + size > end for start, size in parts):
            raise MappingError(
                f"spans of the range {self.name} cannot be mapped", why="they lie outside, or it is in use"
            )
        joined: list[list[int]] = []
        for start, size in sorted(parts):
            low, high = start // granule * granule, -(-(start + size) // granule) * granule
            if joined and low <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], high)
            else:
                joined.append([low, high])
        total = sum(high - low for low, high in joined)
        try:
            with self.device.current():
                for low, high in joined:
                    self._add(low, high - low, total)
                self.device.synchronize()
        except BaseException:
            self.close()
            raise

    def trim(self) -> None:
        """Give back the chunks nothing was handed out of."""
        with self.device.current():
            self.device.synchronize()
            while self._chunks and self._chunks[-1].address >= self.allocator.cursor:
                chunk = self._chunks.pop()
                driver.quietly("cuMemUnmap", chunk.address, chunk.size)
                driver.quietly("cuMemRelease", chunk.handle)
                self.mapped -= chunk.size
        self.allocator.limit = self.address + self.mapped

    def map_over_and_over(self, size: int, slab: int) -> None:
        """Map ``size`` bytes of addresses to one slab again and again: for a process that proves and serves nothing.

        Raises:
            OutOfMemory: the device has not one slab; nothing stays mapped.
        """
        granule = arena_granule(self.vmm, self.device)
        size, slab = -(-size // granule) * granule, -(-slab // granule) * granule
        if self.mapped:
            raise MappingError(f"the range {self.name} is mapped already")
        handles: dict[int, Any] = {}
        firsts: dict[int, int] = {}  # where each is mapped first
        with self.device.current():
            try:
                at, end = self.address, self.address + size
                with self._lacking(size):
                    while at < end:
                        length = min(slab, end - at)
                        if length not in handles:  # the last one may be shorter
                            handles[length], firsts[length] = self._create(length), at
                        driver.call("cuMemMap", at, length, 0, handles[length], 0)
                        self._aliases.append(_Chunk(at, length, handles[length]))
                        at += length
                    self._allow(self.address, size)
                    for length, first in firsts.items():
                        driver.call("cuMemsetD8", first, 0, length)
                    self.device.synchronize()
            except BaseException:
                for alias in self._aliases:
                    driver.quietly("cuMemUnmap", alias.address, alias.size)
                self._aliases.clear()
                for handle in handles.values():
                    driver.quietly("cuMemRelease", handle)
                raise
        self.mapped = size
        self.allocator.limit = self.address + size

    def back(self, *, chunk: int = CHUNK, kept: Sequence[tuple[int, Fd]] = ()) -> None:
        """Real memory, as far as anything was handed out; after :meth:`rest`, or in place of an aliased slab.

        Addresses stay as they are, and so does whatever points to them.

        Args:
            kept: bytes and descriptor of each part of what another process exported; it is mapped as it is. Without
                it the memory is new, and zeroed.

        Raises:
            OutOfMemory: the device has not that much; nothing was changed, or nothing is mapped, as after :meth:`rest`.
            MappingError: the range has its memory, or what is kept is not as much as was handed out.
            DriverError: in the middle of the change; nothing is mapped.
        """
        if self._chunks:
            raise MappingError(f"the range {self.name} has its memory", why="it was given back by nobody")
        made: list[_Chunk] = []
        with self.device.current():
            try:
                if kept:
                    with self._lacking(self.used):
                        self._import(kept, made)
                while (done := sum(each.size for each in made)) < self.used:
                    size = min(chunk, self.used - done)
                    with self._lacking(self.used, had=done):
                        made.append(_Chunk(self.address + done, size, self._create(size)))
            except BaseException:
                for each in made:
                    driver.quietly("cuMemRelease", each.handle)
                raise
            self.device.synchronize()
            self._unmap_aliases()
            self.allocator.limit = self.address
            with self._lacking(self.used, had=sum(each.size for each in made)), ExitStack() as undo:
                for each in made:
                    undo.callback(driver.quietly, "cuMemRelease", each.handle)
                for each in made:
                    driver.call("cuMemMap", each.address, each.size, 0, each.handle, 0)
                    undo.callback(driver.quietly, "cuMemUnmap", each.address, each.size)
                if made:
                    self._allow(self.address, sum(each.size for each in made))
                for each in made if not kept else ():
                    driver.call("cuMemsetD8", each.address, 0, each.size)
                self.device.synchronize()
                undo.pop_all()
        self._chunks.extend(made)
        self.mapped = sum(each.size for each in made)
        self.allocator.limit = self.address + self.mapped

    def _import(self, kept: Sequence[tuple[int, Fd]], into: list[_Chunk]) -> None:
        sizes = [size for size, _ in kept]
        granule = arena_granule(self.vmm, self.device)
        if any(size % granule for size in sizes) or not sum(sizes[:-1]) < self.used <= sum(sizes):
            raise MappingError(
                f"memory kept for the range {self.name} does not fit",
                why=f"parts of {sizes} bytes were kept, {self.used} bytes are in use",
            )
        at = self.address
        for size, fd in kept:
            try:
                handle = driver.call("cuMemImportFromShareableHandle", fd.fileno(), self.vmm.descriptor)
            except DriverError as error:
                if driver.code_of(error) == driver.OUT_OF_MEMORY:
                    raise
                why = f"a descriptor does not import: {error}"
                raise MappingError(f"memory kept for the range {self.name} does not fit", why=why) from error
            into.append(_Chunk(at, size, handle))
            at += size

    def export(self) -> list[tuple[int, Fd]]:
        """Bytes and a descriptor of each part of the memory, for :meth:`back` in another process; the caller's own.

        Raises:
            MappingError: the memory is not without gaps, or a slab stands for it.
            DriverError: the driver exports none.
        """
        if self._aliases or [c.address for c in self._chunks] != _addresses(self.address, self._chunks):
            raise MappingError(f"the range {self.name} cannot be exported", why="it is not one piece of memory")
        made: list[tuple[int, Fd]] = []
        try:
            for each in self._chunks:
                number = driver.call("cuMemExportToShareableHandle", each.handle, self.vmm.descriptor, 0)
                made.append((each.size, Fd(int(number))))
                os.set_inheritable(made[-1][1].fileno(), False)
        except BaseException:
            for _, fd in made:
                fd.close()
            raise
        return made

    def rest(self) -> None:
        """Give the memory back, a slab that stood for it too; the opposite of :meth:`back`.

        Nothing is mapped then: until :meth:`back`, whoever touches these addresses faults.

        Raises:
            DriverError: in the middle of the change; the range is of no use any more.
        """
        with self.device.current():
            self.device.synchronize()
            self._unmap_aliases()
            while self._chunks:
                gone = self._chunks.pop()
                driver.call("cuMemUnmap", gone.address, gone.size)
                driver.call("cuMemRelease", gone.handle)
        self.mapped = 0
        self.allocator.limit = self.address

    def _unmap_aliases(self) -> None:
        for alias in self._aliases:
            driver.call("cuMemUnmap", alias.address, alias.size)
        for handle in {id(alias.handle): alias.handle for alias in self._aliases}.values():
            driver.call("cuMemRelease", handle)
        self._aliases.clear()
        self.mapped = 0

    def close(self) -> None:
        """Unmap everything; the addresses stay reserved. Nothing may use the memory any more."""
        self._pool = None
        with self.device.current():
            self.device.synchronize()
            for chunk in (*self._chunks, *self._aliases):
                driver.quietly("cuMemUnmap", chunk.address, chunk.size)
            for handle in {id(c.handle): c.handle for c in (*self._chunks, *self._aliases)}.values():
                driver.quietly("cuMemRelease", handle)
        self._chunks.clear()
        self._aliases.clear()
        self.mapped = 0
        self.allocator.limit = self.address

    def _add(self, where: int, length: int, wanted: int) -> None:
        with self._lacking(wanted), ExitStack() as undo:
            handle = self._create(length)
            undo.callback(driver.quietly, "cuMemRelease", handle)
            driver.call("cuMemMap", where, length, 0, handle, 0)
            undo.callback(driver.quietly, "cuMemUnmap", where, length)
            self._allow(where, length)
            driver.call("cuMemsetD8", where, 0, length)  # later processes must find what this one found
            undo.pop_all()
        self._chunks.append(_Chunk(where, length, handle))
        self.mapped += length

    def _create(self, length: int) -> Any:
        return driver.call("cuMemCreate", length, self.vmm.properties(self.device.ordinal), 0)

    @contextmanager
    def _lacking(self, wanted: int, *, had: int | None = None) -> Iterator[None]:
        """What a driver without memory says, as OutOfMemory: for a mapping and access to it, it takes some as well."""
        try:
            yield
        except DriverError as error:
            if driver.code_of(error) != driver.OUT_OF_MEMORY:
                raise
            free = self.device.room().free
            had = self.mapped if had is None else had
            raise OutOfMemory(
                f"the range {self.name} needs {wanted} bytes, {had} of them are there",
                why=f"{free} bytes are free",
                fix="Leave more memory beside the key/value cache.",
                needed=wanted - had,
                free=free,
            ) from error

    def _allow(self, where: int, length: int) -> None:
        driver.call("cuMemSetAccess", where, length, [self.vmm.access(self.device.ordinal, self.vmm.read_write)], 1)


def _addresses(start: int, chunks: Sequence[_Chunk]) -> list[int]:
    """Where chunks lie that follow each other."""
    return [start + sum(each.size for each in chunks[:number]) for number in range(len(chunks))]


@dataclass
class Ranges:
    """The four ranges of one device, and where its span of the arena lies."""

    device: CudaDevice
    span: tuple[int, int]
    kv: NamedRange
    static: NamedRange
    scratch: NamedRange
    pool: NamedRange

    @property
    def all(self) -> tuple[NamedRange, ...]:
        return (self.kv, self.static, self.scratch, self.pool)


def reserve(device: CudaDevice) -> Ranges:
    """Reserve the ranges at their addresses, as early in a process as possible.

    Raises:
        MappingError: an address is taken, or this processor or device cannot have such ranges.
        DriverError: no driver.
    """
    require_sharing(device)
    vmm = Vmm()
    index = gpus.arena_index(device.pci_bus)
    made: dict[str, NamedRange] = {}
    with device.current(), ExitStack() as undo:
        for name, part in NAMES.items():
            wanted = arena.address_of(index, part)
            where = int(driver.call("cuMemAddressReserve", part.size, 0, wanted, 0))
            undo.callback(driver.quietly, "cuMemAddressFree", where, part.size)
            if where != wanted:
                raise MappingError(
                    f"the range {name} cannot lie at {wanted:#x}",
                    why="something else in this process has these addresses",
                    fix="Start FER before it, or free the addresses.",
                )
            allocator = BumpAllocator(where, where)
            made[name] = NamedRange(
                name=name, address=where, size=part.size, device=device, vmm=vmm, allocator=allocator
            )
        undo.pop_all()
    return Ranges(device=device, span=span_of(device), **made)


def span_of(device: DeviceFacts) -> tuple[int, int]:
    """First address, and the one behind the last, of a device's part of the arena."""
    base = arena.address_of(gpus.arena_index(device.pci_bus))
    return base, base + arena.SPAN


def arena_granule(vmm: Vmm, device: CudaDevice) -> int:
    """Bytes that mappings on this device are multiples of."""
    key = device.ordinal
    if key not in _granules:
        properties = vmm.properties(device.ordinal)
        _granules[key] = max(
            int(driver.call("cuMemGetAllocationGranularity", properties, option)) for option in vmm.granularities
        )
    return _granules[key]


_granules: dict[int, int] = {}
_lost: list[Any] = []


def torch_trouble(environ: dict[str, str]) -> str:
    """Why torch's allocator cannot be routed into ranges in this process, ``""`` where it can."""
    import torch

    if torch.cuda.get_allocator_backend() != "native":
        return f"torch allocates by {torch.cuda.get_allocator_backend()}, which knows no pools"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environ.get(name, "").lower().replace(" ", ""):
            return f"{name} sets expandable_segments, whose memory lies at addresses of torch's own"
    return ""
