"""The structure digest: everything a caller can see of a module, except the values and addresses of its tensors.

The digest proves that an attached module is the published one, so it is made from the live objects alone and shares
no code with capture and restore beyond the notion of what a plain value is. Two modules with one digest have the same
classes, slots, names and orders, the same tensors (types, shapes, strides, offsets, who shares memory with whom, who
is the same object), the same plain values wherever they can be reached, and code of the same names.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import weakref
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from fer.weights import codecs, values
from fer.weights.pauses import without_gc

_DEEPEST: Final = 200


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one walk over a module finds.

    Attributes:
        digest: sha256 over everything a caller can see of the module except values and addresses of tensors.
        leftovers: paths of tensors that are still on ``meta``, anywhere reachable.
    """

    digest: str
    leftovers: list[str]


def survey(
    module: nn.Module, *, devices: Mapping[torch.UntypedStorage, str] | None = None, home: int | None = None
) -> Survey:
    """Digest and leftovers in one walk.

    Args:
        module: any module.
        devices: device types to report for these storages, in place of their own.
        home: index of the engine's own GPU, where the tensors do not tell.
    """
    with without_gc():
        walk = _Walk(devices or {}, home).run(module)
        text = "\n".join(walk.lines).encode(errors="surrogatepass")
    return Survey(digest=hashlib.sha256(text).hexdigest(), leftovers=walk.leftovers)


def structure_digest(module: nn.Module) -> str:
    """sha256 over everything a caller can see of the module except values and addresses of tensors."""
    return survey(module).digest


def meta_leftovers(module: nn.Module) -> list[str]:
    """Paths of tensors that are still on ``meta``, anywhere reachable."""
    return survey(module).leftovers


def outline(module: nn.Module) -> bytes:
    """Four bytes for each fact in the digest: enough to find the first that differs, see :func:`where_it_parts`."""
    with without_gc():
        return _checks(_Walk({}, None).run(module).lines)


def where_it_parts(module: nn.Module, published: bytes) -> str:
    """The module's first fact that is not in the published outline at its place; ``""`` where there is none."""
    lines = _Walk({}, None).run(module).lines
    mine = _checks(lines)
    for number, line in enumerate(lines):
        if mine[4 * number : 4 * number + 4] != published[4 * number : 4 * number + 4]:
            return line
    return "" if len(mine) == len(published) else "it ends before the published one does"


def _checks(lines: list[str]) -> bytes:
    return b"".join(zlib.crc32(line.encode(errors="surrogatepass")).to_bytes(4, "little") for line in lines)


def first_difference(left: nn.Module, right: nn.Module) -> str:
    """The first thing in which two structures differ, as ``path: this / that``; ``""`` where they do not.

    Devices are left out, so that a module may be compared with its rehearsal.
    """
    mine, theirs = (_Walk({}, None, devices_matter=False).run(module).lines for module in (left, right))
    for one, other in zip(mine, theirs, strict=False):
        if one != other:
            return f"{one} / {other}"
    if len(mine) == len(theirs):
        return ""
    longer = max(mine, theirs, key=len)
    return f"{longer[min(len(mine), len(theirs))]} / nothing"


class _Walk:
    """One walk over a module.

    Attributes:
        lines: one ``path: fact`` for everything met.
        leftovers: paths of tensors on ``meta``.
    """

    def __init__(
        self, devices: Mapping[torch.UntypedStorage, str], home: int | None, *, devices_matter: bool = True
    ) -> None:
        self.lines: list[str] = []
        self.leftovers: list[str] = []
        self._devices = devices
        self._home = home
        self._devices_matter = devices_matter
        self._met: dict[int, tuple[Any, int]] = {}
        self._storages: dict[torch.UntypedStorage, int] = {}
        self._own: list[tuple[nn.Module, str, int]] = []

    def run(self, module: nn.Module) -> _Walk:
        self._module(module, "", 0)
        if self._home is None:
            cuda = next((s.device for s in self._storages if s.device.type == "cuda"), None)
            self._home = values.home_index(cuda)
        # Attributes come last, so that tensors are first met under their registered names.
        for owner, path, depth in self._own:
            self._own_attributes(owner, path, depth)
        return self

    def _seen(self, thing: Any, path: str) -> bool:
        known = self._met.get(id(thing))
        if known is not None:
            self.lines.append(f"{path}: is #{known[1]}")
            return True
        self._met[id(thing)] = (thing, len(self._met))
        return False

    def _module(self, module: nn.Module, path: str, depth: int) -> None:
        if self._seen(module, path):
            return
        kind = type(module)
        transient = module._non_persistent_buffers_set
        self.lines.append(f"{path}: module {kind.__module__}:{kind.__qualname__} training={module.training}")
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is None:
                self.lines.append(f"{prefix}{name}: no parameter")
            else:
                self._tensor(parameter, prefix + name, "parameter", depth)
        for name, buffer in module._buffers.items():
            role = "transient buffer" if name in transient else "buffer"
            if buffer is None:
                self.lines.append(f"{prefix}{name}: no {role}")
            else:
                self._tensor(buffer, prefix + name, role, depth)
        for name, child in module._modules.items():
            if child is None:
                self.lines.append(f"{prefix}{name}: no module")
            else:
                self._module(child, prefix + name, depth + 1)
        self._own.append((module, path, depth))

    def _own_attributes(self, module: nn.Module, path: str, depth: int) -> None:
        mine = values.attributes(module) if values.slots(type(module)) else module.__dict__
        prefix = f"{path}." if path else ""
        for name in sorted(mine.keys() - values.MODULE_SLOTS):
            value = mine[name]
            if value is None or type(value) in _SIMPLE:
                self.lines.append(f"{prefix}{name}: {value!r}")
            else:
                self._value(value, prefix + name, depth + 1)
        for table in values.HOOK_TABLES:
            if mine.get(table):
                for number, hook in enumerate(mine[table].values()):
                    self._value(hook, f"{prefix}{table}[{number}]", depth + 1)

    def _tensor(self, tensor: torch.Tensor, path: str, role: str, depth: int) -> None:
        if self._seen(tensor, path):
            return
        kind = type(tensor)
        codec = None if kind is nn.Parameter or kind is torch.Tensor else codecs.codec_for(kind)
        if codec is not None:
            self._wrapper(tensor, path, role, codec, depth)
            return
        if tensor.layout is not torch.strided:  # cannot be published, may still be compared
            self.lines.append(f"{path}: {role} {values.class_name(kind)} {tensor.layout} {tensor.dtype} {tensor.shape}")
            return
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # a subclass without memory of its own
            self.lines.append(f"{path}: {role} {values.class_name(kind)} {tensor.dtype} {tensor.shape}")
            return
        number = self._storages.setdefault(storage, len(self._storages))
        device = self._devices.get(storage) or storage.device.type
        if device == "meta":
            self.leftovers.append(path)
        if not self._devices_matter:
            device = "somewhere"
        self.lines.append(
            f"{path}: {role} {kind.__module__}:{kind.__qualname__} {tensor.dtype} {tuple(tensor.shape)} "
            f"{tensor.stride()} storage {number}+{tensor.storage_offset()} {device} "
            f"{tensor.requires_grad}{tensor.is_conj()}{tensor.is_neg()}"
        )
        extra = tensor.__dict__
        if extra:
            for name in sorted(extra):
                self._value(extra[name], f"{path}.{name}", depth + 1)

    def _wrapper(self, tensor: torch.Tensor, path: str, role: str, codec: codecs.Codec, depth: int) -> None:
        inner, meta = codec.flatten(tensor, path, self._home or 0)
        self.lines.append(
            f"{path}: {role} {values.class_name(type(tensor))} {codec.name} {tuple(tensor.shape)} {tensor.stride()} "
            f"{tensor.dtype} {tensor.requires_grad} {isinstance(tensor, nn.Parameter)} {meta!r}"
        )
        for name, part in inner.items():
            self._tensor(part, f"{path}.{name}", "part", depth + 1)
        for name in sorted(tensor.__dict__.keys() - codec.own_attributes(tensor)):
            self._value(tensor.__dict__[name], f"{path}.{name}", depth + 1)

    def _value(self, value: Any, path: str, depth: int) -> None:
        if depth > _DEEPEST:
            self.lines.append(f"{path}: too deep")
            return
        if value is None or type(value) in _SIMPLE:
            self.lines.append(f"{path}: {value!r}")
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path, "tensor", depth)
        elif isinstance(value, nn.Module):
            self._module_value(value, path, depth)
        elif (plain := values.encode(value, self._home or 0)) is not None:
            self.lines.append(f"{path}: {type(value).__name__} {plain!r}")
        elif isinstance(value, tuple | frozenset):
            self._items(value, path, depth)
        elif isinstance(value, list | dict | set | collections.deque):
            if not self._seen(value, path):
                self._items(value, path, depth)
                if type(value) not in values.BARE:
                    self._object(value, path, depth)
        elif isinstance(value, functools.partial):
            self.lines.append(f"{path}: partial")
            self._value(value.func, f"{path}.func", depth + 1)
            self._items(value.args, path, depth)
            self._items(value.keywords, path, depth)
        elif type(value) is weakref.ref:
            known = self._met.get(id(value()))
            self.lines.append(f"{path}: weak reference to {'something' if known is None else f'#{known[1]}'}")
        elif values.is_opaque(value):
            self.lines.append(f"{path}: {values.opaque_name(value)}{values.fingerprint_of_array(value)}")
        elif not self._seen(value, path):
            self._object(value, path, depth)

    def _module_value(self, module: nn.Module, path: str, depth: int) -> None:
        first = len(self._own)
        self._module(module, path, depth)
        added, self._own[first:] = self._own[first:], []
        for owner, where, deep in added:
            self._own_attributes(owner, where, deep)

    def _object(self, thing: Any, path: str, depth: int) -> None:
        self.lines.append(f"{path}: object {values.class_name(type(thing))}")
        mine = values.attributes(thing)
        for name in sorted(mine):
            self._value(mine[name], f"{path}.{name}", depth + 1)

    def _items(self, items: Any, path: str, depth: int) -> None:
        maxlen = items.maxlen if isinstance(items, collections.deque) else ""
        self.lines.append(f"{path}: {values.class_name(type(items))} of {len(items)} {maxlen}")
        if isinstance(items, dict):
            for number, (key, item) in enumerate(dict.items(items)):
                self.lines.append(f"{path}[{number}]: key {values.token(key)}")
                self._value(item, f"{path}[{number}]", depth + 1)
            return
        ordered: Iterable[Any] = items
        if isinstance(items, set | frozenset):
            ordered = sorted(items, key=self._rank)
        for number, item in enumerate(ordered):
            self._value(item, f"{path}[{number}]", depth + 1)

    def _rank(self, element: Any) -> str:
        if isinstance(element, torch.Tensor):
            known = self._met.get(id(element))
            return f"{known[1]:09}" if known else f"~{element.dtype}{tuple(element.shape)}"
        return values.token(element)


_SIMPLE: Final = frozenset((bool, int, float, str))
