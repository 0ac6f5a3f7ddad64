"""What NVML tells of GPUs that matters to kernels. Opens no device and makes no context."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The GPUs of this machine, as far as kernels care.

    Attributes:
        archs: compute capabilities as Triton writes them, ``90`` for 9.0, in ascending order.
        names: models, in ascending order.
        cores: CUDA cores of each, which stand for its multiprocessors; in ascending order.
        uuids: in the order of NVML.
        driver: version of the driver, ``"580.82.07"``.
        cuda: the newest CUDA version the driver runs, ``(13, 0)``.
    """

    archs: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    uuids: tuple[str, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)


def look() -> Seen | None:
    """Ask NVML; None where there is no NVIDIA driver, or it does not answer."""
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
    found = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        major, minor, cores = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
        name, uuid = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue
        if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
            continue
        nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(len(name)))
        nvml.nvmlDeviceGetUUID(device, uuid, ctypes.c_uint(len(uuid)))
        nvml.nvmlDeviceGetNumGpuCores(device, ctypes.byref(cores))
        found.append((10 * major.value + minor.value, name.value.decode(), cores.value, uuid.value.decode()))
    return Seen(
        archs=tuple(sorted({each[0] for each in found})),
        names=tuple(sorted({each[1] for each in found})),
        cores=tuple(sorted({each[2] for each in found})),
        uuids=tuple(each[3] for each in found),
        driver=driver.value.decode("ascii", "replace"),
        cuda=(cuda.value // 1000, cuda.value % 1000 // 10),
    )
