"""Attach: bind an empty module to an edition's slabs, and prove that it is the published module."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from fer.errors import IntegrityError, SlabLost, StructureDiffers
from fer.memory import torch_private
from fer.memory.base import Backend
from fer.memory.base import Mapping as SlabMapping
from fer.memory.fd import Fd
from fer.weights import integrity, manifest, module_state
from fer.weights.storages import bytes_of, private_copy
from fer.weights.wire import SlabInfo

Verify = Literal["off", "fast", "full"]


@dataclass(kw_only=True)
class Attached:
    """A module bound to an edition.

    Attributes:
        moved: slabs that could not be mapped at their recorded address.
        copied: paths of mutable tensors, copied out of the slabs.
        verified: what was compared: ``"off"``, ``"checksums"``, ``"seals and samples"`` or ``"every byte"``.
    """

    module: nn.Module
    manifest: manifest.Manifest
    bytes: int
    moved: int
    verified: str
    transport: str
    copied: list[str] = field(default_factory=list)


def map_slabs(
    record: manifest.Manifest, slabs: Sequence[tuple[SlabInfo, Fd]], backends: Mapping[str, Backend]
) -> list[SlabMapping]:
    """Map every slab of an edition; all or none.

    Args:
        record: the edition's manifest.
        slabs: descriptors as the keeper gave them; closed here, whatever happens.
        backends: by slab kind.

    Raises:
        SlabLost: a descriptor does not import, or the keeper's list is not the manifest's.
    """
    try:
        if [(i.kind, i.size) for i, _ in slabs] != [(r.kind, r.size) for r in record.slabs]:
            raise SlabLost("the keeper's slabs are not the manifest's", fix="Evict this edition: fer evict")
        missing = {r.kind for r in record.slabs} - set(backends)
        if missing:
            raise SlabLost(f"slabs of kind {', '.join(sorted(missing))} cannot be mapped here")
        mapped: dict[int, SlabMapping] = {}
        try:
            for kind in {r.kind for r in record.slabs}:
                wanted = [n for n, r in enumerate(record.slabs) if r.kind == kind]
                requests = [(slabs[n][1], record.slabs[n].size, record.slabs[n].address) for n in wanted]
                mapped |= dict(zip(wanted, backends[kind].attach_many(requests), strict=True))
        except BaseException:
            for mapping in mapped.values():
                mapping.close()
            raise
        return [mapped[n] for n in range(len(record.slabs))]
    finally:
        for _, fd in slabs:
            fd.close()


class Check:
    """A comparison of mapped slabs with their manifest, begun at once and waited for in :meth:`finish`.

    ``fast`` reads every byte of a GPU's slabs where they are; host slabs are write-sealed by the kernel (checked when
    they were mapped), so samples stand for the rest. ``full`` reads every byte of both. A GPU works while the host
    binds the module; nothing may be adopted before :meth:`finish` has returned.
    """

    def __init__(
        self,
        record: manifest.Manifest,
        mappings: Sequence[SlabMapping],
        backends: Mapping[str, Backend],
        verify: Verify,
    ) -> None:
        self._record, self._verify = record, verify
        self._views: list[torch.Tensor] = []
        self._whole: list[int] = []
        self._sums: integrity.Checksums | None = None
        if verify == "off":
            return
        self._views = [
            bytes_of(backends[r.kind].storage(m, 0, m.size)) for r, m in zip(record.slabs, mappings, strict=True)
        ]
        self._whole = [n for n, r in enumerate(record.slabs) if r.kind != "host" or verify == "full"]
        self._sums = integrity.Checksums([self._views[n] for n in self._whole])

    def finish(self) -> str:
        """What was compared.

        Raises:
            IntegrityError: a slab differs.
        """
        if self._sums is None:
            return "off"
        slabs = self._record.slabs
        for n, found in zip(self._whole, self._sums.result(), strict=True):
            _same(n, "checksum", slabs[n].checksum, found)
        for n, slab in enumerate(slabs):
            if n not in self._whole:
                _same(n, "samples", slab.samples, integrity.samples(self._views[n]))
        if self._verify == "full":
            return "every byte"
        kinds = {"seals and samples" if slab.kind == "host" else "checksums" for slab in slabs}
        return " and ".join(sorted(kinds)) or "nothing to compare"


def _same(slab: int, what: str, published: str, found: str) -> None:
    if published != found:
        raise IntegrityError(
            f"slab {slab} is not what was published",
            why=f"its {what} is {found}, published was {published}",
            fix="The edition is dropped and the weights are loaded again",
        )


def bind(
    skeleton: nn.Module,
    record: manifest.Manifest,
    mappings: Sequence[SlabMapping],
    backends: Mapping[str, Backend],
    *,
    mutable: Sequence[str] = (),
) -> list[str]:
    """Bind every tensor of the skeleton to its slab, restore the rest of the state, and prove the structure.

    Returns:
        Paths of the tensors that were copied because they match ``mutable``.

    Raises:
        IntegrityError: the module is not the published one, or a tensor was left on ``meta``.
    """
    copied: list[str] = []
    storages: dict[int, torch.UntypedStorage] = {}
    mutable_storages = {
        leaf.storage for leaf in record.state.tensors if mutable and module_state.matches(leaf.names, mutable)
    }

    def storage(index: int) -> torch.UntypedStorage:
        found = storages.get(index)
        if found is None:
            place = record.storages[index]
            if place.nbytes == 0:
                found = torch.UntypedStorage(0, device=_device(place.device, backends))
            else:
                backend = backends[record.slabs[place.slab].kind]
                found = backend.storage(mappings[place.slab], place.offset, place.nbytes)
                if index in mutable_storages:
                    found = private_copy(found)
            storages[index] = found
        return found

    def tensor(number: int) -> torch.Tensor:
        leaf = record.state.tensors[number]
        if leaf.storage in mutable_storages:
            copied.extend(leaf.names)
        return torch_private.tensor_over(
            storage(leaf.storage), getattr(torch, leaf.dtype), leaf.shape, leaf.stride, leaf.offset
        )

    module_state.restore(skeleton, record.state, tensor)
    found = module_state.survey(skeleton)
    if found.leftovers:
        raise IntegrityError(f"{len(found.leftovers)} tensors were left without memory, first {found.leftovers[0]}")
    if found.digest != record.structure:
        raise StructureDiffers(
            "the attached module has not the published structure",
            why=f"its digest is {found.digest[:16]}, published was {record.structure[:16]}; they part at "
            + (module_state.where_it_parts(skeleton, record.state.outline) or "no single fact"),
            fix="Something that decides the module is not in the engine's identity: please report it",
        )
    return copied


def views(
    record: manifest.Manifest, mappings: Sequence[SlabMapping], backends: Mapping[str, Backend]
) -> dict[str, torch.Tensor]:
    """Every tensor of an edition, over its slab, under the first of its paths."""
    found: dict[str, torch.Tensor] = {}
    for leaf in record.state.tensors:
        place = record.storages[leaf.storage]
        if place.nbytes:
            backend = backends[record.slabs[place.slab].kind]
            storage = backend.storage(mappings[place.slab], place.offset, place.nbytes)
            found[leaf.names[0]] = torch_private.tensor_over(
                storage, getattr(torch, leaf.dtype), leaf.shape, leaf.stride, leaf.offset
            )
    return found


def compare_digests(tensors: Mapping[str, torch.Tensor], kept: bytes) -> int:
    """Compare tensors, by path, with the sha256 of each that the publisher left; how many were compared.

    Raises:
        IntegrityError: one differs or is missing.
    """
    wanted: dict[str, str] = json.loads(kept)
    for name, digest in wanted.items():
        if name not in tensors or integrity.tensor_digest(tensors[name]) != digest:
            raise IntegrityError(
                f"tensor {name} is not what was published",
                why="its sha256 differs" if name in tensors else "there is no such tensor",
                fix="Evict this edition: fer evict",
            )
    return len(wanted)


def _device(kind: str, backends: Mapping[str, Backend]) -> str:
    return next((b.device for b in backends.values() if b.device.split(":")[0] == kind), kind)
