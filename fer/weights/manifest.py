"""The manifest: where every tensor of an edition lies, and the rest of the module's state, as checked plain data.

A manifest is msgpack of the structs here and in ``records.py``. :func:`decode` believes nothing: a manifest that
passes has every index in range, every storage inside its slab and apart from the others, every tensor inside its
storage. Imports no torch, so that tools may read manifests.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import msgspec
from msgspec import Struct

from fer.errors import IntegrityError
from fer.memory.base import ALIGNMENT, Kind
from fer.weights import records
from fer.weights.pauses import without_gc
from fer.weights.records import Leaf, LeafRef, ModuleState, NodeRef, Place, WrapperRef

VERSION = 1
"""Raised with every change of a struct; another version is never read."""

ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8", "float4_e2m1fn_x2", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes an element, by torch's name. Tensors of other types (the legacy quantised ones) cannot be published."""


class StorageRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One torch storage: ``nbytes`` at ``offset`` of a slab. ``device`` is ``"cpu"`` or ``"cuda"``.

    A storage of zero bytes lies nowhere; its slab and offset are not looked at.
    """

    slab: int
    offset: int
    nbytes: int
    device: str


class SlabRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One slab: bytes, address it was mapped at (0: any), checksum of all of it, digest of samples (host only)."""

    kind: Kind
    size: int
    address: int
    checksum: str
    samples: str


class Manifest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One edition. ``structure`` is the published module's structure digest."""

    version: int
    state: ModuleState
    storages: list[StorageRecord]
    slabs: list[SlabRecord]
    structure: str


def encode(manifest: Manifest) -> bytes:
    """The manifest as bytes."""
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes | memoryview) -> Manifest:
    """The manifest those bytes stand for.

    Raises:
        IntegrityError: they are no manifest, one of another version, or one that contradicts itself; says where.
    """
    if _version(data) != VERSION:
        _bad(f"its version is {_version(data)!r}, this FER reads {VERSION}")
    try:
        with without_gc():
            manifest = _DECODER.decode(data)
            check(manifest)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise IntegrityError("a manifest cannot be read", why=str(error), fix=_FIX) from error
    return manifest


def check(manifest: Manifest) -> None:
    """Every index in range, every storage inside its slab and apart from the others, every tensor inside its storage.

    Raises:
        IntegrityError: the first contradiction.
    """
    _check_storages(manifest)
    for tensor in manifest.state.tensors:
        _check_tensor(tensor, manifest.storages)
    _check_state(manifest.state)


_FIX = "The edition is dropped and the weights are loaded again"
_DECODER = msgspec.msgpack.Decoder(Manifest)


def _bad(why: str) -> NoReturn:
    raise IntegrityError("a manifest cannot be read", why=why, fix=_FIX)


def _version(data: bytes | memoryview) -> Any:
    """The version alone, read before the rest: a manifest of another version has other structs."""
    try:
        head = bytes(data[:2])
        # A fixed array of five elements (0x95), then a small integer, which stands for itself.
        return head[1] if head[:1] == b"\x95" and head[1] < 0x80 else None
    except IndexError:
        return None


def _check_storages(manifest: Manifest) -> None:
    placed = []
    for number, record in enumerate(manifest.storages):
        if record.device not in ("cpu", "cuda"):
            _bad(f"storage {number} is on {record.device!r}")
        if record.nbytes == 0:
            continue
        if not 0 <= record.slab < len(manifest.slabs):
            _bad(f"storage {number} is in slab {record.slab}, of {len(manifest.slabs)}")
        if record.nbytes < 0 or record.offset < 0 or record.offset % ALIGNMENT:
            _bad(f"storage {number} has offset {record.offset} and {record.nbytes} bytes")
        if record.offset + record.nbytes > manifest.slabs[record.slab].size:
            _bad(f"storage {number} reaches over the end of slab {record.slab}")
        placed.append((record.slab, record.offset, record.nbytes, number))
    placed.sort()
    for (slab, offset, nbytes, number), (other_slab, other_offset, _, other) in itertools.pairwise(placed):
        if slab == other_slab and other_offset < offset + nbytes:
            _bad(f"storages {number} and {other} overlap in slab {slab}")


def _check_tensor(tensor: Leaf, storages: list[StorageRecord]) -> None:
    if not tensor.names:
        _bad("a tensor has no name")
    where = tensor.names[0]
    itemsize = ITEMSIZE.get(tensor.dtype)
    if itemsize is None:
        _bad(f"{where} has the unknown dtype {tensor.dtype!r}")
    if not 0 <= tensor.storage < len(storages):
        _bad(f"{where} is in storage {tensor.storage}, of {len(storages)}")
    storage = storages[tensor.storage]
    if storage.device != tensor.device:
        _bad(f"{where} is on {tensor.device!r}, its storage on {storage.device!r}")
    if len(tensor.shape) != len(tensor.stride) or tensor.offset < 0:
        _bad(f"{where} has shape {tensor.shape}, strides {tensor.stride} and offset {tensor.offset}")
    last, empty = tensor.offset, False
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        if size < 0 or stride < 0:
            _bad(f"{where} has shape {tensor.shape} and strides {tensor.stride}")
        empty |= size == 0
        last += (size - 1) * stride
    if not empty and (last + 1) * itemsize > storage.nbytes:
        _bad(f"{where} reaches over the end of its storage of {storage.nbytes} bytes")


def _check_state(state: ModuleState) -> None:
    if not state.nodes or not isinstance(state.nodes[0], records.ModuleNode) or state.nodes[0].place is not None:
        _bad("it does not begin with a module")
    limits = (len(state.tensors), len(state.wrappers), len(state.nodes))
    for number, node in enumerate(state.nodes):
        if isinstance(node, records.ModuleNode) and number and node.place is None:
            _bad(f"module {node.path!r} has no place")
        # Things are looked up in order, so each must hang on an earlier one.
        _check_place(node.place, number, node.path, limits)
        for values in _values_of(node):
            if values:
                _check_values(values, limits, node.path)
    for tensor in state.tensors:
        if tensor.attrs or tensor.place is not None:
            _check_place(tensor.place, limits[2], tensor.names[0], limits)
            _check_values(tensor.attrs.values(), limits, tensor.names[0])
    for number, wrapper in enumerate(state.wrappers):
        if not wrapper.names:
            _bad("a tensor has no name")
        where = wrapper.names[0]
        _check_place(wrapper.place, limits[2], where, limits)
        _check_values([*wrapper.attrs.values(), *wrapper.meta.values()], limits, where)
        # An inner wrapper is made first: no cycles.
        _check_values(wrapper.inner.values(), (limits[0], number, limits[2]), where)


def _check_place(place: Place | None, limit: int, where: str, limits: tuple[int, int, int]) -> None:
    if place is None:
        return
    if not 0 <= place.node < limit:
        _bad(f"{where!r} hangs on node {place.node}, of {limit}")
    for step in place.steps:
        if step.key.__class__ is not str and step.key.__class__ is not int:
            _check_values((step.key,), limits, where)


def _values_of(node: records.Node) -> Iterable[Collection[records.Value]]:
    if isinstance(node, records.ModuleNode):
        return (node.parameters.values(), node.buffers.values(), node.children.values(), node.attrs.values())
    if isinstance(node, records.SequenceNode):
        return (node.items or (), node.attrs.values())
    if isinstance(node, records.MappingNode):
        return (node.changed.values(), node.attrs.values(), *(node.pairs or ()))
    return (node.attrs.values(),)


def _check_values(values: Iterable[records.Value], limits: tuple[int, int, int], where: str) -> None:
    for value in values:
        if isinstance(value, LeafRef):
            index, limit = value.index, limits[0]
        elif isinstance(value, WrapperRef):
            index, limit = value.index, limits[1]
        elif isinstance(value, NodeRef):
            index, limit = value.index, limits[2]
        elif isinstance(value, records.Tuple | records.FrozenSet):
            _check_values(value.items, limits, where)
            continue
        elif isinstance(value, records.Partial):
            _check_values([*value.items, *value.keywords.values()], limits, where)
            continue
        elif isinstance(value, records.Weak):
            _check_values((value.target,), limits, where)
            continue
        else:
            continue
        if not 0 <= index < limit:
            _bad(f"{where!r} refers to number {index}, of {limit}")
