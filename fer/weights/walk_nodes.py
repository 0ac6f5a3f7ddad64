"""The end of a capture: from nodes in the making to records, without those nobody needs."""

from __future__ import annotations

import collections
from typing import Any, Final

from torch import nn

from fer.weights import records, values
from fer.weights.records import NodeRef, Place, Value
from fer.weights.tensor_walk import Tensors
from fer.weights.walk_parts import Made, refuse

SHARED: Final = "the loaded module and the empty one share this object, and it holds loaded state"


def finish(made: list[Made], tensors: Tensors, outline: bytes) -> records.ModuleState:
    """The records of a walk.

    Raises:
        UnsupportedState: restoring would write to an object that the loaded module uses as well.
    """
    placed = [record["place"].node for record in [*tensors.records, *tensors.wrappers] if record.get("place")]
    moved = {old: new for new, old in enumerate(_needed(made, placed))}
    numbers = _Numbers(moved)
    for record in [*tensors.records, *tensors.wrappers]:
        if record.get("attrs"):
            record["attrs"] = numbers.each(record["attrs"])
        if record.get("place"):
            record["place"] = numbers.place(record["place"])
    return records.ModuleState(
        nodes=[_node(made[index], numbers) for index in moved],
        tensors=[records.Leaf(**record) for record in tensors.records],
        wrappers=[records.Wrapper(**record) for record in tensors.wrappers],
        outline=outline,
    )


def _needed(made: list[Made], placed: list[int]) -> list[int]:
    """Nodes that differ or are referred to, and those they hang on."""
    todo = [node.index for node in made if node.dirty or node.wanted] + placed
    needed: set[int] = set()
    while todo:
        index = todo.pop()
        if index in needed:
            continue
        needed.add(index)
        node = made[index]
        if node.live is node.base and node.dirty:
            refuse(node.path, SHARED, "Build the empty module from objects of its own")
        if node.place is not None:
            todo.append(node.place.node)
    return sorted(needed)


class _Numbers:
    """Gives references the numbers that nodes have after the unneeded ones are gone."""

    def __init__(self, moved: dict[int, int]) -> None:
        self._moved = moved

    def place(self, place: Place | None) -> Place | None:
        return None if place is None else Place(self._moved[place.node], place.steps)

    def each(self, found: dict[Any, Value]) -> dict[Any, Value]:
        return {key: self.value(value) for key, value in found.items()}

    def value(self, value: Value) -> Value:
        if isinstance(value, NodeRef):
            return NodeRef(self._moved[value.index])
        if isinstance(value, records.Tuple):
            return records.Tuple(value.cls, [self.value(item) for item in value.items])
        if isinstance(value, records.Partial):
            return records.Partial([self.value(item) for item in value.items], self.each(value.keywords))
        return value


def _node(made: Made, numbers: _Numbers) -> records.Node:
    live, changes = made.live, made.changes
    cls = values.class_name(type(live))
    common: dict[str, Any] = {"place": numbers.place(made.place), "path": made.path, "cls": cls}
    common |= {"attrs": numbers.each(made.attrs), "removed": made.removed}
    if isinstance(live, nn.Module):
        changes["children"] = numbers.each(changes["children"])
        return records.ModuleNode(**common, **changes)
    if isinstance(live, dict):
        pairs = changes.get("pairs")
        return records.MappingNode(
            **common,
            pairs=None if pairs is None else [(numbers.value(key), numbers.value(item)) for key, item in pairs],
            changed=numbers.each(changes.get("changed", {})),
        )
    if isinstance(live, list | set | collections.deque):
        items = changes.get("items")
        return records.SequenceNode(
            **common,
            items=None if items is None else [numbers.value(item) for item in items],
            maxlen=live.maxlen if isinstance(live, collections.deque) else None,
        )
    return records.ObjectNode(**common)
