"""What is read off NVML: counts of multiprocessors of whole GPUs and of MIG instances, and never a guess."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import pytest

from fer.kernels import compat, gpus
from fer.kernels.stage import KernelsStage
from tests.support.cudagraph_engine import ToyEngine

NOT_SUPPORTED = 3


class Nvml:
    """The calls that are made, answered as a driver does; a GPU is its capability, cores and instances."""

    def __init__(self, *devices: tuple[tuple[int, int], int, list[int] | None]) -> None:
        self.devices = devices

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # what is asked beside these would be asked of a real library too

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> int:
        version._obj.value = 13000
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"580.82.07"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:
        device._obj.value = 1 + index
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self.devices[device.value - 1][0]
        return 0

    def nvmlDeviceGetName(self, device: Any, text: Any, size: Any) -> int:
        text.value = f"GPU {device.value}".encode()
        return 0

    def nvmlDeviceGetUUID(self, device: Any, text: Any, size: Any) -> int:
        text.value = f"GPU-{device.value}".encode()
        return 0

    def nvmlDeviceGetMigMode(self, device: Any, mode: Any, pending: Any) -> int:
        instances = self.devices[device.value - 1][2]
        mode._obj.value = pending._obj.value = bool(instances)
        return NOT_SUPPORTED if instances is None else 0

    def nvmlDeviceGetNumGpuCores(self, device: Any, cores: Any) -> int:
        cores._obj.value = self.devices[device.value - 1][1]
        return 0 if cores._obj.value else NOT_SUPPORTED

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any, most: Any) -> int:
        most._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int, instance: Any) -> int:
        if index >= len(self.devices[device.value - 1][2] or ()):
            return 6  # not found
        instance._obj.value = 1000 * device.value + index
        return 0

    def nvmlDeviceGetAttributes_v2(self, instance: Any, told: Any) -> int:
        device, index = divmod(instance.value, 1000)
        told._obj.multiprocessors = (self.devices[device - 1][2] or [])[index]
        return 0


def looked(*devices: tuple[tuple[int, int], int, list[int] | None]) -> gpus.Seen:
    seen = gpus._look(Nvml(*devices))
    assert seen is not None
    return seen


@pytest.mark.parametrize(
    ("capability", "cores", "count"),
    [((9, 0), 16896, 132), ((9, 0), 14592, 114), ((8, 0), 6912, 108), ((8, 9), 18176, 142), ((7, 5), 2560, 40)],
    ids=["H200", "H100 PCIe", "A100", "L40S", "T4"],
)
def test_cores_tell_multiprocessors(capability: tuple[int, int], cores: int, count: int) -> None:
    assert looked((capability, cores, None)).multiprocessors == (count,)


def test_what_is_not_known_is_not_guessed() -> None:
    assert looked(((15, 0), 16896, [])).multiprocessors == ()  # an architecture that nobody has told us of
    assert looked(((9, 0), 16897, [])).multiprocessors == ()
    assert looked(((9, 0), 0, [])).multiprocessors == ()


def test_instances_tell_their_own() -> None:
    seen = looked(((9, 0), 16896, [60, 16, 16]), ((9, 0), 16896, []))
    assert seen.multiprocessors == (16, 60, 132)
    assert (seen.archs, seen.names, seen.uuids) == ((90,), ("GPU 1", "GPU 2"), ("GPU-1", "GPU-2"))
    assert (seen.driver, seen.cuda) == ("580.82.07", (13, 0))


def test_the_structure_is_as_in_nvml_h() -> None:
    assert ctypes.sizeof(gpus._Attributes) == 40 and gpus._Attributes.memory_mib.offset == 32


def test_it_is_told_and_refuses_nothing() -> None:
    facts = compat.soft_facts(looked(((9, 0), 16896, None)))
    assert facts == {"gpu": ["GPU 1"], "multiprocessors": [132], "driver": "580.82.07"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Processes in which NVML was asked; it answers from the second time on."""
    found: list[int] = []

    def ask() -> gpus.Seen | None:
        found.append(os.getpid())
        return gpus.Seen(archs=(90,)) if len(found) > 1 else None

    monkeypatch.setattr(gpus, "_seen", None)
    monkeypatch.setattr(gpus, "_ask", ask)
    yield found


def test_a_process_looks_once_and_its_children_look_again(asked: list[int]) -> None:
    assert gpus.look() is None, "there may be a driver later"
    seen = gpus.look()
    assert seen is not None and gpus.look() is seen and len(asked) == 2
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, bytes([gpus.look() is not None, len(asked) == 3]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 2) == b"\1\1"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(("device", "times"), [("cuda:0", 1), ("cpu", 0)])
def test_a_spare_looks_ahead_for_an_engine_on_a_gpu(asked: list[int], device: str, times: int) -> None:
    engine = ToyEngine()
    engine.device = device
    KernelsStage().imagine(engine)
    assert len(asked) == times
