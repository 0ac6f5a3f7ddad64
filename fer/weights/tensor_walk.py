"""The tensor side of a capture: one record a tensor object, one entry a storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fer.weights import codecs, values
from fer.weights.manifest import ITEMSIZE
from fer.weights.records import Keep, LeafRef, Place, Step, Value, WrapperRef
from fer.weights.walk_parts import MAX_DEPTH, NOTHING, UNKNOWN, LiveStorage, Slot, dotted, part, refuse

Ref = LeafRef | WrapperRef
Walk = Callable[[Any, Any, Slot], Value]


class Tensors:
    """Tensors and storages found so far.

    Args:
        walk: records any other value, as attributes of tensors need it.

    Attributes:
        live: the plain tensors, in the order of their records.
        storages: their storages.
        records, wrappers: keyword arguments of the records to be.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        # The tensor is kept beside its record: an id is only good while its owner lives.
        self._seen: dict[int, tuple[torch.Tensor, Ref, list[str]]] = {}
        self._by_storage: dict[torch.UntypedStorage, LiveStorage] = {}
        self._home: torch.device | None = None
        self.live: list[torch.Tensor] = []
        self.storages: list[LiveStorage] = []
        self.records: list[dict[str, Any]] = []
        self.wrappers: list[dict[str, Any]] = []

    @property
    def home(self) -> int:
        """Index of the GPU the tensors are on."""
        return values.home_index(self._home)

    def known(self, tensor: torch.Tensor) -> Ref | None:
        """The reference to a tensor that was met before."""
        found = self._seen.get(id(tensor))
        return found[1] if found else None

    def visit(self, live: torch.Tensor, base: Any, slot: Slot) -> Ref:
        """The reference to a tensor. The first slot it is met in is where the skeleton's own attributes come from."""
        known = self._seen.get(id(live))
        if known is not None:
            known[2].append(slot.path)
            return known[1]
        if slot.depth > MAX_DEPTH:
            refuse(slot.path, f"it lies deeper than {MAX_DEPTH} levels")
        codec = codecs.codec_for(type(live))
        if codec is not None:
            return self._wrapper(live, base, slot, codec)
        _check(live, slot.path)
        return self._leaf(live, base, slot)

    def close(self) -> None:
        """Give every storage the names of its tensors, all of which are known by now, and let go of the storages.

        The walk is part of a reference cycle and would keep them alive until some later collection, which publish
        would take for a second user.
        """
        for record in self.records:
            self.storages[record["storage"]].names.extend(record["names"])
        self._by_storage.clear()
        self._seen.clear()

    def _leaf(self, live: torch.Tensor, base: Any, slot: Slot) -> LeafRef:
        ref, names = LeafRef(len(self.records)), [slot.path]
        storage = self._storage(live, slot.path)
        storage.tensors.append(ref.index)
        record: dict[str, Any] = {
            "storage": storage.index,
            "dtype": str(live.dtype).removeprefix("torch."),
            "shape": list(live.shape),
            "stride": list(live.stride()),
            "offset": live.storage_offset(),
            "device": live.device.type,
            "requires_grad": live.requires_grad,
            "cls": _tensor_class(type(live)),
            "names": names,
        }
        self.records.append(record)
        self.live.append(live)
        self._seen[id(live)] = (live, ref, names)
        if live.__dict__:
            self._attributes(record, live.__dict__, base, slot)
        return ref

    def _wrapper(self, live: torch.Tensor, base: Any, slot: Slot, codec: codecs.Codec) -> WrapperRef:
        inner, meta = codec.flatten(live, slot.path, self.home)
        alike = base if base is UNKNOWN or type(base) is type(live) else NOTHING
        parts: dict[str, Ref] = {}
        for name, tensor in inner.items():
            below = slot.step(Step("inner", name), dotted(slot.path, name))
            parts[name] = self.visit(tensor, part(alike, attr=name), below)
        ref, names = WrapperRef(len(self.wrappers)), [slot.path]
        record: dict[str, Any] = {
            "codec": codec.name,
            "cls": values.class_name(type(live)),
            "meta": meta,
            "inner": parts,
            "shape": list(live.shape),
            "stride": list(live.stride()),
            "requires_grad": live.requires_grad,
            "names": names,
            "place": None if base is NOTHING else Place(slot.node.index, list(slot.steps)),
        }
        self.wrappers.append(record)
        self._seen[id(live)] = (live, ref, names)
        own = codec.own_attributes(live)
        self._attributes(record, {name: item for name, item in live.__dict__.items() if name not in own}, base, slot)
        return ref

    def _attributes(self, record: dict[str, Any], mine: dict[str, Any], base: Any, slot: Slot) -> None:
        """Attributes set on a tensor object: data is recorded, code (``weight_loader``) comes from the skeleton's."""
        theirs: Any = NOTHING
        if base is UNKNOWN:
            theirs = UNKNOWN
        elif isinstance(base, torch.Tensor):
            theirs = base.__dict__
        attrs: dict[str, Value] = {}
        kept: list[str] = []
        for name, item in mine.items():
            below = slot.step(Step("attr", name), dotted(slot.path, name))
            found = self._walk(item, part(theirs, key=name), below)
            if isinstance(found, Keep):
                kept.append(name)
            else:
                attrs[name] = found
        record["attrs"], record["kept"] = attrs, kept
        if kept:
            record["place"] = Place(slot.node.index, list(slot.steps))

    def _storage(self, live: torch.Tensor, path: str) -> LiveStorage:
        storage = live.untyped_storage()
        known = self._by_storage.get(storage)
        if known is not None:
            return known
        device = storage.device
        if device.type == "cuda":
            self._home = self._home or device
            if device != self._home:
                refuse(path, f"it is on {device}, other tensors are on {self._home}")
        known = LiveStorage(
            index=len(self.storages),
            storage=storage,
            nbytes=storage.nbytes(),
            device=device,
            address=storage.data_ptr(),
        )
        self.storages.append(known)
        self._by_storage[storage] = known
        return known


def _check(tensor: torch.Tensor, path: str) -> None:
    """Refuse what strides over a storage do not describe."""
    cls = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        refuse(path, "it is not initialised")
    plain = cls is torch.Tensor or issubclass(cls, nn.Parameter)
    if not plain or cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        refuse(path, f"there is no codec for the tensor subclass {values.class_name(cls)}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        refuse(path, f"its layout is {'nested' if tensor.is_nested else tensor.layout}")
    if tensor.is_quantized:
        refuse(path, f"it is a legacy quantised tensor ({tensor.dtype})")
    if str(tensor.dtype).removeprefix("torch.") not in ITEMSIZE:
        refuse(path, f"its dtype is {tensor.dtype}")
    if tensor.is_conj() or tensor.is_neg():
        refuse(path, "it is a lazy conjugate or negation", "Call resolve_conj() and resolve_neg() on it after loading")
    if tensor.is_meta:
        refuse(path, "it is on meta: loading gave it no memory")
    if tensor.device.type not in ("cpu", "cuda"):
        refuse(path, f"it is on {tensor.device}")
    if tensor.is_leaf and tensor.grad is not None:
        refuse(path, "it has a gradient", "Set module.zero_grad(set_to_none=True) after loading")


def _tensor_class(cls: type) -> str:
    if cls is torch.Tensor:
        return "tensor"
    if cls is nn.Parameter:
        return "parameter"
    return values.class_name(cls)
