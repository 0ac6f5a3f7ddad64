"""Restore: put a captured state onto a freshly built skeleton, in place."""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NoReturn

import torch
from torch import nn

from fer.errors import IntegrityError
from fer.weights import codecs, records, structure, values
from fer.weights.pauses import without_gc
from fer.weights.records import Keep, Leaf, LeafRef, ModuleState, NodeRef, Place, Step, Value, WrapperRef

_NOTHING: Final = object()
_NO_INDEX: Final = 120
"""An index no GPU has: in a rehearsal, "the engine's own GPU" must not be mistaken for a recorded one."""


def restore(skeleton: nn.Module, state: ModuleState, tensor: Callable[[int], torch.Tensor]) -> None:
    """Put the state back, in place.

    Args:
        skeleton: the module as its builder leaves it, on ``meta``.
        state: of :func:`~fer.weights.state_walk.capture`, checked by :func:`~fer.weights.manifest.decode`.
        tensor: gives the plain tensor of an index, bound to its memory; asked once for each.

    Raises:
        IntegrityError: the skeleton is not the module that was captured, named by the path where they part.
    """
    with without_gc():
        _Restore(state, tensor, None).run(skeleton)


def rehearse(skeleton: nn.Module, state: ModuleState) -> str:
    """Restore the state with tensors on ``meta`` and return the structure digest the attached module would have.

    The skeleton is used up: afterwards it is the attached module, without memory.

    Raises:
        IntegrityError: as :func:`restore`.
    """
    sizes: dict[int, int] = {}
    for leaf in state.tensors:
        last = leaf.offset + sum((size - 1) * stride for size, stride in zip(leaf.shape, leaf.stride, strict=True))
        nbytes = 0 if 0 in leaf.shape else (last + 1) * _dtype(leaf.dtype).itemsize
        sizes[leaf.storage] = max(sizes.get(leaf.storage, 0), nbytes)
    storages = {
        number: torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        for number, nbytes in sizes.items()
    }
    devices = {storages[leaf.storage]: leaf.device for leaf in state.tensors}

    def tensor(index: int) -> torch.Tensor:
        leaf = state.tensors[index]
        empty = torch.empty(0, dtype=_dtype(leaf.dtype), device="meta")
        return empty.set_(storages[leaf.storage], leaf.offset, tuple(leaf.shape), tuple(leaf.stride))

    with torch.no_grad(), without_gc():
        _Restore(state, tensor, _NO_INDEX).run(skeleton)
    return structure.survey(skeleton, devices=devices, home=_NO_INDEX).digest


def _bad(path: str, why: str) -> NoReturn:
    raise IntegrityError(
        f"{path or 'the module'} does not fit the published state",
        why=why,
        fix="The engine's code or configuration builds another module than the one that was published",
    )


@functools.cache
def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        _bad("a tensor", f"this torch has no dtype {name!r}")
    return found


class _Restore:
    def __init__(self, state: ModuleState, tensor: Callable[[int], torch.Tensor], home: int | None) -> None:
        self.state = state
        self.tensor = tensor
        self.home = home
        self.things: list[Any] = []
        self.leaves: list[torch.Tensor | None] = [None] * len(state.tensors)
        self.wrappers: list[torch.Tensor | None] = [None] * len(state.wrappers)
        self.likes: dict[int, Any] = {}
        self.wrapper_likes: dict[int, Any] = {}

    def run(self, skeleton: nn.Module) -> None:
        # Everything is found before anything is changed, since places are described on the untouched skeleton.
        root, *others = self.state.nodes
        if values.class_name(type(skeleton)) != root.cls:
            _bad("", f"published was a {root.cls}, here is {values.class_name(type(skeleton))}")
        self.things.append(skeleton)
        for node in others:
            self.things.append(self._locate(node))
        self.likes = {n: self._follow(r.place) for n, r in enumerate(self.state.tensors) if r.place}
        self.wrapper_likes = {n: self._follow(r.place) for n, r in enumerate(self.state.wrappers) if r.place}
        pairs = list(zip(self.state.nodes, self.things, strict=True))
        for node, thing in pairs:
            if isinstance(node, records.ModuleNode):
                self._slots(node, thing)
        if self.home is None:
            self.home = values.home_index(None)
        for node, thing in pairs:
            if not isinstance(node, records.ModuleNode | records.ObjectNode):
                self._contents(node, thing)
            if node.attrs or node.removed:
                self._attributes(node, thing)

    # --- finding

    def _locate(self, node: records.Node) -> Any:
        """The skeleton's counterpart of a node, or a new thing for a node that loading made."""
        found = _NOTHING if node.place is None else self._step_to(node.place)
        if found is not _NOTHING and values.class_name(type(found)) == node.cls:
            return found
        if isinstance(node, records.ModuleNode) or (node.place is not None and isinstance(node, records.ObjectNode)):
            have = "nothing" if found is _NOTHING else values.class_name(type(found))
            _bad(node.path, f"published was a {node.cls}, here is {have}")
        made = _new(node)
        if made is _NOTHING:
            _bad(node.path, f"a {node.cls} cannot be made from data")
        return made

    def _follow(self, place: Place | None) -> Any:
        found = _NOTHING if place is None else self._step_to(place)
        return None if found is _NOTHING else found

    def _step_to(self, place: Place) -> Any:
        found = self.things[place.node]
        for step in place.steps:
            try:
                found = self._step(found, step)
            except (KeyError, IndexError, AttributeError, TypeError, ValueError):
                return _NOTHING
        return found

    def _step(self, thing: Any, step: Step) -> Any:
        key: Any = step.key
        match step.kind:
            case "child":
                return thing._modules[key]
            case "param":
                return thing._parameters[key]
            case "buffer":
                return thing._buffers[key]
            case "attr":
                if isinstance(thing, functools.partial):
                    return thing.func
                return (thing.__dict__ if isinstance(thing, torch.Tensor) else values.attributes(thing))[key]
            case "inner":
                return getattr(thing, key)
            case "item":
                return (thing.args if isinstance(thing, functools.partial) else thing)[key]
            case "keyword":
                return thing.keywords[key]
            case "at":
                return list(dict.values(thing))[key]
            case "hook":
                return list(vars(thing)[step.table].values())[key]
            case "key":
                return dict.__getitem__(thing, self._plain(key))

    def _plain(self, value: Value) -> Any:
        if isinstance(value, records.Tuple):
            return tuple(self._plain(item) for item in value.items)
        return values.decode(value, self.home or 0)

    # --- changing

    def _slots(self, node: records.ModuleNode, module: nn.Module) -> None:
        """Parameters, buffers and children: complete, in the published order, set beneath ``register_*``."""
        mine = module.__dict__
        tables = (("_parameters", node.parameters), ("_buffers", node.buffers), ("_modules", node.children))
        for table, refs in tables:
            theirs = mine[table]
            if not refs and not theirs:
                continue
            fill = self._child if table == "_modules" else self._tensor
            found = {name: None if ref is None else fill(ref, node.path) for name, ref in refs.items()}
            theirs.clear()
            theirs.update(found)
        transient = mine["_non_persistent_buffers_set"]
        if node.transient or transient:
            transient.clear()
            transient.update(node.transient)
        mine["training"] = node.training

    def _child(self, ref: Value, path: str) -> nn.Module:
        thing = self.things[ref.index] if isinstance(ref, NodeRef) else None
        if not isinstance(thing, nn.Module):
            _bad(path, "a child of this module is no module")
        return thing

    def _attributes(self, node: records.Node, thing: Any) -> None:
        before = values.attributes(thing)
        for name in node.removed:
            values.drop_attribute(thing, name)
        for name, value in node.attrs.items():
            values.set_attribute(thing, name, self._build(value, before.get(name, _NOTHING), f"{node.path}.{name}"))

    def _contents(self, node: records.SequenceNode | records.MappingNode, thing: Any) -> None:
        if isinstance(node, records.MappingNode):
            self._mapping(node, thing)
        elif node.items is not None:
            before = [_NOTHING] * len(node.items) if isinstance(thing, set) else list(thing)
            before += [_NOTHING] * (len(node.items) - len(before))
            items = [self._build(v, b, node.path) for v, b in zip(node.items, before, strict=False)]
            base: Any = next(base for base in (list, set, collections.deque) if isinstance(thing, base))
            base.clear(thing)
            (base.update if base is set else base.extend)(thing, items)

    def _mapping(self, node: records.MappingNode, thing: Any) -> None:
        # Subclasses may compute or check what is set, so the base's own methods are used.
        base = collections.OrderedDict if isinstance(thing, collections.OrderedDict) else dict
        before = dict(dict.items(thing))
        if node.pairs is not None:
            after = {}
            for name, value in node.pairs:
                key = self._build(name, _NOTHING, node.path)
                after[key] = self._build(value, before.get(key, _NOTHING), node.path)
            base.clear(thing)
        else:
            keys = list(before)
            if node.changed and not 0 <= min(node.changed) <= max(node.changed) < len(keys):
                _bad(node.path, f"this dict has {len(keys)} keys, published were more")
            after = {keys[n]: self._build(v, before[keys[n]], node.path) for n, v in node.changed.items()}
        for key, value in after.items():
            base.__setitem__(thing, key, value)

    # --- values

    def _build(self, value: Value, like: Any, path: str) -> Any:
        """What a record stands for; ``like`` is what the skeleton has in that slot."""
        if isinstance(value, LeafRef | WrapperRef):
            return self._tensor(value, path)
        if isinstance(value, NodeRef):
            return self.things[value.index]
        if isinstance(value, Keep):
            if like is _NOTHING:
                _bad(path, "the empty module lacks what should come from it")
            return like
        if isinstance(value, records.Tuple):
            return self._tuple(value, like, path)
        if isinstance(value, records.FrozenSet):
            return frozenset(self._build(item, _NOTHING, path) for item in value.items)
        if isinstance(value, records.Partial):
            return self._partial(value, like, path)
        if isinstance(value, records.Weak):
            return weakref.ref(self._tensor(value.target, path))
        try:
            return values.decode(value, self.home or 0)
        except (ValueError, TypeError, RuntimeError) as error:
            _bad(path, str(error))

    def _tuple(self, value: records.Tuple, like: Any, path: str) -> Any:
        same = isinstance(like, tuple) and len(like) == len(value.items)
        items = [self._build(v, like[n] if same else _NOTHING, path) for n, v in enumerate(value.items)]
        if not value.cls:
            return tuple(items)
        cls = type(like) if values.class_name(type(like)) == value.cls else values.find_class(value.cls)
        if cls is None or not issubclass(cls, tuple) or len(getattr(cls, "_fields", ())) != len(items):
            _bad(path, f"there is no namedtuple {value.cls} of {len(items)} fields")
        return tuple.__new__(cls, items)

    def _partial(self, value: records.Partial, like: Any, path: str) -> Any:
        if not isinstance(like, functools.partial):
            _bad(path, "the empty module has no partial there")
        before = [*like.args, *[_NOTHING] * len(value.items)]
        items = [self._build(v, before[n], path) for n, v in enumerate(value.items)]
        named = {k: self._build(v, like.keywords.get(k, _NOTHING), path) for k, v in value.keywords.items()}
        return type(like)(like.func, *items, **named)

    # --- tensors

    def _tensor(self, ref: Value, path: str) -> torch.Tensor:
        if isinstance(ref, LeafRef):
            leaf = self.leaves[ref.index]
            return self._leaf(ref.index) if leaf is None else leaf
        if isinstance(ref, WrapperRef):
            wrapper = self.wrappers[ref.index]
            return self._wrapper(ref.index) if wrapper is None else wrapper
        _bad(path, "one of its slots holds no tensor")

    def _leaf(self, index: int) -> torch.Tensor:
        record = self.state.tensors[index]
        found = self.tensor(index)
        if record.cls == "parameter":
            found = nn.Parameter(found, record.requires_grad)
        else:
            if record.cls != "tensor":
                found = found.as_subclass(self._parameter_class(record, self.likes.get(index)))
            if record.requires_grad:
                found.requires_grad_()
        if self.home is None and found.is_cuda:
            self.home = found.device.index
        self.leaves[index] = found
        if record.attrs or record.kept:
            self._tensor_attributes(record, found, self.likes.get(index))
        return found

    def _parameter_class(self, record: Leaf, like: Any) -> Any:
        cls = type(like) if values.class_name(type(like)) == record.cls else values.find_class(record.cls)
        if cls is None or not issubclass(cls, nn.Parameter):
            _bad(record.names[0], f"there is no Parameter class {record.cls}")
        return cls

    def _wrapper(self, index: int) -> torch.Tensor:
        record = self.state.wrappers[index]
        inner = {name: self._tensor(ref, record.names[0]) for name, ref in record.inner.items()}
        shape, stride = tuple(record.shape), tuple(record.stride)
        like = self.wrapper_likes.get(index)
        try:
            cls, codec = codecs.find(record.cls, record.codec)
            found = codec.unflatten(cls, inner, record.meta, like, self.home or 0, shape=shape, stride=stride)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            _bad(record.names[0], str(error))
        # nn.Parameter marks a subclass by an attribute, which is recorded like any other; wrapping it again would
        # replace its inner tensors.
        found.requires_grad_(record.requires_grad)
        self.wrappers[index] = found
        if record.attrs or record.kept:
            self._tensor_attributes(record, found, like)
        return found

    def _tensor_attributes(self, record: Leaf | records.Wrapper, found: torch.Tensor, like: Any) -> None:
        theirs = like.__dict__ if isinstance(like, torch.Tensor) else {}
        mine = found.__dict__
        for name in record.kept:
            if name not in theirs:
                _bad(f"{record.names[0]}.{name}", "the empty module's tensor lacks this attribute")
            mine[name] = theirs[name]
        for name, value in record.attrs.items():
            mine[name] = self._build(value, theirs.get(name, _NOTHING), f"{record.names[0]}.{name}")


def _new(node: records.Node) -> Any:
    """An empty thing of the node's kind, where data is enough to make one."""
    made: dict[str, Callable[[], Any]] = {
        "builtins:list": list,
        "builtins:dict": dict,
        "builtins:set": set,
        "collections:OrderedDict": collections.OrderedDict,
        "collections:Counter": collections.Counter,
        "types:SimpleNamespace": SimpleNamespace,
    }
    if node.cls in made:
        return made[node.cls]()
    if isinstance(node, records.SequenceNode) and node.cls == "collections:deque":
        return collections.deque(maxlen=node.maxlen)
    cls = values.find_class(node.cls) if isinstance(node, records.ObjectNode) else None
    return object.__new__(cls) if cls is not None and dataclasses.is_dataclass(cls) else _NOTHING
