"""Tensor subclasses that can be published, each taken apart and put together by a written codec.

A codec follows torch's flatten protocol (``__tensor_flatten__``, ``__tensor_unflatten__``): inner tensors become
ordinary records, the context becomes plain data. What is not data comes from the live process: a DTensor's mesh is
that of the skeleton's own DTensor in the slot. A subclass without a codec is refused by name; nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import importlib
from abc import ABC, abstractmethod
from typing import Any, Final

import torch

from fer.errors import UnsupportedState
from fer.weights import records, values
from fer.weights.records import Value


class Codec(ABC):
    """How instances of some tensor subclasses become records and come back.

    Attributes:
        name: stands in the manifest; a codec whose data changes gets a new one.
    """

    name: str

    @abstractmethod
    def flatten(self, tensor: torch.Tensor, path: str, home: int) -> tuple[dict[str, torch.Tensor], dict[str, Value]]:
        """Inner tensors by attribute name, and the rest as plain data.

        Args:
            tensor: an instance.
            path: of the tensor, for messages.
            home: index of the engine's own GPU.

        Raises:
            UnsupportedState: its context cannot be written as data.
        """

    @abstractmethod
    def unflatten(
        self,
        cls: type,
        inner: dict[str, torch.Tensor],
        meta: dict[str, Value],
        like: Any,
        home: int,
        *,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        """The tensor again.

        Args:
            cls: the class.
            inner: its inner tensors, bound to their memory.
            meta: what :meth:`flatten` wrote.
            like: the skeleton's tensor in that slot, or None.
            home: index of the engine's own GPU.
            shape, stride: of the whole tensor, in elements.

        Raises:
            ValueError: the data does not fit this process.
        """

    @abstractmethod
    def own_attributes(self, tensor: torch.Tensor) -> frozenset[str]:
        """Names in the instance's ``__dict__`` that the codec takes care of."""


class DTensorCodec(Codec):
    """torch.distributed.tensor.DTensor: placements are data, the mesh is the skeleton's."""

    name = "dtensor/1"

    def flatten(self, tensor: torch.Tensor, path: str, home: int) -> tuple[dict[str, torch.Tensor], dict[str, Value]]:
        return {"_local_tensor": tensor._local_tensor}, _layout(tensor)  # type: ignore[attr-defined]

    def unflatten(
        self,
        cls: type,
        inner: dict[str, torch.Tensor],
        meta: dict[str, Value],
        like: Any,
        home: int,
        *,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        if type(like) is not cls:
            raise ValueError("the empty module has no DTensor there to take the device mesh from")
        live: Any = like  # mypy takes the class for any object's
        here = _layout(live)
        for name, value in meta.items():
            if here.get(name) != value:
                raise ValueError(f"its {name} is {_text(here.get(name))}, published was {_text(value)}")
        if set(inner) != {"_local_tensor"} or inner["_local_tensor"].dtype != live.dtype:
            raise ValueError(f"its dtype is {live.dtype}, published was another")
        names, context = live.__tensor_flatten__()
        parts = {name: inner.get(name, getattr(live, name)) for name in names}
        found: torch.Tensor = cls.__tensor_unflatten__(parts, context, torch.Size(shape), stride)  # type: ignore[attr-defined]
        return found

    def own_attributes(self, tensor: torch.Tensor) -> frozenset[str]:
        return frozenset(("_local_tensor", "_spec"))


def _layout(tensor: Any) -> dict[str, Value]:
    """A DTensor's mesh and placements; ``repr`` of placements names kind, dimension and reduction in full."""
    mesh = tensor.device_mesh
    return {
        "placements": records.Tuple("", [repr(placement) for placement in tensor.placements]),
        "mesh": records.Tuple("", list(mesh.mesh.shape)),
        "mesh_names": records.Tuple("", list(mesh.mesh_dim_names or ())),
        "mesh_device": mesh.device_type,
    }


class TorchaoCodec(Codec):
    """torchao's quantised tensors, which name their own tensors and attributes."""

    name = "torchao/1"

    def flatten(self, tensor: torch.Tensor, path: str, home: int) -> tuple[dict[str, torch.Tensor], dict[str, Value]]:
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        meta: dict[str, Value] = {}
        for name, value in context.items():
            try:
                meta[name] = _encode(value, home)
            except TypeError as error:
                raise UnsupportedState(
                    f"{path}.{name} cannot be kept", why=str(error), fix="Run with mode=off", path=f"{path}.{name}"
                ) from error
        return {name: getattr(tensor, name) for name in names}, meta

    def unflatten(
        self,
        cls: type,
        inner: dict[str, torch.Tensor],
        meta: dict[str, Value],
        like: Any,
        home: int,
        *,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        context = {name: _decode(value, home) for name, value in meta.items()}
        known = {*_listed(cls, "tensor_attribute_names"), *_listed(cls, "optional_tensor_attribute_names")}
        if known != set(context):
            raise ValueError(f"its attributes are {sorted(known)}, published were {sorted(context)}")
        needed = set(_listed(cls, "tensor_data_names"))
        if not needed <= set(inner) <= needed | set(_listed(cls, "optional_tensor_data_names")):
            raise ValueError(f"its tensors are {sorted(needed)}, published were {sorted(inner)}")
        found: torch.Tensor = cls.__tensor_unflatten__(inner, context, torch.Size(shape), stride)  # type: ignore[attr-defined]
        if tuple(found.shape) != shape:
            raise ValueError(f"its shape became {tuple(found.shape)}, published was {shape}")
        return found

    def own_attributes(self, tensor: torch.Tensor) -> frozenset[str]:
        tables = ("tensor_data_names", "tensor_attribute_names")
        names = [name for table in tables for kind in (table, f"optional_{table}") for name in _listed(tensor, kind)]
        return frozenset(names)


def _listed(owner: Any, table: str) -> list[str]:
    return list(getattr(owner, table, ()))


_TORCHAO: Final = (
    "Float8Tensor",
    "Int4PlainInt32Tensor",
    "Int4PreshuffledTensor",
    "Int4Tensor",
    "Int4TilePackedTo4dTensor",
    "Int8Tensor",
    "IntxUnpackedToInt8Tensor",
)
_CODECS: Final[dict[str, Codec]] = {
    "torch.distributed.tensor:DTensor": DTensorCodec(),
    **dict.fromkeys((f"torchao.quantization:{name}" for name in _TORCHAO), TorchaoCodec()),
}
"""By class. A codec of a class that packs device-dependent layouts is right because the fingerprint names the GPU."""


def codec_for(cls: type) -> Codec | None:
    """The codec of a tensor class, or None."""
    return _CODECS.get(values.class_name(cls))


def find(cls: str, codec: str) -> tuple[type, Codec]:
    """The class of that name and its codec. Imports the class's module, for names in the table only.

    Raises:
        ValueError: no such class has a codec of that name here.
    """
    known = _CODECS.get(cls)
    if known is None or known.name != codec:
        raise ValueError(f"there is no codec {codec} for {cls}")
    try:
        importlib.import_module(cls.partition(":")[0])
    except ImportError as error:
        raise ValueError(f"{cls} cannot be imported: {error}") from error
    found = values.find_class(cls)
    if found is None:
        raise ValueError(f"there is no {cls} in the installed version")
    return found, known


# --- contexts as plain data: lists and tuples, namedtuples and dataclasses of torchao, plain values

_LIST: Final = "[]"
_OWNER: Final = "torchao."


def _encode(value: Any, home: int) -> Value:
    if value is None or (plain := values.encode(value, home)) is not None:
        return None if value is None else plain
    if type(value) in (list, tuple):
        return records.Tuple(_LIST if type(value) is list else "", [_encode(item, home) for item in value])
    name = values.class_name(type(value))
    if name.startswith(_OWNER) and values.find_class(name) is type(value):
        if isinstance(value, tuple):
            return records.Tuple(name, [_encode(item, home) for item in value])
        if dataclasses.is_dataclass(value):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
            return records.Tuple(name, [_encode(item, home) for item in fields])
    raise TypeError(f"a {name} cannot be written as data")


def _decode(value: Value, home: int) -> Any:
    if not isinstance(value, records.Tuple):
        return values.decode(value, home)
    items = [_decode(item, home) for item in value.items]
    if value.cls in ("", _LIST):
        return items if value.cls else tuple(items)
    cls: Any = values.find_class(value.cls) if value.cls.startswith(_OWNER) else None
    if cls is not None and issubclass(cls, tuple) and len(getattr(cls, "_fields", ())) == len(items):
        return tuple.__new__(cls, items)
    fields = dataclasses.fields(cls) if cls is not None and dataclasses.is_dataclass(cls) else None
    if fields is not None and len(fields) == len(items):
        made = object.__new__(cls)
        for field, item in zip(fields, items, strict=True):
            object.__setattr__(made, field.name, item)
        return made
    raise ValueError(f"there is no {value.cls} of {len(items)} fields")


def _text(value: Value) -> str:
    return ", ".join(map(str, value.items)) if isinstance(value, records.Tuple) else str(value)
