"""The safetensors files of a model folder, and their headers.

:func:`resolve` finds the shards a loader will read and checks them as far as that is possible without reading weights:
every shard the index names exists, every header is sound, every tensor lies within its file, and no shard lies about
that the index does not know. A truncated download is found here, in milliseconds, and not after minutes of loading.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fer.errors import CheckpointError

HEADER_LIMIT = 100_000_000
"""Bytes; the safetensors library reads no longer header, and no real one comes near."""

_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_ALTERNATIVES = ("consolidated",)  # Mistral ships the same weights twice, once in its own layout


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a shard; ``begin`` and ``end`` are bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """A safetensors header: its raw JSON, and the tensors in the order of their bytes."""

    raw: bytes
    tensors: tuple[Tensor, ...]


def resolve(folder: str | os.PathLike[str]) -> list[Path]:
    """The safetensors shards a loader reads from ``folder``, sorted by name.

    A folder holds an index (``*.safetensors.index.json``) and the shards it names, or a single file. A path to one
    file stands for itself. Links, as in the Hugging Face cache, are followed when files are read but kept as names.

    Raises:
        CheckpointError: a shard is missing, truncated, damaged, or not named by the index. Field: ``path``.
    """
    folder = Path(folder)
    if folder.is_file():
        read_header(folder)
        return [folder]
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise _bad(folder, error.strerror or str(error), "Give the folder of a model") from error
    present = [n for n in names if n.endswith(".safetensors") and not n.startswith(_ALTERNATIVES)]
    indexes = [n for n in names if n.endswith(".safetensors.index.json") and not n.startswith(_ALTERNATIVES)]
    if not indexes:
        return [_only(folder, present, names)]
    index = "model.safetensors.index.json" if "model.safetensors.index.json" in indexes else indexes[0]
    shards = _read_index(folder / index)
    extra = [name for name in present if name not in shards]
    if extra:
        # Loaders differ in what they do with such a file, so it is not clear which weights the user means.
        raise _bad(folder / extra[0], f"{index} does not name it", "Remove it, or repair the index")
    for name, tensors in sorted(shards.items()):
        held = {tensor.name for tensor in read_header(folder / name).tensors}
        absent = sorted(set(tensors) - held)
        if absent:
            raise _bad(folder / name, f"{index} says that {absent[0]} is in it, and it is not{_more(absent)}")
    return [folder / name for name in sorted(shards)]


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated or damaged. Field: ``path``.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                raise _bad(path, f"it is truncated: {size} bytes hold no header")
            if length > HEADER_LIMIT:
                raise _bad(path, f"its header claims {length} bytes, the limit is {HEADER_LIMIT}")
            if 8 + length > size:
                raise _bad(path, f"it is truncated: the header needs {8 + length} bytes, the file has {size}")
            raw = file.read(length)
    except OSError as error:
        broken = " (a link that leads nowhere)" if path.is_symlink() and not path.exists() else ""
        raise _bad(path, (error.strerror or str(error)) + broken) from error
    tensors = _tensors(path, _parse(path, raw), 8 + length)
    end = tensors[-1].end if tensors else 8 + length
    if end > size:
        raise _bad(path, f"it is truncated: its tensors need {end} bytes, the file has {size}")
    if end < size:
        raise _bad(path, f"it is damaged: {size - end} bytes follow its last tensor")
    return Header(raw=raw, tensors=tensors)


def _only(folder: Path, present: list[str], names: list[str]) -> Path:
    if len(present) > 1:
        raise _bad(folder, f"it holds {len(present)} safetensors files and no index", "Add the index of the shards")
    if not present:
        other = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
        why = f"it holds no safetensors file{f', only {other[0]}' if other else ''}"
        raise _bad(folder, why, "Convert the checkpoint to safetensors")
    read_header(folder / present[0])
    return folder / present[0]


def _read_index(path: Path) -> dict[str, list[str]]:
    """Shard name to the tensors it must hold."""
    try:
        index = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except OSError as error:
        raise _bad(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"it is no valid JSON ({error})") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(path, "it has no weight_map")
    shards: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        # A name with a folder in it would read files from outside the model.
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise _bad(path, f"{name!r} is no name of a shard")
        shards.setdefault(name, []).append(tensor)
    return shards


def _parse(path: Path, raw: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its header is no valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise _bad(path, "its header is no JSON object")
    return content


def _tensors(path: Path, content: Mapping[str, Any], start: int) -> tuple[Tensor, ...]:
    """The header's tensors, checked to follow one another without gap or overlap from ``start``."""
    tensors = sorted(
        (_tensor(path, name, entry, start) for name, entry in content.items() if name != "__metadata__"),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    position = start
    for tensor in tensors:
        if tensor.begin != position:
            raise _bad(path, f"its header is damaged: {tensor.name} begins at {tensor.begin}, not at {position}")
        position = tensor.end
    return tuple(tensors)


def _tensor(path: Path, name: str, entry: Any, start: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _bad(path, f"its header is damaged: {name} lacks dtype, shape or data_offsets") from None
    numbers = (*shape, begin, end)
    if dtype not in _BITS or not all(type(number) is int and number >= 0 for number in numbers) or end < begin:
        raise _bad(path, f"its header is damaged: {name} has dtype {dtype!r}, shape {shape}, bytes {begin} to {end}")
    bits = _BITS[dtype]
    for dimension in shape:
        bits *= dimension
    if bits != (end - begin) * 8:
        raise _bad(path, f"its header is damaged: {name} of {dtype} {shape} cannot have {end - begin} bytes")
    return Tensor(name=name, dtype=dtype, shape=shape, begin=start + begin, end=start + end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name given twice: which of the two a loader takes is its own secret."""
    content = dict(pairs)
    if len(content) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands in it twice")
    return content


def _more(names: list[str]) -> str:
    return f", nor are {len(names) - 1} others" if len(names) > 1 else ""


def _bad(path: Path, why: str, fix: str = "Fetch the checkpoint again") -> CheckpointError:
    return CheckpointError(f"cannot use {path}", why=why, fix=fix, path=str(path))
