"""Stamps of the environment: what of this machine and installation decides the bytes of loaded weights.

A probe that fails gives :class:`Unknown` and never a default: two broken probes must not look like agreement.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KERNEL_VARIABLES = {
    "ATEN_CPU_CAPABILITY": "selects torch's CPU kernels",
    "CUBLAS_WORKSPACE_CONFIG": "selects cuBLAS algorithms",
    "NVIDIA_TF32_OVERRIDE": "switches TF32 in all of NVIDIA's libraries",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "switches TF32 in torch's matrix products",
    "TORCH_BLAS_PREFER_CUBLASLT": "selects torch's BLAS library",
}
"""Variables that select kernels below any engine, with the reason. Engines add their own through ``settings``."""

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""Where NVIDIA's kernel module tells its version, which is the driver's."""


@dataclass(frozen=True)
class Unknown:
    """A fact that could not be found out. It equals nothing, not even the same failure of another process."""

    reason: str
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))


def probe(look: Callable[[], Any]) -> Any:
    """What ``look()`` finds, ``Unknown`` where it fails or finds nothing."""
    try:
        found = look()
    except Exception as error:  # a probe may fail in any way; all of them mean the same: not known
        return Unknown(f"{type(error).__name__}: {error}")
    return Unknown("the probe found nothing") if found is None or found == "" else found


def environment(device: str) -> dict[str, Any]:
    """Stamps for weights on ``device`` (``"cpu"``, ``"cuda"`` or ``"cuda:N"``); imports torch.

    On a GPU: its name and compute capability, driver, CUDA and torch versions. On the CPU: architecture and torch.
    Both: the switches below the engine that select kernels. The index of a device is no part of it.
    """
    kind = device.partition(":")[0]
    stamps = {"device": kind, "torch": probe(_torch_version), "variables": _variables()}
    return {**stamps, **(_cpu() if kind == "cpu" else _gpu(device))}


def driver_environment(name: str, compute_capability: str) -> dict[str, Any]:
    """:func:`environment` of a GPU whose name and capability the driver told: torch's CUDA side stays untouched."""
    return {
        "device": "cuda",
        "torch": probe(_torch_version),
        "variables": _variables(),
        "gpu": name,
        "compute_capability": compute_capability,
        "driver": probe(_driver_version),
        "cuda": probe(lambda: _torch().version.cuda),
        "matmul_precision": probe(lambda: _torch().backends.cuda.matmul.fp32_precision),
    }


def package_version(name: str) -> Any:
    """Version of a distribution; None where it is not installed, with a digest of its source where it is editable."""
    module = name.replace("-", "_")
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        present = probe(lambda: importlib.util.find_spec(module) is not None)
        return None if present is False else Unknown(f"{name} is there without the metadata that tell its version")
    except Exception as error:  # damaged metadata
        return Unknown(f"{type(error).__name__}: {error}")
    if not found.version:
        return Unknown(f"the metadata of {name} tell no version")
    if not _is_editable(found):
        return found.version
    # The version of a working copy says nothing about its content.
    named = (found.read_text("top_level.txt") or module).split()
    return {"version": found.version, "source": probe(lambda: [_module_digest(name) for name in named])}


def source_digest(path: Path) -> Any:
    """SHA-256 of a source file, or of all Python files below a folder with their names; Unknown where unreadable."""
    return probe(lambda: _digest(path))


def _cpu() -> dict[str, Any]:
    return {
        "arch": probe(platform.machine),
        "cpu_capability": probe(_cpu_capability),
        "matmul_precision": probe(lambda: _torch().backends.mkldnn.matmul.fp32_precision),
    }


def _gpu(device: str) -> dict[str, Any]:
    return {
        "gpu": probe(lambda: _properties(device).name),
        "compute_capability": probe(lambda: f"{_properties(device).major}.{_properties(device).minor}"),
        "driver": probe(_driver_version),
        "cuda": probe(lambda: _torch().version.cuda or _torch().version.hip),
        "matmul_precision": probe(lambda: _torch().backends.cuda.matmul.fp32_precision),
    }


def _torch() -> Any:
    import torch

    return torch


def _torch_version() -> str:
    return str(_torch().__version__)


def _cpu_capability() -> str:
    return str(_torch().backends.cpu.get_cpu_capability())


def _properties(device: str) -> Any:
    return _torch().cuda.get_device_properties(device)


def _driver_version() -> str:
    """Version of the NVIDIA driver: from /proc, else from NVML, which takes some 20 ms; neither needs a context."""
    with contextlib.suppress(OSError, StopIteration):
        return _driver_version_of_kernel()
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if code := nvml.nvmlInit_v2():
        raise RuntimeError(f"nvmlInit_v2 returned {code}")
    try:
        text = ctypes.create_string_buffer(80)
        if code := nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
            raise RuntimeError(f"nvmlSystemGetDriverVersion returned {code}")
        return text.value.decode("ascii")
    finally:
        nvml.nvmlShutdown()


def _driver_version_of_kernel() -> str:
    words = KERNEL_MODULE.read_text().split("\n")[0].split()
    return next(word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit())


def _variables() -> dict[str, str]:
    return {name: os.environ[name] for name in sorted(KERNEL_VARIABLES) if name in os.environ}


def _is_editable(found: importlib.metadata.Distribution) -> bool:
    try:
        origin = json.loads(found.read_text("direct_url.json") or "{}")
        return bool(origin.get("dir_info", {}).get("editable"))
    except (ValueError, AttributeError):
        return False


def _module_digest(module: str) -> str:
    found = importlib.util.find_spec(module)
    places = [*(found.submodule_search_locations or ()), found.origin] if found else []
    if not places or places[0] is None:
        raise ModuleNotFoundError(f"no source of module {module}")
    return _digest(Path(places[0]))


def _digest(path: Path) -> str:
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    total = hashlib.sha256()
    for file in sorted(path.rglob("*.py")):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.relative_to(path)} {content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()
