"""The parallel layout of one launch, read from ``torch.distributed``.

Everything that ranks tell each other travels as plain tensors: object collectives would pickle.
"""

from __future__ import annotations

import os
import socket
import uuid
import zlib
from typing import Any, Literal

import torch
import torch.distributed as dist

from fer.engines.base import Ranks
from fer.errors import UsageError

Axis = Literal["tp", "pp", "dp", "ep"]


def started() -> bool:
    """True where this process belongs to an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def start(device: str) -> None:
    """Join the launch that the environment describes (``RANK``, ``WORLD_SIZE``...), unless already joined.

    A process that no launcher started is a launch of one rank and needs no group.
    """
    if started() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device(device))
    else:
        dist.init_process_group("gloo")


def of_launch(axis: Axis, device: str) -> Ranks:
    """The layout of a launch whose ranks all lie along ``axis``. Collective: every rank must call it.

    Raises:
        UsageError: a launcher announced several ranks, but no process group was initialised.
    """
    if not started():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "the ranks of this launch do not know each other yet",
                why="WORLD_SIZE is above 1 and torch.distributed is not initialised",
                fix="Call init_distributed() first; fer.recover does",
            )
        return Ranks(launch=new_launch())
    place: dict[str, Any] = {f"{axis}_size": dist.get_world_size(), f"{axis}_rank": dist.get_rank()}
    return Ranks(launch=_launch(device), local_size=_local_size(device), **place)


def new_launch() -> str:
    """A name for a launch that no other launch bears."""
    return uuid.uuid4().hex


def agree(flag: bool, device: str) -> bool:
    """True where every rank says True. Collective."""
    if not started():
        return flag
    vote = torch.tensor([int(flag)], dtype=torch.int32, device=_wire(device))
    dist.all_reduce(vote, op=dist.ReduceOp.MIN)
    return bool(vote.item())


def _wire(device: str) -> str:
    """Where collectives want their tensors: NCCL knows device memory only, whatever the weights live on."""
    if dist.get_backend() != "nccl":
        return "cpu"
    return device if device.startswith("cuda") else f"cuda:{torch.cuda.current_device()}"


def _launch(device: str) -> str:
    name = torch.tensor(list(uuid.uuid4().bytes), dtype=torch.uint8, device=_wire(device))
    dist.broadcast(name, src=0)
    return bytes(name.cpu().tolist()).hex()


def _local_size(device: str) -> int:
    """How many ranks share this host. The boot id, since containers of one host may bear different names."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            host = file.read()
    except OSError:
        host = socket.gethostname()
    mine = torch.tensor([zlib.crc32(host.encode())], dtype=torch.int64, device=_wire(device))
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return sum(bool(other.item() == mine.item()) for other in everyone)
