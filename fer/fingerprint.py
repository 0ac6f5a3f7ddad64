"""Whether a kept result may be reused: named fields, their canonical form, their digest, and their differences.

A fingerprint has a *group* part, the same on every rank of a launch, and a *rank* part, the rank's coordinates. Both
are plain data in one canonical form (sorted JSON with a schema number), so that two processes that mean the same write
the same bytes. What could not be found out is :class:`Unknown`, which equals nothing.

Not in it: the content of the checkpoint (:mod:`fer.weights.checkpoint` compares it in steps), the physical GPU (an
edition belongs to one, compared apart), and settings without effect on weights, such as ports and log levels.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fer.environment import Unknown, environment, package_version, source_digest
from fer.errors import OptionError

if TYPE_CHECKING:
    from fer.engines.base import EngineIdentity

__all__ = ["ABSENT", "Difference", "Fingerprint", "Unknown", "environment", "explain", "of"]

SCHEMA = 1
"""Changes with the meaning of any field, so that results kept under another meaning never match."""

AXES = ("tp", "pp", "dp", "ep")
ABSENT = "(absent)"
_UNKNOWN, _BYTES, _SET = "__unknown__", "__bytes__", "__set__"


@dataclass(frozen=True)
class Fingerprint:
    """Canonical fields. Values may be given as Python objects; they are stored as plain data.

    Args:
        group: fields that all ranks of a launch share, with the sizes of its groups under ``"parallel"``.
        rank: this rank's coordinate on each axis, such as ``{"tp": 0}``.

    Raises:
        OptionError: a value has no canonical form. Field: ``name``, its dotted path.
    """

    group: Mapping[str, Any]
    rank: Mapping[str, int]
    schema: int = SCHEMA
    group_digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", _canonical(self.group, ""))
        object.__setattr__(self, "rank", _canonical(self.rank, "rank"))
        text = _dump({"schema": self.schema, "group": self.group})
        object.__setattr__(self, "group_digest", hashlib.sha256(text).hexdigest())

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def rank_key(self) -> str:
        """The rank's place as text, ``"tp0/2,pp0/1,dp0/1,ep0/1"``."""
        sizes = self.group.get("parallel", {})
        return ",".join(f"{axis}{self.rank.get(axis, 0)}/{sizes.get(axis, 1)}" for axis in AXES)

    @property
    def unknown(self) -> list[str]:
        """Fields that could not be found out, each with the reason. With any, no other start will ever match."""
        return [f"{'.'.join(p)}: {value[_UNKNOWN][0]}" for p, value in _flat(self.group) if _is_unknown(value)]

    def to_json(self) -> bytes:
        """The canonical form. Equal fingerprints give equal bytes, in every process."""
        return _dump({"schema": self.schema, "group": self.group, "rank": self.rank})

    @classmethod
    def from_json(cls, data: bytes) -> Fingerprint:
        """What :meth:`to_json` wrote, also under another schema, which then is one of the differences.

        Raises:
            OptionError: it is something else.
        """
        try:
            content = json.loads(data)
            group, rank, schema = content["group"], content["rank"], content["schema"]
            if type(schema) is not int or not isinstance(group, dict) or not isinstance(rank, dict):
                raise TypeError("a field has the wrong type")
            read = cls.__new__(cls)
            for name, value in (("group", group), ("rank", rank), ("schema", schema)):
                object.__setattr__(read, name, value)
            text = _dump({"schema": schema, "group": group})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OptionError("a fingerprint cannot be read", why=str(error)) from error
        object.__setattr__(read, "group_digest", hashlib.sha256(text).hexdigest())
        return read


@dataclass(frozen=True)
class Difference:
    """One field that differs: its dotted path and both values, :data:`ABSENT` where a side has no such field."""

    field: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.field}: {_show(self.left)} / {_show(self.right)}"


def of(identity: EngineIdentity, stamps: Mapping[str, Any]) -> Fingerprint:
    """The fingerprint of an engine in an environment (:func:`fer.environment.environment`).

    Raises:
        OptionError: a setting or override has no canonical form.
    """
    from fer import __version__

    ranks, model = identity.ranks, identity.model
    config = _canonical(identity.quantization_config, "quantization.config")
    group = {
        "fer": __version__,
        "engine": {"name": identity.engine, "version": identity.engine_version},
        # The same folder named from two working directories is one model.
        "model": os.path.abspath(model) if model and os.path.exists(model) else model,
        "revision": identity.revision,
        "architecture": identity.architecture,
        "parallel": {**{axis: getattr(ranks, f"{axis}_size") for axis in AXES}, "local_size": ranks.local_size},
        "quantization": {
            "method": identity.quantization,
            "config_sha256": hashlib.sha256(_dump(config)).hexdigest(),
        },
        "dtype": identity.dtype,
        "overrides": identity.overrides,
        "settings": identity.settings,
        "packages": {name: package_version(name) for name in sorted(set(identity.packages))},
        "sources": _sources(identity.sources),
        "environment": stamps,
    }
    return Fingerprint(group=group, rank={axis: getattr(ranks, f"{axis}_rank") for axis in AXES})


def explain(left: Fingerprint, right: Fingerprint) -> list[Difference]:
    """Every field that differs, by dotted path in order, with both values. Empty exactly where the two are equal."""
    sides = [dict(_flat({"schema": side.schema, **side.group, "rank": side.rank})) for side in (left, right)]
    paths = sorted(sides[0].keys() | sides[1].keys())
    # Compared as text: to Python 1, 1.0 and True are equal, to the digest they are not.
    texts = [{path: _dump(value) for path, value in side.items()} for side in sides]
    differing = [path for path in paths if texts[0].get(path) != texts[1].get(path)]
    # An empty mapping on one side is not worth a line where the other side's entries have theirs.
    heads = {path[:length] for path in differing for length in range(1, len(path))}
    shown = [path for path in differing if path not in heads or any(side.get(path) for side in sides)]
    return [Difference(".".join(path), *(side.get(path, ABSENT) for side in sides)) for path in shown]


def _sources(paths: Sequence[Path]) -> dict[str, Any]:
    """Digest of each source by file name, by full path where two share a name."""
    names = [Path(path).name for path in paths]
    keys = [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths, strict=True)]
    return {key: source_digest(Path(path)) for key, path in zip(keys, paths, strict=True)}


def _canonical(value: Any, path: str) -> Any:
    """Plain JSON data for ``value``, or OptionError with its dotted path."""
    if value is None or (isinstance(value, (bool, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, Unknown):
        return {_UNKNOWN: [value.reason, value.nonce]}
    if isinstance(value, enum.Enum):
        return _canonical(value.value, path)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        raise _refused(value, path, "it is no finite number")
    if isinstance(value, Mapping):
        return _canonical_mapping(value, path)
    if isinstance(value, (list, tuple)):
        return [_canonical(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, AbstractSet):
        items = [_canonical(item, f"{path}{{}}") for item in value]
        return {_SET: sorted(items, key=_dump)}
    if isinstance(value, (bytes, bytearray)):
        return {_BYTES: bytes(value).hex()}
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _canonical_mapping(dataclasses.asdict(value), path)
    return _canonical_foreign(value, path)


def _canonical_mapping(value: Mapping[Any, Any], path: str) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, item in value.items():
        # Whole-number keys, as in id2label, come back from JSON as text anyway.
        name = str(key) if type(key) is int else key
        if not isinstance(name, str) or isinstance(name, enum.Enum):
            raise _refused(key, path, "a key must be a text or a whole number")
        where = f"{path}.{name}" if path else name
        if name in plain or name in (_BYTES, _SET, _UNKNOWN):
            raise _refused(key, where, "the key stands for something else too")
        plain[name] = _canonical(item, where)
    return plain


def _canonical_foreign(value: Any, path: str) -> Any:
    """Values of torch and NumPy, known by name: neither is imported for this."""
    kind = type(value)
    module = kind.__module__.partition(".")[0]
    if module == "torch" and kind.__name__ in ("dtype", "device", "layout", "memory_format"):
        return str(value).removeprefix("torch.")
    if module == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _canonical(value.item(), path)
    raise _refused(value, path, f"a {kind.__module__}.{kind.__qualname__} has no canonical form")


def _refused(value: Any, path: str, why: str) -> OptionError:
    name = path or "the fingerprint"
    fix = "Give plain data: texts, numbers, lists and mappings of these"
    return OptionError(f"{name} = {_show(value)} cannot be part of a fingerprint", why=why, fix=fix, name=name)


def _dump(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _flat(value: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Leaves by path; empty mappings and tagged values are leaves."""
    for key, item in value.items():
        where = (*path, key)
        if isinstance(item, Mapping) and item and not item.keys() & {_UNKNOWN, _BYTES, _SET}:
            yield from _flat(item, where)
        else:
            yield where, item


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Mapping) and _UNKNOWN in value


def _show(value: Any) -> str:
    if _is_unknown(value):
        return f"unknown ({value[_UNKNOWN][0]})"
    text = value if value == ABSENT else repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
