"""Whether what is kept can be used here: two tiers of facts, hard ones that refuse and soft ones that are told.

Hard for kernels: Triton's version and build, the GPU's architecture, ptxas, the variables that are part of every key.
All of these are in Triton's key already, so that a kernel of another kind would never be found; the comparison tells it
beforehand, by name, instead of leaving useless files behind. Hard for code of the host: its ABI, machine, C library,
CUDA runtime and the paths that Triton builds into it; a difference there would crash, so the unknown differs too.
Soft: the GPU's model, its size, the driver.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import re
import subprocess
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fer.kernels import gpus, parts, tritonkey
from fer.kernels.manifest import Entry, Manifest

UNKNOWN: Final = "(unknown)"
log = logging.getLogger("fer")
_RELEASE: Final = re.compile(r"release (\d+)\.(\d+)")


@dataclass(frozen=True)
class Live:
    """Facts of this machine and installation.

    Attributes:
        target: known parts of a key (``version``, ``triton``, ``env``); what is missing is not compared.
        compilers: ptxas' text by architecture, as far as it is known.
        archs: architectures of the GPUs here; None without a GPU, where every one is welcome.
        host: what code of the host depends on.
        soft: told only.
        cuda: newest CUDA version the driver runs; None where unknown.
    """

    target: Mapping[str, Any] = field(default_factory=dict)
    compilers: Mapping[int, str] = field(default_factory=dict)
    archs: tuple[int, ...] | None = None
    host: Mapping[str, Any] = field(default_factory=dict)
    soft: Mapping[str, Any] = field(default_factory=dict)
    cuda: tuple[int, int] | None = None


def live(*, ask_triton: bool, host: bool = True, home: Path | None = None) -> Live:
    """Look around.

    Args:
        ask_triton: import Triton, which knows its build, its compilers and the variables that count, and takes a
            quarter of a second; otherwise what can be known without it.
        host: look for what code of the host depends on, which runs a program.
        home: FER's folder, with the memo of Triton's build.
    """
    seen = gpus.look()
    target: dict[str, Any] = {}
    compilers: dict[int, str] = {}
    version = _version("triton")
    if version:
        target["version"] = version
        try:
            target |= _asked() if ask_triton else _remembered(home)
            compilers = _compilers(seen.archs if seen else ()) if ask_triton else {}
        except ImportError as error:  # installed, and made for another system: the rest of it is unknown
            log.warning("Triton %s cannot be imported, so that only its version is compared: %s", version, error)
    return Live(
        target=target,
        compilers=compilers,
        archs=seen.archs if seen and seen.archs else None,
        host=host_facts() if host else {},
        soft=soft_facts(seen),
        cuda=seen.cuda if seen else None,
    )


def soft_facts(seen: gpus.Seen | None) -> dict[str, Any]:
    """What may differ; empty without a GPU."""
    if seen is None:
        return {}
    return {"gpu": list(seen.names), "multiprocessors": list(seen.multiprocessors), "driver": seen.driver}


def host_facts() -> dict[str, Any]:
    """What shared objects depend on. No home, working directory or temporary folder is part of it."""
    return {
        "extension": str(sysconfig.get_config_var("EXT_SUFFIX")),
        "machine": platform.machine(),
        "glibc": platform.libc_ver()[1],
        "cuda_runtime": _cuda_runtime(),
        "packages": os.path.realpath(sysconfig.get_paths()["purelib"]),
        "libcuda": _libcuda(),
    }


def toolkit(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The CUDA toolkit caches were built with: its real path, however it is spelled, and what its compiler says."""
    environ = os.environ if environ is None else environ
    named = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    root = os.path.realpath(named)
    try:
        command = [os.path.join(root, "bin", "nvcc"), "--version"]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return {"home": root if os.path.isdir(root) else "", "nvcc": ""}
    return {"home": root, "nvcc": said}


# -- rules


def why_not(manifest: Manifest, entry: Entry, here: Live) -> str:
    """Why an entry would not be used here, naming the fields that differ; ``""`` where it would."""
    target = manifest.targets[entry.target] if entry.target is not None else {}
    found = [change for change in parts.changes(target, _now(target, here)) if change.part != parts.LABELS["arch"]]
    reasons = [str(change) for change in found]
    arch = target.get("arch")
    if here.archs is not None and target.get("backend") == "cuda" and arch not in here.archs:
        reasons.append(f"{parts.LABELS['arch']}: {arch} -> {', '.join(map(str, here.archs))}")
    if entry.code:
        reasons += host_changes(manifest.host, here.host)
    return "; ".join(reasons)


def host_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Where code of the host was made for something else. A newer C library here is fine; the unknown is not."""
    found = []
    for name in sorted({*before, *now}):
        left, right = before.get(name, UNKNOWN), now.get(name, UNKNOWN)
        if name == "glibc" and _numbers(left) and _numbers(left) <= _numbers(right):
            continue
        if left != right or left == UNKNOWN:
            found.append(f"{name}: {left} -> {right}")
    return found


def soft_changes(manifest: Manifest, here: Live) -> list[str]:
    """What is told and refuses nothing."""
    before, now = manifest.soft, here.soft
    both = sorted(before.keys() & now.keys())
    return [f"{name}: {_show(before[name])} -> {_show(now[name])}" for name in both if before[name] != now[name]]


def beyond_driver(manifest: Manifest, here: Live) -> list[int]:
    """Numbers of targets whose compiler is newer than the driver: their kernels are tried before they are kept."""
    if here.cuda is None:
        return []
    found = []
    for number, target in enumerate(manifest.targets):
        match = _RELEASE.search(str(target.get("compiler", "")))
        if match and (int(match[1]), int(match[2])) > here.cuda:
            found.append(number)
    return found


Trial = Callable[[bytes], str]
"""Loads a binary on the GPU; why the driver does not take it, ``""`` where it does."""


def load_once(binary: bytes) -> str:
    """A :data:`Trial` on this machine's driver, without a context and without torch."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        library, kernel, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint()
        for name, arguments in (
            ("cuInit", (0,)),
            ("cuLibraryLoadData", (ctypes.byref(library), binary, None, None, 0, None, None, 0)),
            ("cuLibraryGetKernelCount", (ctypes.byref(count), library)),
            ("cuLibraryEnumerateKernels", (ctypes.byref(kernel), 1, library)),
        ):
            if code := getattr(cuda, name)(*arguments):
                return f"{name} returned {code}"
        cuda.cuLibraryUnload(library)
    except (OSError, AttributeError) as error:
        return f"the driver cannot be asked: {error}"
    return "" if count.value else "the driver finds no kernel in it"


# -- probes


def _now(target: Mapping[str, Any], here: Live) -> dict[str, Any]:
    """What the same kernel's target would be here, as far as it is known."""
    now = dict(here.target)
    arch = target.get("arch")
    if isinstance(arch, int) and arch in here.compilers:
        now["compiler"] = here.compilers[arch]
    return now


def _asked() -> dict[str, Any]:
    from triton.runtime import cache

    return {"triton": hashlib.sha256(cache.triton_key().encode()).hexdigest(), "env": parts.invalidating_env()}


def _remembered(home: Path | None) -> dict[str, Any]:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return {}
    key = tritonkey.known(Path(spec.origin).parent, home=home)
    return {"triton": hashlib.sha256(key.encode()).hexdigest()} if key else {}


def _compilers(archs: tuple[int, ...]) -> dict[int, str]:
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    found = {}
    for arch in archs or (90, 100):
        try:
            text = str(make_backend(GPUTarget("cuda", arch, 32)).hash())
        except (RuntimeError, ValueError, OSError):
            continue  # a Triton without this backend
        found[arch] = text.removesuffix(f"-{arch}")
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cuda_runtime() -> str:
    """Version of the CUDA runtime that torch or a wheel brings; ``"none"`` where there is none."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        if version := _version(name):
            return version
    return "none"


def _libcuda() -> list[str]:
    """Folders of the driver's library, as Triton looks for them: they are part of its helper's key."""
    if chosen := os.environ.get("TRITON_LIBCUDA_PATH"):
        return [chosen]
    try:
        listed = subprocess.run(
            ["/sbin/ldconfig", "-p"], check=True, capture_output=True, text=True, timeout=20
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    paths = [line.rsplit(" ", 1)[-1] for line in listed if "libcuda.so.1" in line]
    return sorted({os.path.dirname(path) for path in paths})


def _numbers(version: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(version).split(".") if part.isdigit())


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
