"""Before the weights: is there an archive that may be used, and if not, why, and can one be saved?"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final

from fer import __version__, fingerprint
from fer.cudagraph import ahead, sections, state, store
from fer.cudagraph import archive as archives
from fer.cudagraph.archive import Archive
from fer.cudagraph.audit import Owner
from fer.cudagraph.cupti import Recorder
from fer.cudagraph.libcuda import Cuda, open_cuda
from fer.cudagraph.load import Binaries
from fer.cudagraph.restore import Outlet, Restorer, place
from fer.environment import driver_environment, package_version, probe
from fer.errors import FerError, GraphRefused, MappingError
from fer.fingerprint import Fingerprint
from fer.memory import ranges as memory
from fer.memory.device import CudaDevice, DeviceFacts, current_ordinal
from fer.memory.patience import patiently
from fer.paths import check_private

if TYPE_CHECKING:
    from fer.engines.graphs import DecodeGraphs
    from fer.memory.ranges import Ranges
    from fer.stages import Start

KERNEL_LIBRARIES: Final = (
    "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-nccl-cu12",
    "nvidia-nccl-cu13", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "triton", "flash-attn", "flashinfer-python",
)  # fmt: skip
"""Distributions whose kernels stand in graphs, or which choose kernels."""

VARIABLES: Final = ("CUBLAS_", "CUBLASLT_", "CUDNN_", "TORCH_", "TRITON_", "NVIDIA_TF32", "CUDA_MODULE_LOADING")
"""Beginnings of variables that choose kernels or how their modules are loaded."""

_SWITCHES: Final = ("TORCH_LOGS", "TORCH_SHOW_", "TORCH_CPP_LOG", "TRITON_CACHE_DIR", "TORCH_HOME", "TORCH_EXTENSIONS")


@dataclass(kw_only=True)
class Choice:
    """Which archive a start uses, if any. Made before the device has a context.

    Attributes:
        archive: what is being restored; None where graphs are captured.
        why: why nothing is restored, ``""`` where it is.
        unsaved: why what is captured cannot be saved, ``""`` where it can.
        unproven: the archive at hand would fit, but its proof has to be made first: again, in this start.
        checkpoint: names the weights' content, see :func:`checkpoint_name`.
    """

    graphs: DecodeGraphs
    path: Path
    fingerprint: Fingerprint
    archive: Archive | None = None
    state: state.State | None = None
    why: str = ""
    unsaved: str = ""
    unproven: bool = False
    checkpoint: str = ""

    @property
    def order(self) -> list[str]:
        """The archive's graphs, but for those that are known to be of no use."""
        assert self.archive is not None and self.state is not None
        lost = {*self.state.quarantined, *self.archive.facts.get("refused", {})}
        return [name for name in self.archive.facts["order"] if name not in lost]


@dataclass(kw_only=True)
class Plan(Choice):
    """What a start does about its graphs.

    Attributes:
        binaries: of the archive, where they are being checked ahead of the restore.
        ready: graphs restored so far.
        slab: done when a slab stands for the cache, where that was begun ahead of the weights.
        woken: makes libraries ready, where that was begun.
    """

    device: CudaDevice
    cuda: Cuda
    ranges: Ranges
    recorder: Recorder | None = None
    binaries: Binaries | None = None
    restorer: Restorer | None = None
    ready: Outlet = field(default_factory=Outlet)
    slab: Future[None] | None = None
    woken: Thread | None = None

    def let_go(self) -> None:
        """Nothing that was restored is in use: give its memory back, unless the restore still works on it."""
        if self.restorer is not None and self.restorer.abandon():
            self.ranges.scratch.close()
            self.ranges.pool.close()

    def trim(self) -> None:
        """Give back what warm-ups and captures were given and did not use."""
        self.ranges.scratch.trim()
        self.ranges.pool.trim()

    def close_recorder(self) -> None:
        """Give CUPTI back."""
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None


_taken: set[tuple[int, int]] = set()


def make(start: Start, graphs: DecodeGraphs) -> Plan:
    """Reserve the ranges and look for an archive; :func:`begin` acts on what was found.

    Raises:
        FerError: graphs can be neither restored nor saved in this process; they are captured natively.
    """
    trouble = memory.torch_trouble(dict(os.environ))
    if trouble:
        raise MappingError("graphs cannot lie at fixed addresses", why=trouble)
    ordinal = _ordinal(start.engine.device)
    if (os.getpid(), ordinal) in _taken:
        raise MappingError("another engine in this process has its graphs at these addresses")
    # All of this while the device's context is being made beside.
    choice = _look(start, graphs, DeviceFacts(ordinal))
    binaries = _check_ahead(choice) if choice.archive is not None else None
    device = CudaDevice(ordinal)
    ranges = memory.reserve(device)
    _taken.add((os.getpid(), ordinal))
    return Plan(device=device, cuda=open_cuda(), ranges=ranges, binaries=binaries, **vars(choice))


def _check_ahead(choice: Choice) -> Binaries:
    """What a restore needs that waits for no context."""
    assert choice.archive is not None
    binaries = Binaries(open_cuda(restoring=True), choice.archive.tables)
    binaries.check_ahead(choice.order)
    return binaries


def _look(start: Start, graphs: DecodeGraphs, device: DeviceFacts) -> Choice:
    identity, span = start.engine.identity(), memory.span_of(device)
    found = describe(start, graphs, span, device)
    path = store.path_for(
        start.options.home,
        model=f"{identity.engine} {identity.model}",
        rank=found.rank_key,
        device=device.name,
        place=span[0],
    )
    choice = Choice(graphs=graphs, path=path, fingerprint=found, checkpoint=checkpoint_name(start))
    _choose(choice)
    return choice


def describe(start: Start, graphs: DecodeGraphs, span: tuple[int, int], device: DeviceFacts) -> Fingerprint:
    """All that must be the same: the weights' fingerprint, and what decides graphs beyond it. Not in it: any value.

    Asks the driver, not torch, for the GPU: torch's CUDA libraries load their modules when torch sets itself up, and
    who wants to record has to be there before.
    """
    capability = ".".join(str(device.attribute(f"COMPUTE_CAPABILITY_{part}")) for part in ("MAJOR", "MINOR"))
    base = fingerprint.of(start.engine.identity(), driver_environment(device.name, capability))
    extra = {
        "format": [sections.VERSION, archives.FORMAT],
        "batch_sizes": list(graphs.batch_sizes),
        "warm_ups": graphs.warm_ups,
        "kv": dict(graphs.layout()),
        "span": list(span),
        "multiprocessors": device.attribute("MULTIPROCESSOR_COUNT"),
        "libraries": {name: package_version(name) for name in KERNEL_LIBRARIES},
        "variables": {
            name: os.environ[name]
            for name in sorted(os.environ)
            if name.startswith(VARIABLES)
            and not name.startswith(_SWITCHES)
            # CUDA's default; older releases of torch set it when they set themselves up, before this or after.
            and (name, os.environ[name]) != ("CUDA_MODULE_LOADING", "LAZY")
        },
        "torch": probe(_switches),
    }
    return Fingerprint(group={**base.group, "graphs": extra}, rank=base.rank)


def checkpoint_name(start: Start) -> str:
    """Names the weights' content as the file system does: output digests belong to it.

    Files that cannot be looked at (any more) give a name that no other start has: their content may be any.
    """
    stamps = []
    for path in start.engine.identity().checkpoint:
        try:
            facts = os.stat(path)
        except OSError:
            return f"unknown-{os.urandom(12).hex()}"
        stamps.append((str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:32]


def weights_of(plan: Plan) -> list[Owner]:
    """Where the weights lie, those at fixed addresses: other memory has no owner in a later process."""
    low, high = plan.ranges.span
    owners = [
        Owner(f"weight/{name}", tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        for name, tensor in plan.graphs.weights().items()
    ]
    return [owner for owner in owners if low <= owner.address < high]


def _ordinal(device: str) -> int:
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise GraphRefused("there are no graphs to keep", why=f"the engine runs on {device}")
    return int(match[1]) if match[1] else current_ordinal()


def _switches() -> Mapping[str, object]:
    import torch

    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "reduced": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "reduced_fp16": torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "sdpa": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ],
    }


def _choose(plan: Choice) -> None:
    """Set ``archive`` and ``state``, or ``why`` not."""
    if plan.fingerprint.unknown:
        plan.why = plan.unsaved = "; ".join(plan.fingerprint.unknown)
        return
    if not plan.path.is_file():
        plan.why = "no archive was saved yet"
        return
    try:
        check_private(plan.path.parent)  # what lies in there runs on the GPU with this user's rights
        facts, digest = archives.facts_of(plan.path)
        kept = Fingerprint.from_json(json.dumps(facts["fingerprint"]).encode())
        differences = fingerprint.explain(plan.fingerprint, kept)
        if differences:
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            plan.why = "the archive is another's: " + "; ".join(str(each) for each in differences[:3]) + more
            return
        known = state.load(plan.path, digest)
        if known.outdated:
            plan.why = f"the archive is saved anew: {known.outdated}"
            return
        if known.proof == "failed" and known.by == __version__:
            plan.why = f"the archive's proof failed: {known.why}"
            plan.unsaved = "what was captured would be the same; `fer graphs prune` forgets it"
            return
        if known.proof != "proven" and plan.checkpoint not in facts["golden"]:
            plan.why = "the archive is unproven, and other weights are in place than its outputs were recorded with"
            return
        if known.proof != "proven":
            plan.why = f"the archive is unproven: {known.why or 'its proof has not ended'}"
            plan.unsaved, plan.unproven = "it is proven again instead", True
            return
        if not plan.graphs.pin(facts["fingerprint"]["group"]["graphs"]["kv"]):
            plan.why = "the engine cannot take the archive's key/value cache"
            return
        plan.archive, plan.state = ahead.take(plan.path, digest), known
    except (FerError, KeyError, TypeError, ValueError) as error:
        plan.why = f"the archive cannot be read: {error}"


def begin(plan: Plan, *, rest_after: int | None = None) -> None:
    """Restore in the background, or record.

    Args:
        rest_after: see :class:`~fer.cudagraph.restore.Restorer`.
    """
    if plan.archive is not None and plan.state is not None:
        plan.cuda = open_cuda(restoring=True)
        try:
            with plan.device.current():
                archive, cuda, ranges = plan.archive, plan.cuda, plan.ranges
                patiently(lambda: place(archive, cuda, ranges))
        except FerError as error:
            plan.archive, plan.why = None, str(error)
            plan.unsaved = "memory for the recorded pool could not be had"
            return
        plan.restorer = Restorer(
            plan.archive,
            plan.cuda,
            plan.ready.put,
            order=plan.order,
            context=plan.device.context,
            keep=[plan.ranges],
            binaries=plan.binaries,
            rest_after=rest_after,
        )
        plan.restorer.start()
    elif not plan.unsaved:
        try:
            plan.recorder = Recorder()
        except FerError as error:
            plan.unsaved = str(error)
