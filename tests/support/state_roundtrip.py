"""A publish and attach in miniature: capture, write down, read back, restore over copies of the storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fer.weights import manifest, module_state


@dataclass(kw_only=True)
class Roundtrip:
    """A loaded module, its counterpart made from a manifest and a skeleton, and that manifest."""

    loaded: nn.Module
    attached: nn.Module
    record: manifest.Manifest


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def write_down(capture: module_state.Capture, structure: str = "") -> manifest.Manifest:
    """The manifest that publish would make, all storages in one slab."""
    storages, offset = [], 0
    for live in capture.storages:
        storages.append(manifest.StorageRecord(0, offset, live.nbytes, live.device.type))
        offset += -(-live.nbytes // 512) * 512
    slab = manifest.SlabRecord("host", max(offset, 512), 0, "", "")
    return manifest.Manifest(manifest.VERSION, capture.state, storages, [slab], structure)


def copies_of(capture: module_state.Capture, record: manifest.Manifest) -> Callable[[int], torch.Tensor]:
    """What attach gives to restore: plain tensors over copies of the storages."""
    copies = []
    for live in capture.storages:
        assert live.storage is not None
        copies.append(live.storage.clone())

    def tensor(index: int) -> torch.Tensor:
        leaf = record.state.tensors[index]
        empty = torch.empty(0, dtype=getattr(torch, leaf.dtype))
        return empty.set_(copies[leaf.storage], leaf.offset, tuple(leaf.shape), tuple(leaf.stride))

    return tensor


def roundtrip(
    build: Callable[[], nn.Module], load: Callable[[Any], object] = lambda module: None, *, blind: bool = False
) -> Roundtrip:
    """Load a module, publish it on paper, attach it to a new skeleton.

    Asserts what publish and attach assert: the rehearsal agrees, nothing is left on meta, digests are equal.
    """
    loaded = build()
    load(loaded)
    skeleton = on_meta(build)
    capture = module_state.capture(loaded, None if blind else skeleton)
    structure = module_state.structure_digest(loaded)
    rehearsed = module_state.rehearse(skeleton, capture.state)
    assert rehearsed == structure, module_state.first_difference(loaded, skeleton)
    record = manifest.decode(manifest.encode(write_down(capture, structure)))
    attached = on_meta(build)
    module_state.restore(attached, record.state, copies_of(capture, record))
    assert module_state.meta_leftovers(attached) == []
    assert module_state.structure_digest(attached) == structure, module_state.first_difference(loaded, attached)
    return Roundtrip(loaded=loaded, attached=attached, record=record)
