"""What NVML tells of GPUs that matters to kernels. Opens no device and makes no context.

NVML has no count of multiprocessors but for MIG instances. Of a whole GPU it tells the CUDA cores, and how many of them
a multiprocessor has is fixed by the architecture. The CUDA driver would tell the count itself after ``cuInit``, which a
process that engines are forked from must not call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

CORES: Final = {
    **dict.fromkeys((70, 72, 75, 80), 64),
    **dict.fromkeys((86, 87, 89, 90, 100, 101, 103, 110, 120, 121), 128),
}
"""CUDA cores of one multiprocessor by compute capability, as NVIDIA's samples have them (``helper_cuda.h``)."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The GPUs of this machine, as far as kernels care.

    Attributes:
        archs: compute capabilities as Triton writes them, ``90`` for 9.0, in ascending order.
        names: models, in ascending order.
        multiprocessors: of each GPU, or of each MIG instance where a GPU is split, in ascending order; a GPU that does
            not tell is left out.
        uuids: in the order of NVML.
        driver: version of the driver, ``"580.82.07"``.
        cuda: the newest CUDA version the driver runs, ``(13, 0)``.
    """

    archs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    multiprocessors: tuple[int, ...] = ()
    uuids: tuple[str, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)


_seen: tuple[int, Seen] | None = None  # and the process that looked: a child may live long after


def look() -> Seen | None:
    """Ask NVML, once in a process: it takes 20 ms, and 100 beside a process of the GPU that ends.

    Returns:
        None where there is no NVIDIA driver, or it does not answer.
    """
    global _seen
    if _seen is None or _seen[0] != os.getpid():
        found = _ask()
        _seen = (os.getpid(), found) if found is not None else None
        return found
    return _seen[1]


def _ask() -> Seen | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    try:
        return _look(nvml)
    except (AttributeError, ValueError):
        return None  # a library too old for one of the questions
    finally:
        nvml.nvmlShutdown()


def _look(nvml: Any) -> Seen | None:
    count, cuda = ctypes.c_uint(), ctypes.c_int()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) or nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)):
        return None
    driver = ctypes.create_string_buffer(80)
    nvml.nvmlSystemGetDriverVersion(driver, ctypes.c_uint(len(driver)))
    found: list[tuple[int, str, str]] = []
    sizes: set[int] = set()
    for index in range(count.value):
        device = ctypes.c_void_p()
        major, minor = ctypes.c_int(), ctypes.c_int()
        name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue
        if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            continue
        arch = 10 * major.value + minor.value
        nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name)))
        nvml.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(len(uuid)))
        sizes.update(_multiprocessors(nvml, device, arch))
        found.append((arch, name.value.decode(), uuid.value.decode()))
    return Seen(
        archs=tuple(sorted({each[0] for each in found})),
        names=tuple(sorted({each[1] for each in found})),
        multiprocessors=tuple(sorted(sizes)),
        uuids=tuple(each[2] for each in found),
        driver=driver.value.decode("ascii", "replace"),
        cuda=(cuda.value // 1000, cuda.value % 1000 // 10),
    )


def _multiprocessors(nvml: Any, device: Any, arch: int) -> Iterator[int]:
    """Counts of a GPU, or of its MIG instances; nothing where it does not tell."""
    mode, pending = ctypes.c_uint(), ctypes.c_uint()
    if not nvml.nvmlDeviceGetMigMode(device, ctypes.byref(mode), ctypes.byref(pending)) and mode.value:
        yield from _instances(nvml, device)
        return
    cores = ctypes.c_uint()
    if not nvml.nvmlDeviceGetNumGpuCores(device, ctypes.byref(cores)) and cores.value and arch in CORES:
        count, rest = divmod(cores.value, CORES[arch])
        if not rest:
            yield count


class _Attributes(ctypes.Structure):
    """``nvmlDeviceAttributes_t``: the count, seven others, and the memory's size."""

    _fields_ = (("multiprocessors", ctypes.c_uint), ("others", ctypes.c_uint * 7), ("memory_mib", ctypes.c_ulonglong))


def _instances(nvml: Any, device: Any) -> Iterator[int]:
    most = ctypes.c_uint()
    if nvml.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(most)):
        return
    for index in range(most.value):
        instance, told = ctypes.c_void_p(), _Attributes()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, index, ctypes.byref(instance)):
            continue  # places that hold no instance
        if not nvml.nvmlDeviceGetAttributes_v2(instance, ctypes.byref(told)):
            yield told.multiprocessors
