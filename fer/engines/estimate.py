"""How many bytes a Hugging Face checkpoint will take once it is loaded, told from its headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from fer.weights.shards import read_header

_FLOATS = ("F64", "F32", "F16", "BF16")
"""Types that loading casts to the compute type; FP8 weights and integers stay as they are."""
_SPLITTING = ("colwise", "rowwise", "grouped_gemm")
"""Parts of the names of sharding styles that leave each rank a share; under all others every rank has the whole."""


def loaded_bytes(
    shards: Iterable[Path], *, itemsize: int, world: int = 1, plan: Mapping[str, str] | None = None
) -> int:
    """Bytes of one rank's weights.

    Args:
        shards: the safetensors files.
        itemsize: bytes of one value of the compute type.
        world: tensor-parallel ranks.
        plan: sharding style by the pattern of a module's or parameter's name, such as
            ``{"layers.*.mlp.up_proj": "colwise"}``.

    Raises:
        CheckpointError: a header cannot be read.
    """
    split = [pattern for pattern, style in (plan or {}).items() if any(word in style for word in _SPLITTING)]
    total = 0
    for shard in shards:
        for tensor in read_header(shard).tensors:
            size = math.prod(tensor.shape) * itemsize if tensor.dtype in _FLOATS else tensor.end - tensor.begin
            total += -(-size // world) if world > 1 and _is_split(tensor.name, split) else size
    return total


def _is_split(name: str, split: list[str]) -> bool:
    parts = ["*" if part.isdigit() else part for part in name.split(".")]
    if "experts" in parts:  # kept one by one, while the plan speaks of the tensors that they are stacked into
        return any(".experts" in pattern for pattern in split)
    names = (".".join(parts), ".".join(parts[:-1]))
    return any(name == pattern or name.endswith(f".{pattern}") for name in names for pattern in split)
