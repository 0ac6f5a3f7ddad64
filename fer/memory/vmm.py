"""The driver's words for memory that is shared by descriptor."""

from __future__ import annotations

from typing import Any

from fer.errors import MappingError
from fer.memory import driver
from fer.memory.device import CudaDevice


class Vmm:
    """The driver's enumerators and structures that slabs are made of."""

    def __init__(self) -> None:
        names = driver.bindings()
        self._names = names
        self.descriptor = names.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.read = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        self.read_write = names.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        options = names.CUmemAllocationGranularity_flags
        self.granularities = (
            options.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            options.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )

    def properties(self, ordinal: int) -> Any:
        properties = self._names.CUmemAllocationProp()
        properties.type = self._names.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.requestedHandleTypes = self.descriptor
        return properties

    def access(self, ordinal: int, flags: Any) -> Any:
        access = self._names.CUmemAccessDesc()
        access.location.type = self._names.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = flags
        return access


def require_sharing(device: CudaDevice) -> None:
    """Raises:
    MappingError: the device cannot share memory by descriptor.
    """
    for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not device.attribute(name):
            raise MappingError(
                f"{device.name} cannot share memory by descriptor",
                why=f"the driver reports {name} = 0",
                fix="Use the other transport: FER_TRANSPORT=cuda-ipc",
            )
