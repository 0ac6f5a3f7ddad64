"""One process of the conformance suite: starts an engine in one way, writes down what it sees, and dies by SIGKILL.

Run by :mod:`fer.engines.conformance`; its one argument is a job as JSON.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fer
from fer.engines.base import Engine, EngineIdentity
from fer.engines.conformance_snapshot import Snapshot, digest
from fer.errors import FerBug, FerError, UnsupportedQuantization


def main(argument: str) -> None:
    """Do one job: ``{"step", "make", "arguments", "probe", "options", "out"}``."""
    job = json.loads(argument)
    torch.set_num_threads(1)  # sums must not depend on how many threads share them
    engine: Engine = find(job["make"])(**job["arguments"])
    result = _refusal(engine, job) if job["step"] == "refuse" else _start(engine, job)
    rank = os.environ.get("RANK", "0")
    out = Path(job["out"])
    partial = out / f"{job['step']}.{rank}.partial"
    partial.write_text(json.dumps(result))
    partial.rename(out / f"{job['step']}.{rank}.json")
    sys.stdout.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.barrier()  # a rank that dies early would take the others' connections with it
    os.kill(os.getpid(), signal.SIGKILL)  # the engine ends as in a crash: nothing is cleaned up


def find(name: str) -> Callable[..., Any]:
    """The callable that ``module:qualified.name`` means."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def plain(identity: EngineIdentity) -> dict[str, Any]:
    """An identity as plain data, without the name of its launch, which differs by design."""
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(identity), default=str))
    data["ranks"].pop("launch")
    return data


def _start(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    adopted: list[nn.Module] = []
    _watch(engine, adopted)
    report = fer.recover(engine, **job["options"])
    module = adopted[-1]
    stage = report.stages["weights"]
    outputs = {name: digest(tensor) for name, tensor in find(job["probe"])(engine).items()} if job["probe"] else {}
    snapshot = Snapshot(module)
    first, again = engine.identity(), engine.identity()
    fresh: EngineIdentity = find(job["make"])(**job["arguments"]).identity()
    result = {
        "path": stage.path,
        "why": stage.why,
        "details": {key: str(value) for key, value in stage.details.items()},
        "identity": plain(first),
        "identity_stable": first == again and plain(fresh) == plain(first),
        "places": snapshot.to_json(),
        "on_meta": snapshot.on_meta(),
        "outputs": outputs,
        "writable": _writable(engine, module, snapshot),
    }
    if job["write"]:
        result["written"] = _write(engine, module)
    return result


def _watch(engine: Engine, adopted: list[nn.Module]) -> None:
    original = engine.adopt

    def adopt(module: nn.Module) -> None:
        adopted.append(module)
        original(module)

    engine.adopt = adopt  # type: ignore[method-assign]


def _refusal(engine: Engine, job: dict[str, Any]) -> dict[str, Any]:
    """How an engine with a quantisation that is not on the allowlist ends."""
    loads: list[str] = []
    original = engine.load

    def load() -> nn.Module:
        loads.append("load")
        return original()

    engine.load = load  # type: ignore[method-assign]
    try:
        fer.recover(engine, **job["options"])
    except UnsupportedQuantization as error:
        return {"refused": str(error), "method": error.fields.get("method", ""), "loads": len(loads)}
    except FerError as error:
        return {"refused": "", "other": f"{type(error).__name__}: {error}", "loads": len(loads)}
    return {"refused": "", "other": "it started", "loads": len(loads)}


def _mutable(engine: Engine, module: nn.Module) -> dict[str, torch.Tensor]:
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: t for name, t in named.items() if any(fnmatchcase(name, p) for p in engine.mutable)}


def _write(engine: Engine, module: nn.Module) -> list[str]:
    """Overwrite what the engine says it writes; the other processes must not see it."""
    written = _mutable(engine, module)
    with torch.no_grad():
        for tensor in written.values():
            tensor.fill_(1)
    return sorted(written)


def _writable(engine: Engine, module: nn.Module, snapshot: Snapshot) -> dict[str, bool]:
    """Whether the engine's memory could be written, by path, as the kernel or the driver says; nothing is written."""
    of_device = {p: t for p, t in snapshot.tensors.items() if t.device.type == torch.device(engine.device).type}
    addresses = {path: tensor.untyped_storage().data_ptr() for path, tensor in of_device.items() if tensor.numel()}
    if not engine.device.startswith("cuda"):
        return _host_writable(addresses)
    index = torch.device(engine.device).index or 0
    return {path: _cuda_writable(address, index) for path, address in addresses.items()}


def _host_writable(addresses: dict[str, int]) -> dict[str, bool]:
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_ = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        ranges.append((begin, end, "w" in permissions))
    found = {}
    for path, address in addresses.items():
        found[path] = next(writable for begin, end, writable in ranges if begin <= address < end)
    return found


class _Location(ctypes.Structure):
    """``CUmemLocation``: which memory an access right is asked for."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def _cuda_writable(address: int, index: int) -> bool:
    """By ``cuMemGetAccess``, straight from the driver. Memory of ordinary allocations is always writable."""
    driver = ctypes.CDLL("libcuda.so.1")
    flags, location = ctypes.c_ulonglong(), _Location(1, index)  # 1 is CU_MEM_LOCATION_TYPE_DEVICE
    code = driver.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(location), ctypes.c_ulonglong(address))
    if code == 1:  # CUDA_ERROR_INVALID_VALUE: no mapped VMM allocation
        return True
    if code != 0:
        raise FerBug(f"cuMemGetAccess failed with code {code}")
    return flags.value != 1  # 1 is CU_MEM_ACCESS_FLAGS_PROT_READ


if __name__ == "__main__":
    main(sys.argv[1])
