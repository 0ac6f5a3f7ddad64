"""Memory of a key/value cache: how much an engine takes when it begins to serve, and whether that is there."""

from __future__ import annotations

from typing import Any

import torch

from fer.errors import OutOfMemory
from fer.memory.base import Room
from fer.memory.host_room import host_room

PARKED_LENGTH = 8
"""Positions of the cache of an engine that stands by: enough to warm up."""


def cache_bytes(config: Any, rows: int, length: int, itemsize: int, world: int = 1) -> int:
    """Bytes of keys and values of all layers.

    Args:
        config: the model's text configuration.
        rows, length: answers at a time, and positions of each.
        itemsize: bytes of one value.
        world: tensor-parallel ranks that share the heads.
    """
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return 2 * int(config.num_hidden_layers) * rows * -(-heads // world) * length * width * itemsize


def require_room(needed: int, device: str) -> None:
    """Raise OutOfMemory where a device has not so many bytes free."""
    if room_of(device).free < needed:
        raise out_of_memory(needed, device)


def out_of_memory(needed: int, device: str) -> OutOfMemory:
    """The error, with what is free just now."""
    free = room_of(device).free
    return OutOfMemory(
        f"the key/value cache needs {needed} bytes on {device}",
        why=f"{free} bytes are free",
        fix="End what else uses the device's memory, or serve fewer or shorter answers.",
        needed=needed,
        free=free,
    )


def room_of(device: str) -> Room:
    """What a device has; of a GPU as its driver says."""
    if torch.device(device).type != "cuda":
        return host_room()
    free, total = torch.cuda.mem_get_info(torch.device(device))
    return Room(free=int(free), total=int(total))
