"""Plain values, plain objects, and what is neither: the vocabulary that capture, restore and the digest share."""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch
from torch import nn

from fer.weights import records
from fer.weights.records import Value

MODULE_SLOTS: Final = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "extra_repr"}
"""Attributes that are not the module's own: those every nn.Module has, and ``extra_repr``, which torchao replaces on
the instance while it quantises and which only ``repr()`` calls."""

HOOK_TABLES: Final = tuple(sorted(name for name in vars(nn.Module()) if name.endswith("_hooks")))
"""Names of the dicts in which a module keeps its hooks."""

LARGEST_ARRAY: Final = 1 << 20
"""Bytes. A numpy array beyond this is weights in disguise, which a manifest must not carry."""

HOME_INDEX: Final = "home"
"""Stands for the index of the engine's own GPU in a recorded torch.device: the next engine may run on another one."""

OPAQUE_MODULES: Final = (
    # torch's own machinery: processes, graphs, compiled code
    "torch._",
    "torch.cuda",
    "torch.distributed",
    "torch.fx",
    "torch.jit",
    "torch.multiprocessing",
    "torch.utils.data",
    # threads, files, processes, loops
    "_asyncio",
    "_io",
    "_thread",
    "asyncio",
    "concurrent",
    "ctypes",
    "io",
    "logging",
    "mmap",
    "multiprocessing",
    "pathlib",
    "queue",
    "re",
    "select",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "weakref",
    # tokenizers
    "sentencepiece",
    "tiktoken",
    "tokenizers",
    "transformers.tokenization",
    "transformers.models.auto.tokenization",
    # clients of other services
    "ray",
    "zmq",
)
"""Objects whose class lives in these modules are never looked into: they hold no state of the model."""

_ATOMS: Final = frozenset((bool, int, float, str, type(None)))
_EXACT: Final = frozenset((bool, int, str, type(None)))
_TEXTS: Final[dict[type, tuple[str, Callable[[Any], str]]]] = {
    complex: ("complex", repr),
    torch.dtype: ("dtype", lambda v: str(v).removeprefix("torch.")),
    torch.Size: ("size", lambda v: ",".join(map(str, v))),
    torch.layout: ("layout", lambda v: str(v).removeprefix("torch.")),
    torch.memory_format: ("memory_format", lambda v: str(v).removeprefix("torch.")),
    type(Ellipsis): ("ellipsis", lambda v: ""),
    range: ("range", lambda v: f"{v.start},{v.stop},{v.step}"),
}

BARE: Final = frozenset(
    (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter)
)
"""Containers that hold nothing beside their items; subclasses of these may have attributes as well."""

_NEVER: Final = (
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    types.CoroutineType,
    functools._lru_cache_wrapper,
    classmethod,
    staticmethod,
    property,
    torch.Generator,
    torch.UntypedStorage,
)


_T = TypeVar("_T")


def _once(function: Callable[[type], _T]) -> Callable[[type], _T]:
    """Ask once a class."""
    return functools.cache(function)


@_once
def class_name(cls: type) -> str:
    """``module:qualname``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def find_class(name: str) -> type | None:
    """The class of that name among the modules this process has imported, else None. Imports nothing."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def encode(value: Any, home: int) -> Value | None:
    """A plain value as a record, or None where it is not plain (or is None itself: ask :func:`is_plain`).

    Args:
        value: anything.
        home: index of the engine's own GPU.
    """
    kind = type(value)
    if kind in _ATOMS:
        if kind is int and not -(1 << 63) <= value < 1 << 63:
            return records.Special("int", str(value))
        plain: Value = value
        return plain
    if kind in _TEXTS:
        name, text = _TEXTS[kind]
        return records.Special(name, text(value))  # type: ignore[arg-type]
    if kind is bytes:
        return records.Bytes(value)
    if kind is torch.device:
        return records.Special("device", device_text(value, home))
    if kind is slice:
        parts = (value.start, value.stop, value.step)
        return records.Special("slice", ",".join(map(repr, parts))) if all(_is_index(p) for p in parts) else None
    if isinstance(value, enum.Enum):
        return records.EnumMember(class_name(kind), value.name) if find_class(class_name(kind)) is kind else None
    if kind.__module__ == "numpy":
        return _encode_array(value)
    return None


def is_plain(value: Any) -> bool:
    """Whether :func:`encode` has a record for this value."""
    return value is None or encode(value, 0) is not None


def decode(value: Value, home: int) -> Any:
    """The plain value a record stands for.

    Raises:
        ValueError: the record stands for nothing in this process.
    """
    if isinstance(value, records.Special):
        return _decode_special(value, home)
    if isinstance(value, records.Bytes):
        return value.data
    if isinstance(value, records.EnumMember):
        cls = find_class(value.cls)
        if cls is None or not issubclass(cls, enum.Enum) or value.name not in cls.__members__:
            raise ValueError(f"{value.cls} has no member {value.name}")
        return cls.__members__[value.name]
    if isinstance(value, records.Array):
        return _decode_array(value)
    return value


def device_text(device: torch.device, home: int) -> str:
    """A torch.device as text in which the engine's own GPU has no number."""
    if device.type != "cuda" or device.index is None:
        return str(device)
    return f"cuda:{HOME_INDEX if device.index == home else device.index}"


def home_index(device: torch.device | None) -> int:
    """Index of the engine's own GPU: that of its tensors, else the current one where CUDA is in use, else 0."""
    if device is not None and device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def same(left: Any, right: Any) -> bool:
    """Whether two plain values are the same to every caller: type and value, NaN equal to itself."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if type(left) in (float, complex):
        return repr(left) == repr(right)
    if type(left) in _ATOMS:
        return bool(left == right)
    return encode(left, -1) == encode(right, -1)


def is_same_atom(left: Any, right: Any) -> bool:
    """:func:`same` for the commonest values; False says nothing."""
    return type(left) is type(right) and type(left) in _EXACT and bool(left == right)


def is_opaque(value: Any) -> bool:
    """Whether a thing that is neither tensor, module, container nor plain value must not be looked into."""
    return (
        isinstance(value, _NEVER)
        or _is_opaque_class(type(value))
        or not (hasattr(value, "__dict__") or slots(type(value)))
    )


@_once
def _is_opaque_class(cls: type) -> bool:
    name = cls.__module__ + "."
    # "torch._" stands for every private module; the other names are whole ones.
    return name.startswith(tuple(m if m.endswith("_") else m + "." for m in OPAQUE_MODULES)) or ".tokenization_" in name


def opaque_name(value: Any) -> str:
    """What can be said of an opaque thing: a function's name, or the class of anything else."""
    qualname = getattr(value, "__qualname__", None)
    if isinstance(value, _NEVER) and isinstance(qualname, str):
        return f"{getattr(value, '__module__', '')}:{qualname}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    return f"<{class_name(type(value))}>"


def fingerprint_of_array(value: Any) -> str:
    """Type, shape and content digest of a numpy array too large to be recorded, ``""`` for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.hasobject:
        return ""
    return f" {value.dtype.str} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"


def token(value: Any) -> str:
    """Text that is equal for equal plain data in any process; of anything else, what :func:`opaque_name` says."""
    if value is None:
        return "None"
    if isinstance(value, tuple | frozenset):
        inner = [token(item) for item in value]
        return f"{class_name(type(value))}({','.join(inner if isinstance(value, tuple) else sorted(inner))})"
    plain = encode(value, -1)
    return opaque_name(value) if plain is None else f"{type(value).__name__}:{plain!r}"


def is_hashable_data(value: Any) -> bool:
    """Whether a dict's key is data: plain, or tuples of that."""
    if type(value) is tuple:
        return all(is_hashable_data(item) for item in value)
    return is_plain(value)


def attributes(thing: Any) -> dict[str, Any]:
    """Attributes of a plain object: its ``__dict__`` and whatever slots are filled. Runs no property."""
    found: dict[str, Any] = dict(thing.__dict__) if hasattr(thing, "__dict__") else {}
    for name, slot in slots(type(thing)).items():
        try:
            found[name] = slot.__get__(thing)
        except AttributeError:  # an empty slot
            continue
    return found


def set_attribute(thing: Any, name: str, value: Any) -> None:
    """Set an attribute beneath any ``__setattr__``, as a frozen dataclass or a configuration class needs it."""
    slot = slots(type(thing)).get(name)
    if slot is not None:
        slot.__set__(thing, value)
    else:
        thing.__dict__[name] = value


def drop_attribute(thing: Any, name: str) -> None:
    """Remove an attribute beneath any ``__delattr__``; one that is absent is fine."""
    slot = slots(type(thing)).get(name)
    if slot is None:
        thing.__dict__.pop(name, None)
        return
    try:
        slot.__delete__(thing)
    except AttributeError:
        pass  # the slot is empty already


def is_namedtuple(value: Any) -> bool:
    """Whether a tuple is a namedtuple."""
    return type(value) is not tuple and isinstance(getattr(type(value), "_fields", None), tuple)


@_once
def slots(cls: type) -> dict[str, Any]:
    """Descriptors of the slots a class declares, itself or by inheritance, by the name they go by inside."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = base.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            # A private slot's descriptor has the mangled name.
            mangled = f"_{base.__name__.lstrip('_')}{name}" if name.startswith("__") and name[-2:] != "__" else name
            slot = base.__dict__.get(mangled)
            if isinstance(slot, types.MemberDescriptorType):
                found[mangled] = slot
    return found


def _is_index(value: Any) -> bool:
    return value is None or type(value) is int


def _encode_array(value: Any) -> records.Array | None:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    if type(value) is not numpy.ndarray and not isinstance(value, numpy.generic):
        return None
    if value.dtype.kind not in "biufcSU" or value.nbytes > LARGEST_ARRAY:
        return None
    scalar = isinstance(value, numpy.generic)
    return records.Array(value.dtype.str, list(value.shape), value.tobytes(), scalar)


def _decode_array(value: records.Array) -> Any:
    import numpy

    dtype = numpy.dtype(value.dtype)
    if dtype.kind not in "biufcSU":
        raise ValueError(f"an array of {value.dtype}")
    array = numpy.frombuffer(value.data, dtype=dtype).reshape(value.shape).copy()
    return array[()] if value.scalar else array


def _decode_special(value: records.Special, home: int) -> Any:
    text = value.text
    match value.kind:
        case "int":
            return int(text)
        case "complex":
            return complex(text)
        case "dtype" | "layout" | "memory_format":
            found = getattr(torch, text, None)
            if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
                raise ValueError(f"torch has no {value.kind} {text!r}")
            return found
        case "device":
            return torch.device(text.replace(HOME_INDEX, str(home)))
        case "size":
            return torch.Size(_ints(text))
        case "range":
            return range(*_ints(text))
        case "slice":
            return slice(*(None if part == "None" else int(part) for part in text.split(",")))
        case "ellipsis":
            return ...


def _ints(text: str) -> Iterator[int]:
    return (int(part) for part in text.split(",") if part)
