"""Values that code depends on, as plain data: two processes write the same exactly where code can see no difference.

A type that JSON does not know is written as a mapping with one key, its name, so that a list, a set and a tuple of the
same items differ, as do a path and its text, and two classes with the same fields. Mappings keep their order, which
loops see. Of an unknown type, or one that is derived from a plain one, nobody can say what else it holds: refused.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import math
import os
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from fer.engines import reads

_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, types.MappingProxyType)
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_TORCH = {"dtype", "device", "layout", "memory_format"}
_ENUMS_OWN = {"_value_", "_name_", "_sort_order_", "__objclass__"}


def type_name(kind: Any) -> str:
    """``module:qualified.name`` of a class or function."""
    return f"{kind.__module__}:{kind.__qualname__}"


def named(function: Any) -> dict[str, str]:
    """A callable as plain data: only its name, what it depends on is followed apart."""
    owner = function
    while isinstance(owner, functools.partial):
        owner = owner.func
    return {"callable": type_name(owner if hasattr(owner, "__qualname__") else type(owner))}


def plain(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """``value`` as data that is equal between processes where the value is.

    Args:
        above: identities of the containers around it.

    Raises:
        TypeError: it is of a type whose content is not known, or holds itself.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if id(value) in above:
        raise TypeError("it holds itself")
    above |= {id(value)}
    if kind is list:
        return [plain(item, above) for item in value]
    if kind is os.environ.__class__:
        return {"os.environ": sorted([key, item] for key, item in value.items())}
    for find in (_container, _record, _leaf):
        found = find(value, above)
        if found is not None:
            return found
    raise TypeError(f"a value of type {kind.__module__}.{kind.__qualname__} is no plain data")


def children(value: Any) -> Iterator[Any]:
    """The values that a container or record holds, and the class of a record of local code."""
    if isinstance(value, Mapping):
        yield from (*value.keys(), *value.values(), getattr(value, "default_factory", None))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    if _is_record(value):
        yield from _content(value).values()
        if reads.local(type(value)):
            yield type(value)


def _is_record(value: Any) -> bool:
    if isinstance(value, type):
        return False
    kinds = (enum.Enum, *_NAMESPACES)
    return dataclasses.is_dataclass(value) or isinstance(value, kinds) or _is_named_tuple(value)


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields") and not hasattr(value, "__dict__")


def _content(value: Any) -> dict[str, Any]:
    """What a record holds: its declared fields as far as they are set, and further attributes."""
    if isinstance(value, enum.Enum):
        return {"value": value.value} | {key: item for key, item in vars(value).items() if key not in _ENUMS_OWN}
    if _is_named_tuple(value):
        return dict(zip(type(value)._fields, value, strict=True))
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    declared = {item.name: getattr(value, item.name) for item in fields if hasattr(value, item.name)}
    return declared | getattr(value, "__dict__", {})


def _container(value: Any, above: frozenset[int]) -> Any:
    kind: Any = type(value)
    if kind in _MAPPINGS:
        return {kind.__name__: _pairs(value, above)}
    if kind is collections.defaultdict:
        return {"defaultdict": [plain(value.default_factory, above), _pairs(value, above)]}
    if kind is tuple or (kind.__module__ == "torch" and kind.__name__ == "Size"):
        return {kind.__name__: [plain(item, above) for item in value]}
    if kind in (set, frozenset):
        return {kind.__name__: sorted((plain(item, above) for item in value), key=repr)}
    return None


def _record(value: Any, above: frozenset[int]) -> Any:
    kind: Any = type(value)
    if not _is_record(value):
        return None
    if isinstance(value, enum.Enum):
        return {f"{type_name(kind)}.{value.name}": _pairs(_content(value), above)}
    base = isinstance(value, _NAMESPACES) and kind not in _NAMESPACES
    if base or (isinstance(value, list | dict | set | str | int | float | tuple) and not _is_named_tuple(value)):
        return None  # derived from a plain type: it holds more than its fields
    return {type_name(kind): _pairs(_content(value), above)}


def _leaf(value: Any, above: frozenset[int]) -> Any:
    kind: Any = type(value)
    if isinstance(value, PurePath) and kind.__module__.partition(".")[0] == "pathlib":
        return {f"pathlib.{kind.__name__}": str(value)}
    if isinstance(value, re.Pattern):
        return {"re.Pattern": [value.pattern, value.flags]}
    if kind.__module__ == "torch" and kind.__name__ in _TORCH:
        return {f"torch.{kind.__name__}": str(value)}
    if kind.__module__ == "torch.torch_version":  # what torch.__version__ is
        return {"torch.__version__": str(value)}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and value.dtype.kind in "biuf":
        return {f"numpy.{kind.__name__}": plain(value.item(), above)}
    return named(value) if callable(value) else None


def _pairs(value: Mapping[Any, Any], above: frozenset[int]) -> list[Any]:
    return [[plain(key, above), plain(item, above)] for key, item in value.items()]
