"""Capture: what a loaded module holds that its freshly built skeleton does not.

The loaded module and the skeleton are walked side by side. Tensors are always recorded; a plain value only where it
differs. Mutable things become nodes that remember where their counterpart stands on the skeleton, so that restoring
changes them in place and everything else that refers to them sees the change.

Without a skeleton nothing can be compared: all plain values of modules are recorded, those of helper objects are not.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from fer.weights import records, structure, values, walk_nodes
from fer.weights.pauses import without_gc
from fer.weights.records import Keep, NodeRef, Place, Step, Value
from fer.weights.tensor_walk import Tensors
from fer.weights.walk_parts import (
    KEEP,
    MAX_DEPTH,
    MAX_NODES,
    NOTHING,
    UNKNOWN,
    LiveStorage,
    Made,
    Slot,
    dotted,
    is_missing,
    part,
    refuse,
)


@dataclass(kw_only=True)
class Capture:
    """A module's state, and the live tensors and storages it speaks of, in the same order."""

    state: records.ModuleState
    tensors: list[torch.Tensor]
    storages: list[LiveStorage]


def capture(module: nn.Module, skeleton: nn.Module | None = None) -> Capture:
    """Record everything reachable from a loaded module that loading produced. Changes nothing.

    Args:
        module: the loaded module.
        skeleton: the same module freshly built on ``meta`` by the same code, sharing no object that holds tensors.

    Raises:
        UnsupportedState: the module holds something that cannot be written down or put back, named by its path.
    """
    walk = _Walk()
    with without_gc():
        walk.module(module, UNKNOWN if skeleton is None else skeleton, None, "", 0)
        while walk.pending:
            walk.own_attributes(walk.pending.popleft())
        state = walk_nodes.finish(walk.made, walk.tensors, structure.outline(module))
    walk.tensors.close()
    return Capture(state=state, tensors=walk.tensors.live, storages=walk.tensors.storages)


class _Walk:
    def __init__(self) -> None:
        self.tensors = Tensors(self.value)
        self.pending: collections.deque[Made] = collections.deque()
        self.made: list[Made] = []
        self._seen: dict[int, Made] = {}
        self._claimed: dict[int, Any] = {}

    # --- modules

    def module(self, live: nn.Module, base: Any, place: Place | None, path: str, depth: int) -> Made:
        """Enter a module and its children: slots now, other attributes once all slots of all modules are known."""
        if isinstance(live, torch.jit.ScriptModule):
            refuse(path, "it is a scripted module, whose parts live in TorchScript")
        if base is not UNKNOWN and not _same_class(base, live):
            found = "nothing" if base is NOTHING else values.class_name(type(base))
            refuse(path, f"loading made it a {values.class_name(type(live))}, the empty module has {found} there")
        if self._claimed.get(id(base), live) is not live:
            refuse(path, "the empty module has one module in the place of two")
        if base is live and any(t is not None for t in [*live._parameters.values(), *live._buffers.values()]):
            refuse(path, walk_nodes.SHARED)
        node = self._enter(live, base, place, path, depth)
        node.wanted = True
        where = Slot(node=node, steps=(), path=path, depth=depth)
        tables: tuple[tuple[str, Literal["param", "buffer"]], ...] = (("_parameters", "param"), ("_buffers", "buffer"))
        for table, kind in tables:
            theirs = part(base, attr=table)
            slots: dict[str, Value] = {}
            for name, tensor in getattr(live, table).items():
                slot = where.step(Step(kind, name), dotted(path, name))
                slots[name] = None if tensor is None else self.tensors.visit(tensor, part(theirs, key=name), slot)
            node.changes[table.removeprefix("_")] = slots
        node.changes["children"] = self._children(node)
        node.changes["transient"] = sorted(live._non_persistent_buffers_set)
        node.changes["training"] = live.training
        self.pending.append(node)
        return node

    def _children(self, node: Made) -> dict[str, Value]:
        theirs = part(node.base, attr="_modules")
        children: dict[str, Value] = {}
        for name, child in node.live._modules.items():
            if child is None:
                children[name] = None
                continue
            known = self._seen.get(id(child))
            if known is None:
                base = part(theirs, key=name)
                place = Place(node.index, [Step("child", name)])
                base = NOTHING if base is None else base
                known = self.module(child, base, place, dotted(node.path, name), node.depth + 1)
            children[name] = NodeRef(known.index)
        return children

    def own_attributes(self, node: Made) -> None:
        """The attributes of a module that are its own, and its hooks."""
        live, base = node.live, node.base
        mine = _own(live)
        theirs = base if is_missing(base) else _own(base)
        self._attributes(node, mine, theirs)
        for table in values.HOOK_TABLES:
            self._hooks(node, table, vars(live).get(table), part(base, attr=table))

    def _hooks(self, node: Made, table: str, live: Any, base: Any) -> None:
        """Hooks are code, so they come from the skeleton; what they hold may have been loaded."""
        mine = list(live.values()) if live else []
        if base is UNKNOWN:
            theirs: list[Any] = [UNKNOWN] * len(mine)
        else:
            theirs = list(base.values()) if base else []
        path = dotted(node.path, table)
        if len(mine) != len(theirs):
            refuse(path, f"loading left {len(mine)} hooks, the empty module has {len(theirs)}")
        for number, (hook, other) in enumerate(zip(mine, theirs, strict=True)):
            slot = Slot(node=node, steps=(Step("hook", number, table),), path=f"{path}[{number}]", depth=node.depth + 1)
            if not isinstance(self.value(hook, other, slot), Keep):
                refuse(slot.path, "loading replaced this hook")

    # --- values

    def value(self, live: Any, base: Any, slot: Slot) -> Value:
        """The record of what a slot holds; ``Keep`` where the skeleton's slot already holds it."""
        if slot.depth > MAX_DEPTH:
            refuse(slot.path, f"it lies deeper than {MAX_DEPTH} levels")
        if isinstance(live, torch.Tensor):
            return self.tensors.visit(live, base, slot)
        if live is None or (plain := values.encode(live, self.tensors.home)) is not None:
            if not is_missing(base) and values.same(live, base):
                return KEEP
            return None if live is None else plain
        if isinstance(live, nn.Module | list | dict | set | collections.deque):
            return self._reference(live, base, slot)
        if isinstance(live, tuple):
            return self._tuple(live, base, slot)
        if isinstance(live, frozenset):
            return self._frozenset(live, base, slot)
        if isinstance(live, functools.partial):
            return self._partial(live, base, slot)
        if type(live) is weakref.ref:
            return self._weak(live, base, slot)
        if values.is_opaque(live):
            return self._opaque(live, base, slot)
        return self._reference(live, base, slot)

    def _opaque(self, live: Any, base: Any, slot: Slot) -> Value:
        if base is UNKNOWN:
            return KEEP
        if base is not NOTHING and values.opaque_name(live) == values.opaque_name(base):
            if values.fingerprint_of_array(live) == values.fingerprint_of_array(base):
                return KEEP
            refuse(
                slot.path,
                f"it is a numpy array of {live.nbytes} bytes, too many to be written down",
                "Make it a buffer",
            )
        have = "nothing" if base is NOTHING else values.opaque_name(base)
        refuse(slot.path, f"loading put {values.opaque_name(live)} where the empty module has {have}")

    def _weak(self, live: weakref.ref[Any], base: Any, slot: Slot) -> Value:
        target = live()
        known = self.tensors.known(target) if isinstance(target, torch.Tensor) else None
        return records.Weak(known) if known else self._opaque(live, base, slot)

    def _tuple(self, live: tuple[Any, ...], base: Any, slot: Slot) -> Value:
        alike = _same_class(base, live) and len(base) == len(live)
        items = self._items(live, base if alike or base is UNKNOWN else NOTHING, slot)
        if all(isinstance(item, Keep) for item in items) and (alike or (base is UNKNOWN and items)):
            return KEEP
        if type(live) is tuple:
            return records.Tuple("", items)
        name = values.class_name(type(live))
        if not values.is_namedtuple(live) or not (alike or base is UNKNOWN or values.find_class(name)):
            refuse(slot.path, f"its class {name} cannot be rebuilt from data")
        return records.Tuple(name, items)

    def _frozenset(self, live: frozenset[Any], base: Any, slot: Slot) -> Value:
        if _same_elements(live, base):
            return KEEP
        return records.FrozenSet(self._items(self._sorted(live), NOTHING, slot))

    def _partial(self, live: functools.partial[Any], base: Any, slot: Slot) -> Value:
        if isinstance(base, functools.partial) and len(base.args) == len(live.args):
            args, keywords = base.args, base.keywords
        elif base is UNKNOWN:
            args, keywords = UNKNOWN, UNKNOWN
        else:
            refuse(slot.path, "loading made it a partial, which is code")
        below = slot.step(Step("attr", "func"), f"{slot.path}.func")
        if not isinstance(self.value(live.func, part(base, attr="func"), below), Keep | NodeRef):
            refuse(below.path, "loading replaced this function")
        items = self._items(live.args, args, slot)
        found = {
            name: self.value(item, part(keywords, key=name), slot.step(Step("keyword", name), f"{slot.path}.{name}"))
            for name, item in live.keywords.items()
        }
        same_names = keywords is UNKNOWN or list(keywords) == list(found)
        if same_names and all(isinstance(item, Keep) for item in [*items, *found.values()]):
            return KEEP
        return records.Partial(items, found)

    def _items(self, live: Any, base: Any, slot: Slot) -> list[Value]:
        items: list[Value] = []
        for n, item in enumerate(live):
            other = part(base, key=n)
            if values.is_same_atom(item, other):  # long lists of numbers need no paths
                items.append(KEEP)
            else:
                items.append(self.value(item, other, slot.step(Step("item", n), f"{slot.path}[{n}]")))
        return items

    # --- mutable things

    def _reference(self, live: Any, base: Any, slot: Slot) -> Value:
        """A slot that refers to a mutable thing: enter it the first time, know it again afterwards."""
        node = self._seen.get(id(live)) or self._new(live, base, slot)
        if base is node.base and not is_missing(base):
            return KEEP
        node.wanted = True
        return NodeRef(node.index)

    def _new(self, live: Any, base: Any, slot: Slot) -> Made:
        place: Place | None = Place(slot.node.index, list(slot.steps))
        if base is not UNKNOWN and (not _same_class(base, live) or self._claimed.get(id(base), live) is not live):
            place, base = None, NOTHING
        if isinstance(live, nn.Module):
            if place is None:
                refuse(slot.path, f"loading made this module ({values.class_name(type(live))}); the empty one lacks it")
            return self.module(live, base, place, slot.path, slot.depth)
        if place is None and not _can_be_made(live):
            refuse(slot.path, f"loading made this {values.class_name(type(live))}, which cannot be rebuilt from data")
        node = self._enter(live, base, place, slot.path, slot.depth)
        node.dirty = place is None
        if isinstance(live, dict):
            self._mapping(node)
        elif isinstance(live, set):
            self._set(node)
        elif isinstance(live, list | collections.deque):
            self._sequence(node)
        if type(live) not in values.BARE:
            self._attributes(node, values.attributes(live), base if is_missing(base) else values.attributes(base))
        return node

    def _enter(self, live: Any, base: Any, place: Place | None, path: str, depth: int) -> Made:
        if depth > MAX_DEPTH:
            refuse(path, f"it lies deeper than {MAX_DEPTH} levels")
        if len(self.made) >= MAX_NODES:
            refuse(path, f"the module holds more than {MAX_NODES} objects")
        node = Made(index=len(self.made), live=live, base=base, place=place, path=path, depth=depth)
        self.made.append(node)
        self._seen[id(live)] = node
        if not is_missing(base):
            self._claimed[id(base)] = live
        return node

    def _attributes(self, node: Made, mine: dict[str, Any], theirs: Any) -> None:
        # Values of helper objects may belong to the process (ports, paths), so without a comparison they stay.
        skip_plain = theirs is UNKNOWN and not isinstance(node.live, nn.Module)
        for name, live in mine.items():
            if skip_plain and values.is_plain(live):
                continue
            if not is_missing(theirs) and values.is_same_atom(live, theirs.get(name, NOTHING)):
                continue
            slot = Slot(node=node, steps=(Step("attr", name),), path=dotted(node.path, name), depth=node.depth + 1)
            record = self.value(live, part(theirs, key=name), slot)
            if not isinstance(record, Keep):
                node.attrs[name] = record
                node.dirty = True
        if not is_missing(theirs):
            node.removed = [name for name in theirs if name not in mine]
            node.dirty |= bool(node.removed)

    def _sequence(self, node: Made) -> None:
        slot = Slot(node=node, steps=(), path=node.path, depth=node.depth)
        live, base = node.live, node.base
        items = self._items(live, base, slot)
        as_long = base is UNKNOWN or (base is not NOTHING and len(base) == len(live))
        if as_long and all(isinstance(item, Keep) for item in items):
            return
        node.changes["items"] = items
        node.dirty = True

    def _set(self, node: Made) -> None:
        if node.base is UNKNOWN and not all(isinstance(e, torch.Tensor) or values.is_plain(e) for e in node.live):
            return
        if _same_elements(node.live, node.base):
            return
        slot = Slot(node=node, steps=(), path=node.path, depth=node.depth)
        node.changes["items"] = self._items(self._sorted(node.live), NOTHING, slot)
        node.dirty = True

    def _sorted(self, elements: Iterable[Any]) -> list[Any]:
        """The elements of a set in an order that does not depend on the process."""
        return sorted(elements, key=lambda e: "" if isinstance(e, torch.Tensor) else values.token(e))

    def _mapping(self, node: Made) -> None:
        # Subclasses of dict may compute what they hand out, so dict's own methods are asked.
        live, base = node.live, node.base
        theirs = base if is_missing(base) else list(dict.values(base))
        if base is UNKNOWN or (base is not NOTHING and _same_keys(live, base)):
            changed: dict[int, Value] = {}
            for number, (key, item) in enumerate(dict.items(live)):
                if not is_missing(theirs) and values.is_same_atom(item, theirs[number]):
                    continue
                found = self.value(item, part(theirs, key=number), self._key_slot(node, key, Step("at", number)))
                if not isinstance(found, Keep):
                    changed[number] = found
            node.changes["changed"] = changed
            node.dirty |= bool(changed)
            return
        pairs: list[tuple[Value, Value]] = []
        for key, item in dict.items(live):
            if isinstance(key, torch.Tensor) or not values.is_hashable_data(key):
                refuse(node.path, f"a key of this dict is a {values.class_name(type(key))}")
            name = self.value(key, NOTHING, Slot(node=node, steps=(), path=node.path, depth=node.depth + 1))
            slot = self._key_slot(node, key, Step("key", name))
            other = base if is_missing(base) else dict.get(base, key, NOTHING)
            pairs.append((name, self.value(item, other, slot)))
        node.changes["pairs"] = pairs
        node.dirty = True

    def _key_slot(self, node: Made, key: Any, step: Step) -> Slot:
        path = f"{node.path}[{key!r}]" if values.is_plain(key) else f"{node.path}[{step.key}]"
        return Slot(node=node, steps=(step,), path=path, depth=node.depth + 1)


def _own(module: nn.Module) -> dict[str, Any]:
    mine = values.attributes(module) if values.slots(type(module)) else vars(module)
    return {name: value for name, value in mine.items() if name not in values.MODULE_SLOTS}


def _same_class(base: Any, live: Any) -> bool:
    """By name: parametrised modules get a class of their own each."""
    return type(base) is type(live) or values.class_name(type(base)) == values.class_name(type(live))


def _same_elements(live: Any, base: Any) -> bool:
    """Whether two sets hold the same data; one that holds tensors never does."""
    if type(live) is not type(base) or len(live) != len(base):
        return False
    if any(isinstance(element, torch.Tensor) for element in live):
        return False
    return sorted(map(values.token, live)) == sorted(map(values.token, base))


def _same_keys(live: dict[Any, Any], base: dict[Any, Any]) -> bool:
    return len(live) == len(base) and all(
        a is b or (type(a) is type(b) and values.token(a) == values.token(b))
        for a, b in zip(dict.keys(live), dict.keys(base), strict=True)
    )


def _can_be_made(live: Any) -> bool:
    """Whether data is enough to make such a thing: bare containers, dataclasses, namespaces."""
    cls = type(live)
    if isinstance(live, list | dict | set | collections.deque):
        return cls in values.BARE and cls is not collections.defaultdict
    if cls is SimpleNamespace:
        return True
    return dataclasses.is_dataclass(cls) and values.find_class(values.class_name(cls)) is cls
