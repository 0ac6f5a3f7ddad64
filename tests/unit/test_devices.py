"""Devices and drivers that are known without asking the driver, which takes a while; both sources are pretended."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from fer import environment
from fer.engines import devices
from fer.errors import OptionError

PROPRIETARY = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.3"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (user@host)  Sun Jul 27\n"


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two GPUs that the kernel lists, and a torch that would see none of them."""
    folder = tmp_path / "gpus"
    for bus in ("0000:1b:00.0", "0000:5d:00.0"):
        (folder / bus).mkdir(parents=True)
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(devices, "GPUS", folder)
    monkeypatch.setattr(devices, "NODES", tmp_path / "dev")
    monkeypatch.setattr(devices, "INSTANCES", tmp_path / "capabilities")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


@pytest.mark.parametrize(
    ("chosen", "listed"),
    [
        (None, 2),
        ("0", 1),
        ("1,0", 2),
        (" 1 , 0 ", 2),
        ("", 0),
        ("-1", 0),
        ("1,-1", 0),
        ("0,2", 0),
        ("0,0", 0),
        ("GPU-8f3b", 0),
        ("MIG-8f3b,0", 0),
    ],
)
def test_gpus_are_counted_where_they_are_plainly_listed(
    gpus: Path, monkeypatch: pytest.MonkeyPatch, chosen: str | None, listed: int
) -> None:
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert devices._listed() == listed
    for index in range(3):
        if index < listed:
            assert devices.resolve(f"cuda:{index}") == f"cuda:{index}"
        else:
            with pytest.raises(OptionError, match="torch sees 0 GPUs"):  # the driver was asked
                devices.resolve(f"cuda:{index}")


@pytest.mark.parametrize(
    ("device", "seen"),
    [
        ("auto", "cuda:0"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("cuda:2", None),
        ("cuda:", None),
        ("cuda:x", None),
        ("cpu", "cpu"),
        ("mps", None),
    ],
)
def test_a_device_is_foreseen_where_gpus_are_plainly_listed(gpus: Path, device: str, seen: str | None) -> None:
    assert devices.foreseen(device) == seen


def test_else_the_driver_has_to_be_asked(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f3b")
    assert [devices.foreseen(device) for device in ("auto", "cuda", "cuda:0", "cpu")] == [None, None, None, "cpu"]


def test_a_torch_without_cuda_takes_the_processor(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    assert [devices.foreseen(device) for device in ("auto", "cpu", "cuda", "cuda:0")] == ["cpu", "cpu", None, None]
    assert devices.resolve("auto") == "cpu"


def test_a_container_has_the_gpus_whose_nodes_it_has(gpus: Path) -> None:
    (devices.NODES / "nvidia0").unlink()
    assert devices._listed() == 1 and devices.foreseen("cuda:1") is None
    (devices.NODES / "nvidia1").unlink()
    assert devices._listed() == 0


def test_divided_gpus_are_counted_by_the_driver(gpus: Path) -> None:
    (devices.INSTANCES / "mig").mkdir(parents=True)
    (devices.INSTANCES / "gpu0" / "mig").mkdir(parents=True)
    assert devices._listed() == 2, "a GPU that could be divided"
    (devices.INSTANCES / "gpu1" / "mig" / "gi1").mkdir(parents=True)
    assert devices._listed() == 0


def test_without_the_kernels_list_torch_is_asked(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "GPUS", gpus / "none")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert devices.resolve("cuda:3") == "cuda:3"
    with pytest.raises(OptionError, match="torch sees 4 GPUs"):
        devices.resolve("cuda:4")


def test_a_torch_without_cuda_has_no_use_for_a_gpu(gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    with pytest.raises(OptionError, match="there is no device"):
        devices.resolve("cuda:0")


class Nvml:
    """NVIDIA's library, as much as is asked of it."""

    def __init__(self, code: int = 0) -> None:
        self.code, self.calls = code, [""]

    def nvmlInit_v2(self) -> int:
        self.calls.append("init")
        return self.code

    def nvmlSystemGetDriverVersion(self, text: Any, _: Any) -> int:
        text.value = b"550.54.15"
        return 0

    def nvmlShutdown(self) -> int:
        self.calls.append("shutdown")
        return 0


@pytest.mark.parametrize(("text", "version"), [(PROPRIETARY, "535.104.05"), (OPEN, "580.65.06")])
def test_the_kernel_tells_the_drivers_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, version: str
) -> None:
    library = Nvml()
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(environment, "KERNEL_MODULE", tmp_path / "version")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert environment._driver_version() == version and library.calls == [""], "the library was not needed"


@pytest.mark.parametrize("text", [None, "", "no version at all\n"])
def test_else_the_library_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    library = Nvml()
    if text is not None:
        (tmp_path / "version").write_text(text)
    monkeypatch.setattr(environment, "KERNEL_MODULE", tmp_path / "version")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert environment._driver_version() == "550.54.15" and library.calls == ["", "init", "shutdown"]


def test_where_neither_does_the_version_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "KERNEL_MODULE", tmp_path / "none")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml(code=9))
    found = environment.probe(environment._driver_version)
    assert isinstance(found, environment.Unknown) and "nvmlInit_v2 returned 9" in found.reason
