"""Publish: move a finished module's storages into slabs, and go on with that same memory.

The module keeps every Python object it had; only the memory under its tensors changes (``tensor.data = ...``, since
``set_`` is refused by inference tensors). Storages move one by one in the order of their addresses and each is freed
as soon as it has moved, so the peak is the model, one slab, and what the allocator cannot give back.

Nothing here talks to the keeper: :func:`prepare`, :func:`move` and :func:`seal` are the steps, ``edition.py`` hands
the result over.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fer.errors import OutOfMemory, PublishRefused
from fer.memory import torch_private
from fer.memory.base import Backend
from fer.memory.base import Mapping as SlabMapping
from fer.weights import integrity, layout, manifest, module_state
from fer.weights.storages import bytes_of, private_copy

_ONE_BY_ONE = 16 << 20
"""Bytes from which on a copy of its own is faster than one of a group (measured on an H200)."""


@dataclass(kw_only=True)
class Prepared:
    """A module that can be published: its captured state, its structure digest and where each storage will go.

    Attributes:
        total: bytes of all slabs.
        device_total: bytes of the slabs on the engine's own device, whose addresses the keeper hands out.
    """

    capture: module_state.Capture
    structure: str
    slabs: list[layout.SlabPlan]
    total: int
    device_total: int


@dataclass(kw_only=True)
class Moved:
    """A module that lives in slabs.

    Attributes:
        slabs: mapping and backend of each slab, in the order of the plan.
        copy_s: seconds of copying alone, by the device's clock.
        peak_extra: most bytes of the device that were in use beyond those at the start, as its driver reported them.
    """

    slabs: list[tuple[SlabMapping, Backend]] = field(default_factory=list)
    peak_extra: int = 0
    copy_s: float = 0.0


@dataclass(kw_only=True)
class _Filled:
    """One slab's move: seconds its copies took, and the storages that something else still holds."""

    seconds: float
    left: list[str]


def prepare(
    module: nn.Module, skeleton: nn.Module, backends: Mapping[str, Backend], *, slab_bytes: int = 0
) -> Prepared:
    """Capture the module and prove, before anything is moved, that attaching it will give the same module.

    Args:
        module: the loaded module.
        skeleton: the same module built on ``meta``; it is used up by the rehearsal.
        backends: by device type (``"cpu"``, ``"cuda"``).
        slab_bytes: size of a slab; 0 for a good one.

    Raises:
        UnsupportedState: the module holds something that cannot be kept, named by its path.
        PublishRefused: the skeleton with the captured state does not have the module's structure.
    """
    capture = module_state.capture(module, skeleton)
    structure = module_state.structure_digest(module)
    rehearsed = module_state.rehearse(skeleton, capture.state)
    if rehearsed != structure:
        raise PublishRefused(
            "this module would not come back as it is",
            why="its skeleton, given the captured state, has another structure: "
            + (module_state.first_difference(module, skeleton) or "no single field to name"),
            fix="Make Engine.build() return the module that Engine.load() returns, without its weights",
        )
    pieces = [
        layout.Piece(storage=live.index, device=live.device.type, address=live.address, nbytes=live.nbytes)
        for live in capture.storages
    ]
    _refuse_overlap(capture, pieces)
    unknown = sorted({piece.device for piece in pieces if piece.nbytes} - set(backends))
    if unknown:
        raise PublishRefused(
            f"tensors on {', '.join(unknown)} cannot be kept",
            why=f"slabs exist for {', '.join(sorted(backends))}",
            fix="Move these tensors to the engine's device, or run with mode=off",
        )
    slabs = layout.plan(pieces, {name: b.granularity for name, b in backends.items()}, wanted=slab_bytes)
    return Prepared(
        capture=capture,
        structure=structure,
        slabs=slabs,
        total=sum(slab.size for slab in slabs),
        device_total=sum(slab.size for slab in slabs if slab.device != "cpu"),
    )


def _refuse_overlap(capture: module_state.Capture, pieces: list[layout.Piece]) -> None:
    """Two storages over the same bytes alias each other unseen by torch; apart in slabs they would drift apart."""
    end, owner = 0, 0
    for piece in sorted((p for p in pieces if p.nbytes), key=lambda p: (p.device, p.address)):
        if piece.address < end and pieces[owner].device == piece.device:
            names = [capture.storages[owner].names[0], capture.storages[piece.storage].names[0]]
            raise PublishRefused(
                f"{names[0]} and {names[1]} share memory through two storages",
                why="the sharing cannot be kept",
                fix="Make them views of one tensor, or clone one of them after loading",
            )
        if piece.address + piece.nbytes > end:
            end, owner = piece.address + piece.nbytes, piece.storage


def move(prepared: Prepared, backends: Mapping[str, Backend], *, offset: int = 0) -> Moved:
    """Move every storage into its slab and rebind the module.

    Args:
        prepared: of :func:`prepare`.
        backends: by device type.
        offset: bytes into the device's ``weights`` range where this edition may begin.

    Raises:
        OutOfMemory: no room for the next slab. What has moved stays valid, and the engine goes on with it.
        PublishRefused: a storage was still alive after its move, named. What has moved stays valid.
    """
    moved = Moved()
    free_at_start = {name: backend.room().free for name, backend in backends.items() if name != "cpu"}
    at = {name: (backend.base + offset if backend.base else 0) for name, backend in backends.items()}
    for slab in prepared.slabs:
        backend = backends[slab.device]
        mapping = _create(backend, slab.size, at[slab.device])
        if at[slab.device]:
            at[slab.device] += slab.size
        moved.slabs.append((mapping, backend))
        if slab.device in free_at_start:
            moved.peak_extra = max(moved.peak_extra, free_at_start[slab.device] - backend.room().free)
        filled = _fill(prepared.capture, slab, mapping, backend)
        moved.copy_s += filled.seconds
        if slab.device == "cuda":
            torch.cuda.empty_cache()
        left = filled.left
        if left:
            raise PublishRefused(
                f"{len(left)} storages are still in use after their tensors moved, first {left[0]}",
                why="something outside the module's reach holds them (a closure, a cache, another object), and would "
                "go on with a second copy",
                fix="Drop that reference before recovery, or make it reachable from the module",
                storages=left,
            )
    return moved


def _create(backend: Backend, size: int, address: int) -> SlabMapping:
    try:
        return backend.create(size, address=address)
    except OutOfMemory:
        if backend.kind == "host":
            raise
        torch.cuda.empty_cache()  # blocks the loader freed belong to torch until it is asked for them
        return backend.create(size, address=address)


def _fill(capture: module_state.Capture, slab: layout.SlabPlan, mapping: SlabMapping, backend: Backend) -> _Filled:
    """Move the storages of one slab: copy all of them, then rebind their tensors, then let go of the old memory."""
    lives = [capture.storages[index] for index, _ in slab.placed]
    sources = [live.take() for live in lives]
    targets = [
        backend.storage(mapping, offset, live.nbytes) for live, (_, offset) in zip(lives, slab.placed, strict=True)
    ]
    watched = [(live.names[0], torch_private.WeakStorage(source)) for live, source in zip(lives, sources, strict=True)]
    seconds = _copy([bytes_of(target) for target in targets], [bytes_of(source) for source in sources])
    del sources
    for live, target in zip(lives, targets, strict=True):
        torch_private.rebind([capture.tensors[number] for number in live.tensors], target)
    left = [(name, weak) for name, weak in watched if not weak.expired()]
    if left:
        gc.collect()  # garbage in reference cycles holds storages too, and is no one's second copy
    return _Filled(seconds=seconds, left=[name for name, weak in left if not weak.expired()])


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> float:
    """Copy the bytes of one slab, back to back; seconds by the device's own clock where it has one."""
    pairs = list(zip(targets, sources, strict=True))
    if not pairs or targets[0].device.type != "cuda":
        begin = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return time.perf_counter() - begin
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Small storages go in a few launches together: one by one, launching takes longer than copying. In words, which
    # the grouped kernel moves much faster than bytes.
    small = [pair for pair in pairs if pair[1].numel() < _ONE_BY_ONE and pair[1].numel() % 8 == 0]
    large = [pair for pair in pairs if not (pair[1].numel() < _ONE_BY_ONE and pair[1].numel() % 8 == 0)]
    words = [[side.view(torch.int64) for side in sides] for sides in zip(*small, strict=True)] if small else []
    begun.record()
    if words:
        torch_private.copy_many(words[0], words[1])
    for target, source in large:
        target.copy_(source, non_blocking=True)
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done)) / 1e3


def seal(prepared: Prepared, moved: Moved) -> manifest.Manifest:
    """Make every slab read-only in this process, compute its checksum, and describe the edition.

    The publisher goes on with the sealed memory: what it must write, it was to declare mutable.

    Raises:
        MappingError: a slab is still mapped writable somewhere.
    """
    for mapping, _ in moved.slabs:
        mapping.protect()
    whole = [bytes_of(backend.storage(mapping, 0, mapping.size)) for mapping, backend in moved.slabs]
    sums = integrity.checksums(whole)
    records = [
        manifest.SlabRecord(
            kind=mapping.kind,
            size=mapping.size,
            address=0 if mapping.kind == "host" else mapping.address,
            checksum=checksum,
            samples=integrity.samples(view) if mapping.kind == "host" else "",
        )
        for (mapping, _), checksum, view in zip(moved.slabs, sums, whole, strict=True)
    ]
    places = {index: (n, offset) for n, slab in enumerate(prepared.slabs) for index, offset in slab.placed}
    storages = [
        manifest.StorageRecord(
            slab=places.get(live.index, (0, 0))[0],
            offset=places.get(live.index, (0, 0))[1],
            nbytes=live.nbytes,
            device=live.device.type,
        )
        for live in prepared.capture.storages
    ]
    record = manifest.Manifest(
        version=manifest.VERSION,
        state=prepared.capture.state,
        storages=storages,
        slabs=records,
        structure=prepared.structure,
    )
    manifest.check(record)  # what a reader would refuse must not be published
    return record


@dataclass(kw_only=True)
class PrivateCopies:
    """Copies of the storages that the engine declared mutable, made while nothing is sealed yet.

    The slabs keep the values of the moment of loading, which is what a later engine must start from.
    """

    copies: list[tuple[list[torch.Tensor], torch.UntypedStorage]] = field(default_factory=list)

    def give(self) -> None:
        """Move the engine's tensors over to the copies. To be called whatever became of sealing."""
        for tensors, storage in self.copies:
            torch_private.rebind(tensors, storage)


def private_copies(prepared: Prepared, patterns: Sequence[str]) -> PrivateCopies:
    """Copy what the engine writes, before it becomes read-only.

    Raises:
        OutOfMemory: no room for a copy; nothing was sealed, and the engine may go on writing where it is.
    """
    made = PrivateCopies()
    for live in prepared.capture.storages:
        if not live.nbytes or not module_state.matches(live.names, patterns):
            continue
        tensors = [prepared.capture.tensors[number] for number in live.tensors]
        try:
            made.copies.append((tensors, private_copy(tensors[0].untyped_storage())))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"no room for a private copy of {live.names[0]}", why=str(error), needed=live.nbytes, free=0
            ) from error
    return made
