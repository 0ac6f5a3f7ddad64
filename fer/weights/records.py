"""What is written down about a loaded module: plain msgspec structs, no torch, no code.

A :class:`ModuleState` is a graph. Its *nodes* are the mutable things that were reached (modules, plain objects, lists,
dicts, sets, deques); a node says where on a freshly built skeleton its counterpart stands (:class:`Place`) and what is
different there after loading. Its *leaves* are plain tensors, its *wrappers* tensor subclasses made of other tensors.
Immutable things (tuples, partials) stand inline, because their identity does not matter to anyone.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct


class Keep(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="k"):
    """Whatever the skeleton has in this slot."""


class LeafRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="t"):
    """The plain tensor of that index."""

    index: int


class WrapperRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="w"):
    """The tensor subclass of that index."""

    index: int


class NodeRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="n"):
    """The mutable thing of that index."""

    index: int


class Weak(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="r"):
    """A weak reference to a tensor (RNN modules keep such lists)."""

    target: LeafRef | WrapperRef


class Tuple(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="u"):
    """A tuple; ``cls`` names the class of a namedtuple, ``""`` a plain one."""

    cls: str
    items: list[Value]


class FrozenSet(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="z"):
    """A frozenset."""

    items: list[Value]


class Partial(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="p"):
    """A functools.partial: the function is the skeleton's, arguments are values."""

    items: list[Value]
    keywords: dict[str, Value]


class Special(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="s"):
    """A plain value msgpack has no form for, as text."""

    kind: Literal["int", "complex", "dtype", "device", "size", "layout", "memory_format", "ellipsis", "range", "slice"]
    text: str


class EnumMember(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="e"):
    """A member of an enumeration."""

    cls: str
    name: str


class Bytes(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="b"):
    """A bytes object (msgspec decodes unions of ``str`` or ``bytes``, not of both)."""

    data: bytes


class Array(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="a"):
    """A small numpy array, or a numpy scalar."""

    dtype: str
    shape: list[int]
    data: bytes
    scalar: bool


Value: TypeAlias = (
    "bool | int | float | str | Keep | LeafRef | WrapperRef | NodeRef | Weak | Tuple | FrozenSet"
    " | Partial | Special | EnumMember | Bytes | Array | None"
)


class Step(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """One step from a thing to a part of it.

    ``attr``: attribute; ``param``, ``buffer``, ``child``: a module's slot; ``item``: position in a sequence or a
    partial's arguments; ``key``: key of a dict; ``at``: position among a dict's values; ``hook``: position within the
    module's hook table named by ``table``; ``keyword``: a partial's keyword; ``inner``: a wrapper's inner tensor.
    """

    kind: Literal["attr", "param", "buffer", "child", "item", "key", "at", "hook", "keyword", "inner"]
    key: Value
    table: str = ""


class Place(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Where something stands on the skeleton: from the counterpart of an earlier node, along steps."""

    node: int
    steps: list[Step]


class ModuleNode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="m"):
    """A module. Slots are complete and in order; ``attrs`` holds what loading changed, ``removed`` what it deleted."""

    place: Place | None
    path: str
    cls: str
    training: bool
    parameters: dict[str, Value]
    buffers: dict[str, Value]
    transient: list[str]
    children: dict[str, Value]
    attrs: dict[str, Value]
    removed: list[str]


class ObjectNode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="o"):
    """A plain object; without a place it is made anew (dataclasses and namespaces only)."""

    place: Place | None
    path: str
    cls: str
    attrs: dict[str, Value]
    removed: list[str]


class SequenceNode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="l"):
    """A list, set or deque. ``items`` is None where the contents are the skeleton's."""

    place: Place | None
    path: str
    cls: str
    items: list[Value] | None
    maxlen: int | None
    attrs: dict[str, Value]
    removed: list[str]


class MappingNode(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, tag="d"):
    """A dict. ``pairs`` is None where the set and order of keys are the skeleton's: then ``changed`` holds values by
    position."""

    place: Place | None
    path: str
    cls: str
    pairs: list[tuple[Value, Value]] | None
    changed: dict[int, Value]
    attrs: dict[str, Value]
    removed: list[str]


Node: TypeAlias = ModuleNode | ObjectNode | SequenceNode | MappingNode


class Leaf(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, kw_only=True):
    """A plain tensor.

    Attributes:
        storage: index into the manifest's storages; tensors with one index share memory.
        dtype: torch's name without ``torch.``; shape and stride in elements, ``offset`` in elements from the storage.
        device: ``"cpu"`` or ``"cuda"``.
        cls: ``"tensor"``, ``"parameter"``, or ``module:qualname`` of a Parameter subclass.
        names: every path the tensor was reached by, the first one being its registered name if it has any.
        attrs: attributes set on the tensor; ``kept`` names those that come from the skeleton's tensor at ``place``.
    """

    storage: int
    dtype: str
    shape: list[int]
    stride: list[int]
    offset: int
    device: Literal["cpu", "cuda"]
    requires_grad: bool
    cls: str
    names: list[str]
    attrs: dict[str, Value] = {}
    kept: list[str] = []
    place: Place | None = None


class Wrapper(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, kw_only=True):
    """A tensor subclass, taken apart by the written codec of that name."""

    codec: str
    cls: str
    meta: dict[str, Value]
    inner: dict[str, LeafRef | WrapperRef]
    shape: list[int]
    stride: list[int]
    requires_grad: bool
    names: list[str]
    attrs: dict[str, Value] = {}
    kept: list[str] = []
    place: Place | None = None


class ModuleState(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False, kw_only=True):
    """Everything reachable from a loaded module that its skeleton lacks.

    Attributes:
        nodes: the first is the module itself.
        tensors: the plain ones, to which :class:`LeafRef` points.
        wrappers: the subclasses, to which :class:`WrapperRef` points.
        outline: four bytes for each fact in the structure digest, so that a difference can be named, not only noticed.
    """

    nodes: list[Node]
    tensors: list[Leaf]
    wrappers: list[Wrapper]
    outline: bytes = b""
