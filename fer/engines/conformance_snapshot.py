"""All that a caller can see of a module, walked without any help of the code under test.

A snapshot is plain data: for each path from the module one line that says what is there. Two snapshots of equal
modules are equal, whatever process, address or device memory they come from; that one object is reachable by two
paths, or that two tensors share one storage, shows in them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import re
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

NODES = 2_000_000
"""Places visited at most: a walk that does not end must not look like a hang."""

_HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith(("_hooks", "_hooks_with_kwargs")))
_SLOTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS)
_NAMED_ONLY = (
    types.ModuleType,
    logging.Logger,
    weakref.ref,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
    types.GeneratorType,
    torch.Generator,
)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)


class Snapshot:
    """The walk of one module.

    Attributes:
        places: path to description.
        tensors: path to every plain tensor that holds bytes, once each.
    """

    def __init__(self, module: nn.Module) -> None:
        self.places: dict[str, str] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[int, str] = {}
        self._alive: list[Any] = []  # ids are those of living objects only
        self._storages: dict[int, str] = {}
        todo: deque[tuple[str, Any]] = deque([("", module)])
        while todo:
            path, value = todo.popleft()
            if len(self.places) > NODES:
                raise RuntimeError(f"more than {NODES} places are reachable, the last is {path}")
            todo.extend(self._visit(path, value))

    def _visit(self, path: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Describe one value; what it leads to."""
        plain = _plain(value)
        if plain is not None:
            self.places[path] = plain
            return
        first = self._seen.get(id(value))
        if first is not None:
            self.places[path] = f"the object at {first or '(module)'}"
            return
        self._seen[id(value)] = path
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            yield from self._tensor(path, value)
        elif isinstance(value, nn.Module):
            yield from self._module(path, value)
        else:
            self.places[path] = _kind(value)
            yield from _inside(path, value)

    def _module(self, path: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
        persistent = sorted(set(module._buffers) - module._non_persistent_buffers_set)
        self.places[path] = (
            f"{_name(type(module))} parameters={list(module._parameters)} buffers={list(module._buffers)} "
            f"persistent={persistent} modules={list(module._modules)}"
        )
        for slots in (module._parameters, module._buffers, module._modules):
            for name, value in slots.items():
                yield _join(path, name), value
        for name, value in module.__dict__.items():
            if name in _HOOKS:
                # Keys of hooks are numbers that a process hands out in turn.
                yield _join(path, name), list(value.values()) if isinstance(value, dict) else value
            elif name not in _SLOTS:
                yield _join(path, name), value

    def _tensor(self, path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
        facts = (
            f"{_name(type(tensor))} {tensor.dtype} {tuple(tensor.shape)} grad={tensor.requires_grad} "
            f"layout={tensor.layout} device={tensor.device.type} leaf={tensor.is_leaf}"
        )
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is not None and type(tensor) is not nn.Parameter:
            names, _ = flatten()
            placements = getattr(tensor, "placements", None)
            self.places[path] = f"{facts} placements={placements!r} inner={list(names)}"
            for name in names:
                yield _join(path, name), getattr(tensor, name)
        else:
            self.places[path] = (
                f"{facts} stride={tensor.stride()} offset={tensor.storage_offset()} "
                f"conj={tensor.is_conj()} neg={tensor.is_neg()} {self._storage(path, tensor)}"
            )
            self.tensors[path] = tensor
        for name, value in getattr(tensor, "__dict__", {}).items():
            if flatten is None or name not in names:
                yield _join(path, name), value
        if tensor.grad is not None:
            yield _join(path, "grad"), tensor.grad

    def _storage(self, path: str, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            return "storage=empty"
        if storage.device.type == "meta":
            return "storage=meta"
        first = self._storages.setdefault(storage.data_ptr(), path)
        return f"storage={'own' if first == path else f'that of {first}'} nbytes={storage.nbytes()}"

    def on_meta(self) -> list[str]:
        """Paths of tensors that hold no bytes."""
        return [path for path, tensor in self.tensors.items() if tensor.device.type == "meta"]

    def to_json(self) -> dict[str, str]:
        """Every place, tensors with a digest of their values."""
        values = {path: f"{self.places[path]} sha256={digest(tensor)}" for path, tensor in self.tensors.items()}
        return {**self.places, **values}


def digest(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's values, element by element in the order of its shape; ``meta`` where it has none."""
    if tensor.device.type == "meta":
        return "meta"
    data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return hashlib.sha256(data.view(torch.uint8).numpy().tobytes()).hexdigest() if data.numel() else "empty"


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(value: Any) -> str | None:
    """A value that says all of itself; None for one that must be walked."""
    if isinstance(value, enum.Enum):
        return f"{_name(type(value))}.{value.name}"
    if isinstance(value, float) and type(value) is float:
        return f"float {value.hex()}"
    if value is None or isinstance(value, bool | int | str | bytes | complex | range | slice):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, _PLAIN_TORCH):
        # Which of several equal cards it is differs between processes, and must not matter.
        return f"{type(value).__name__} {value.type if isinstance(value, torch.device) else value}"
    if isinstance(value, type):
        return f"class {_name(value)}"
    if isinstance(value, re.Pattern):
        return f"pattern {value.pattern!r} {value.flags}"
    if type(value).__module__.startswith("numpy"):
        return f"{_name(type(value))} {getattr(value, 'dtype', '')} {getattr(value, 'shape', '')} {value!r}"
    if isinstance(value, _NAMED_ONLY) or type(value).__name__ in {"DeviceMesh", "ProcessGroup", "Work"}:
        return f"a {_name(type(value))}"
    return None


def _kind(value: Any) -> str:
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return f"function {value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping | Sequence | set | frozenset | deque):
        return f"{_name(type(value))} of {len(value)}"
    return f"a {_name(type(value))}"


def _inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a container or object leads to."""
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return
    if isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
        return
    if isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
        return
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, Sequence | deque):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, set | frozenset):
        # Its order is that of hashes, which differ between processes.
        yield from ((f"{path}{{{key}}}", None) for key in sorted(_plain(item) or _kind(item) for item in value))
    yield from ((_join(path, name), item) for name, item in _fields(value))


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    yield from dict(getattr(value, "__dict__", {})).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, mangled):
                yield mangled, getattr(value, mangled)
