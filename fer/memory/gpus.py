"""The host's physical GPUs, and which of them CUDA's device numbers mean. Loads no torch and makes no CUDA context."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fer.errors import DriverError, UsageError
from fer.memory import arena, driver

_SYSFS: Final = Path("/sys/bus/pci/devices")
_NVIDIA: Final = "0x10de"
_PCI: Final = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE)
_NVML_NOT_SUPPORTED: Final = 3


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One physical GPU.

    Attributes:
        uuid: ``"GPU-..."``.
        pci_bus: ``"0000:1b:00.0"``.
        index: place among the listed GPUs in PCI bus order.
        name: marketing name.
        total: bytes of memory, 0 where unknown.
        free: bytes nobody used when the inventory was made.
        mig: MIG mode is on; CUDA then sees the instances, never the GPU itself.
        instances: ``"MIG-..."`` UUIDs of its MIG instances.
    """

    uuid: str
    pci_bus: str
    index: int
    name: str
    total: int = 0
    free: int = 0
    mig: bool = False
    instances: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Visible:
    """What CUDA will enumerate.

    Attributes:
        uuids: UUID of CUDA device 0, 1, ...
        stopped_at: the entry of ``CUDA_VISIBLE_DEVICES`` that means no device; CUDA ignores it and all after it.
        certain: False where CUDA orders devices by speed and the host has different models, which only CUDA can rank.
    """

    uuids: tuple[str, ...]
    stopped_at: str = ""
    certain: bool = True


def canonical_bus(text: str) -> str:
    """A PCI address in sysfs's form, ``"0000:1b:00.0"``; NVML writes eight digits of domain, CUDA four.

    Raises:
        ValueError: it is no PCI address.
    """
    match = _PCI.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a PCI address: {text!r}")
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """CUDA's device numbers under ``CUDA_VISIBLE_DEVICES``: numbers, UUIDs, unique beginnings of UUIDs, MIG UUIDs.

    Args:
        gpus: as :func:`inventory` gives them.
        environ: the process's environment.
    """
    ordered = sorted(gpus, key=lambda gpu: gpu.index)
    fastest_first = environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST") != "PCI_BUS_ID"
    unsure = fastest_first and len({gpu.name for gpu in ordered}) > 1
    devices = [device for gpu in ordered for device in _devices(gpu)]
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return Visible(uuids=tuple(devices), certain=not unsure)
    known = [gpu.uuid for gpu in ordered if not gpu.mig] + [name for gpu in ordered for name in gpu.instances]
    chosen: list[str] = []
    by_number = False
    for entry in (part.strip() for part in setting.split(",")):
        by_number |= entry.isdigit()
        found = _entry(entry, devices, known, ordered)
        if not found:
            return Visible(uuids=tuple(chosen), stopped_at=entry, certain=not (unsure and by_number))
        if found in chosen:  # CUDA then sees no device at all
            return Visible(uuids=(), stopped_at=entry, certain=True)
        chosen.append(found)
    return Visible(uuids=tuple(chosen), certain=not (unsure and by_number))


def resolve(ordinal: int, environ: Mapping[str, str], gpus: Sequence[Gpu]) -> str:
    """UUID of CUDA device ``ordinal``.

    Raises:
        UsageError: CUDA will not see such a device under this environment.
    """
    seen = visible(gpus, environ)
    if 0 <= ordinal < len(seen.uuids):
        return seen.uuids[ordinal]
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    raise UsageError(
        f"there is no CUDA device {ordinal}",
        why=f"CUDA_VISIBLE_DEVICES={setting!r} shows {len(seen.uuids)} of {len(gpus)} GPUs"
        + (f" and stops at {seen.stopped_at!r}" if setting is not None and len(seen.uuids) <= ordinal else ""),
        fix="Name the device by its UUID, as `nvidia-smi -L` prints it.",
    )


def _devices(gpu: Gpu) -> tuple[str, ...]:
    return gpu.instances if gpu.mig else (gpu.uuid,)


def _entry(entry: str, devices: Sequence[str], known: Sequence[str], gpus: Sequence[Gpu]) -> str:
    """The device one entry of CUDA_VISIBLE_DEVICES means, "" for none."""
    if entry.isdigit():
        number = int(entry)
        return devices[number] if number < len(devices) else ""
    if entry.startswith("MIG-GPU-"):  # drivers before 470: MIG-GPU-<uuid>/<gpu instance>/<compute instance>
        owner, _, _ = entry.removeprefix("MIG-").partition("/")
        found = [name for gpu in gpus if gpu.uuid == owner for name in gpu.instances]
    elif entry.startswith(("GPU-", "MIG-")):
        found = [name for name in known if name.startswith(entry)]
    else:
        return ""
    return found[0] if len(found) == 1 else ""


@functools.cache  # a start asks several times, and a host with eight GPUs has hundreds of devices to look through
def arena_index(pci_bus: str, devices: Path = _SYSFS) -> int:
    """A GPU's place among the host's GPUs in PCI bus order, which gives it its part of the arena.

    sysfs comes first: a container that shows a process one GPU of eight still shows it the host's PCI bus, whereas
    NVML and the driver number only what the container may use.
    """
    own = canonical_bus(pci_bus)
    for find in (lambda: _sysfs_buses(devices), _nvml_buses, _driver_buses):
        buses = find()
        if own in buses:
            return sorted(buses).index(own) % arena.DEVICES
    return 0


def _sysfs_buses(devices: Path) -> list[str]:
    """Addresses of the NVIDIA display and 3D controllers (class 0x03); NVSwitches and audio functions are others."""
    found = []
    try:
        entries = sorted(devices.iterdir())
    except OSError:
        return []
    for entry in entries:
        try:
            vendor, kind = (entry / "vendor").read_text().strip(), (entry / "class").read_text().strip()
            if vendor == _NVIDIA and kind.startswith("0x03"):
                found.append(canonical_bus(entry.name))
        except (OSError, ValueError):
            continue
    return found


def _nvml_buses() -> list[str]:
    try:
        return [gpu.pci_bus for gpu in inventory()]
    except DriverError:
        return []


def _driver_buses() -> list[str]:
    try:
        driver.call("cuInit", 0)
        found = []
        for ordinal in range(driver.call("cuDeviceGetCount")):
            text = driver.call("cuDeviceGetPCIBusId", 32, driver.call("cuDeviceGet", ordinal))
            found.append(canonical_bus(text.split(b"\0", 1)[0].decode()))
        return found
    except (DriverError, ValueError):
        return []


class _PciInfo(ctypes.Structure):  # nvmlPciInfo_t of nvmlDeviceGetPciInfo_v3
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _Memory(ctypes.Structure):  # nvmlMemory_t
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Nvml:
    """NVML by ctypes: it comes with the driver, so no package is needed."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise DriverError("NVML is missing", why=str(error), fix="Install a NVIDIA driver.", code=-1) from error
        self.call("nvmlInit_v2")

    def call(self, name: str, *arguments: Any) -> None:
        """Call and check; the results are in the arguments."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = self._library.nvmlErrorString
            text.restype = ctypes.c_char_p
            raise DriverError(f"{name} failed ({code})", why=(text(code) or b"").decode(), call=name, code=code)

    def text(self, name: str, handle: Any, length: int = 96) -> str:
        buffer = ctypes.create_string_buffer(length)
        self.call(name, handle, buffer, length)
        return buffer.value.decode(errors="replace")


def inventory() -> list[Gpu]:
    """The GPUs this process may see, in PCI bus order, whatever ``CUDA_VISIBLE_DEVICES`` says.

    Raises:
        DriverError: there is no NVIDIA driver, or it does not answer.
    """
    nvml = _Nvml()
    try:
        count = ctypes.c_uint()
        nvml.call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for number in range(count.value):
            handle = ctypes.c_void_p()
            nvml.call("nvmlDeviceGetHandleByIndex_v2", number, ctypes.byref(handle))
            found.append(_describe(nvml, handle))
    finally:
        nvml.call("nvmlShutdown")
    return number_by_bus(found)


def number_by_bus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The same GPUs, sorted by PCI address and numbered so."""
    ordered = sorted(gpus, key=lambda gpu: gpu.pci_bus)
    return [Gpu(**{**vars(gpu), "index": index}) for index, gpu in enumerate(ordered)]


def _describe(nvml: _Nvml, handle: ctypes.c_void_p) -> Gpu:
    pci, memory = _PciInfo(), _Memory()
    nvml.call("nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    mig = _mig_mode(nvml, handle)
    return Gpu(
        uuid=nvml.text("nvmlDeviceGetUUID", handle),
        pci_bus=canonical_bus(pci.bus_id.decode()),
        index=0,
        name=nvml.text("nvmlDeviceGetName", handle),
        total=memory.total,
        free=memory.free,
        mig=mig,
        instances=_instances(nvml, handle) if mig else (),
    )


def _mig_mode(nvml: _Nvml, handle: ctypes.c_void_p) -> bool:
    now, pending = ctypes.c_uint(), ctypes.c_uint()
    try:
        nvml.call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending))
    except DriverError as error:
        if driver.code_of(error) == _NVML_NOT_SUPPORTED:
            return False
        raise
    return now.value == 1


def _instances(nvml: _Nvml, handle: ctypes.c_void_p) -> tuple[str, ...]:
    most = ctypes.c_uint()
    nvml.call("nvmlDeviceGetMaxMigDeviceCount", handle, ctypes.byref(most))
    found = []
    for number in range(most.value):
        instance = ctypes.c_void_p()
        try:
            nvml.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number, ctypes.byref(instance))
        except DriverError:
            continue  # an unused slot
        found.append(nvml.text("nvmlDeviceGetUUID", instance))
    return tuple(found)
