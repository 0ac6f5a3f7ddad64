"""A CUDA driver made of dictionaries, for the parts of ``fer.memory`` that only keep books.

It follows the real driver's rules where they matter here: fixed addresses may be taken, mapping needs a reservation
and a handle, access needs a mapping, memory lives as long as a handle, a mapping or a descriptor does. Exported
descriptors are real ones (memfds that name the allocation). ``fail`` makes one call fail once.
"""

from __future__ import annotations

import ctypes
import enum
import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
GRANULARITY = 2 << 20


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_DEVICE_UNAVAILABLE = 46
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


OK = Status.CUDA_SUCCESS
BAD = Status.CUDA_ERROR_INVALID_VALUE


class Names:
    """Any enumerator by its own name."""

    def __getattr__(self, name: str) -> str:
        return name


class Structure(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(location=SimpleNamespace(type=None, id=None))


class IpcHandle:
    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:
        return ctypes.addressof(self.buffer)


@dataclass
class FakeDriver:
    """State of one pretended device 0; pass it where ``driver.bindings()`` is expected."""

    total: int = 8 * GIB
    grant_hint: bool = True
    shares: int = 1
    holder_ordinal: int = 0
    uuid: bytes = bytes(range(16))
    name: bytes = b"Pretended GPU"
    allocations: dict[int, int] = field(default_factory=dict)  # number -> bytes
    handles: dict[int, int] = field(default_factory=dict)  # handle -> allocation
    reserved: dict[int, int] = field(default_factory=dict)  # address -> bytes
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # address -> (bytes, allocation)
    cleared: list[tuple[int, int]] = field(default_factory=list)  # calls of cuMemsetD8
    allowed: list[tuple[int, int, str]] = field(default_factory=list)  # calls of cuMemSetAccess
    blocks: dict[int, int] = field(default_factory=dict)  # cuMemAlloc: address -> bytes
    opened: dict[int, int] = field(default_factory=dict)  # cuIpcOpenMemHandle: address -> count
    exported: set[int] = field(default_factory=set)
    depth: int = 0
    failing: dict[str, list[tuple[int, Status]]] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    _next: int = 100

    CUmemAllocationProp = Structure
    CUmemAccessDesc = Structure
    CUipcMemHandle = IpcHandle
    CUmemAllocationType = Names()
    CUmemAllocationHandleType = Names()
    CUmemLocationType = Names()
    CUmemAccess_flags = Names()
    CUmemAllocationGranularity_flags = Names()
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED=1,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED=2,
    )
    CUpointer_attribute = SimpleNamespace(
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL="ordinal", CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE="ipc"
    )

    def fail(self, call: str, *, after: int = 0, status: Status = BAD) -> None:
        """Make ``call`` fail once, after that many successes."""
        self.failing.setdefault(call, []).append((after, status))

    def used(self) -> int:
        """Bytes that something still holds."""
        alive = set(self.handles.values()) | {number for _, number in self.mapped.values()} | self.exported
        return sum(size for number, size in self.allocations.items() if number in alive) + sum(self.blocks.values())

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cu"):
            return found

        def counted(*arguments: Any) -> Any:
            self.calls.append(name)
            plans = self.failing.get(name, [])
            for place, (after, status) in enumerate(plans):
                if after == 0:
                    del plans[place]
                    self.fired.append(name)
                    return (status,)
                plans[place] = (after - 1, status)
            return found(*arguments)

        return counted

    def _number(self) -> int:
        self._next += 1
        return self._next

    def cuInit(self, flags: int) -> Any:
        return (OK,)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return (OK, ordinal)

    def cuDeviceGetCount(self) -> Any:
        return (OK, 1)

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return (OK, self.name.ljust(length, b"\0"))

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> Any:
        return (OK, b"0000:1B:00.0".ljust(length, b"\0"))

    def cuDeviceGetUuid(self, device: int) -> Any:
        return (OK, SimpleNamespace(bytes=self.uuid))

    def cuDeviceGetAttribute(self, kind: Any, device: int) -> Any:
        return (OK, self.shares)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return (OK, "context")

    def cuCtxPushCurrent(self, context: Any) -> Any:
        self.depth += 1
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:
        self.depth -= 1
        return (OK, "context")

    def cuCtxSynchronize(self) -> Any:
        assert self.depth > 0
        return (OK,)

    def cuMemGetInfo(self) -> Any:
        assert self.depth > 0
        return (OK, self.total - self.used(), self.total)

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> Any:
        return (OK, GRANULARITY)

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        if address and self.grant_hint and address not in self.reserved:
            where = address
        else:
            where = 0x7000_0000_0000 + self._number() * (1 << 40)
        self.reserved[where] = size
        return (OK, where)

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        if self.reserved.get(address) != size:
            return (BAD,)
        del self.reserved[address]
        return (OK,)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> Any:
        assert properties.location.id == 0 and size % GRANULARITY == 0
        if self.used() + size > self.total:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY,)
        number, handle = self._number(), self._number()
        self.allocations[number] = size
        self.handles[handle] = number
        return (OK, handle)

    def cuMemRelease(self, handle: int) -> Any:
        return (OK,) if self.handles.pop(handle, None) else (BAD,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        inside = any(start <= address and address + size <= start + n for start, n in self.reserved.items())
        taken = any(start < address + size and address < start + n for start, (n, _) in self.mapped.items())
        if not inside or taken or self.allocations[self.handles[handle]] != size:
            return (BAD,)
        self.mapped[address] = (size, self.handles[handle])
        return (OK,)

    def cuMemsetD8(self, address: int, value: int, count: int) -> Any:
        inside = any(start <= address and address + count <= start + n for start, (n, _) in self.mapped.items())
        self.cleared.append((address, count))
        return (OK,) if inside and self.depth > 0 else (BAD,)

    def cuMemUnmap(self, address: int, size: int) -> Any:
        if self.mapped.get(address, (0, 0))[0] != size:
            return (BAD,)
        del self.mapped[address]
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, accesses: list[Any], count: int) -> Any:
        covered = sum(n for start, (n, _) in self.mapped.items() if address <= start < address + size)
        if covered != size or count != len(accesses):
            return (BAD,)
        self.allowed.append((address, size, accesses[0].flags.rpartition("_")[2]))
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> Any:
        number = self.handles[handle]
        self.exported.add(number)
        fd = os.memfd_create("pretended-slab", 0)
        os.write(fd, b"slab %d" % number)
        return (OK, fd)

    def cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> Any:
        text = os.pread(fd, 64, 0)
        if not text.startswith(b"slab "):
            return (BAD,)
        handle = self._number()
        self.handles[handle] = int(text[5:])
        return (OK, handle)

    def cuMemGetAllocationPropertiesFromHandle(self, handle: Any) -> Any:
        return (OK, SimpleNamespace(location=SimpleNamespace(type="device", id=self.holder_ordinal)))

    def cuPointerGetAttribute(self, kind: str, address: int) -> Any:
        # The real driver answers device 0 for shared memory wherever it lies, so this is nothing to decide by.
        return (OK, 0 if kind == "ordinal" else int(self._block(address) is not None))

    def cuMemAlloc(self, size: int) -> Any:
        if self.used() + size > self.total:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY,)
        where = 0x5000_0000_0000 + self._number() * (1 << 36)
        self.blocks[where] = size
        return (OK, where)

    def cuMemFree(self, address: int) -> Any:
        return (OK,) if self.blocks.pop(address, None) else (BAD,)

    def cuMemGetAddressRange(self, address: int) -> Any:
        start = self._block(address)
        return (BAD,) if start is None else (OK, start, self.blocks[start])

    def cuIpcGetMemHandle(self, address: int) -> Any:
        handle = IpcHandle()
        handle.buffer.raw = b"%d" % address
        return (OK, handle)

    def cuIpcOpenMemHandle(self, handle: IpcHandle, flags: int) -> Any:
        start = int(handle.buffer.value or b"0")
        if start not in self.blocks:
            return (BAD,)
        there = start + (1 << 44)  # another address than the exporter's
        self.opened[there] = self.opened.get(there, 0) + 1
        return (OK, there)

    def cuIpcCloseMemHandle(self, address: int) -> Any:
        if not self.opened.get(address):
            return (BAD,)
        self.opened[address] -= 1
        return (OK,)

    def _block(self, address: int) -> int | None:
        return next((start for start, size in self.blocks.items() if start <= address < start + size), None)
