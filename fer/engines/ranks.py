"""The parallel layout of one launch, read from ``torch.distributed``.

Everything that ranks tell each other travels as plain tensors: object collectives would pickle. Decisions travel on the
host, also between GPUs: a vote on the device would wait behind work whose other half a failed rank never begins.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import uuid
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from fer.engines.base import Ranks
from fer.errors import PeerRankFailed, UsageError

Axis = Literal["tp", "pp", "dp", "ep"]

LIMIT_S = 1800.0
"""Seconds that a rank waits in a collective for one that is slower, as where its disk is; a rank that ended is noticed
at once on the host."""
DISSENT_S = 20.0
"""Seconds that a rank which says no waits for the votes of the others: they may wait for it, in a step that it cannot
take, until it ends."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One start of several processes of this machine as one engine, for whoever started them without ``torchrun``.

    Attributes:
        rank, world: which of how many.
        store: a file, in a private folder, that this launch alone meets in: keys that an earlier one left would let
            some ranks go on and others wait.
    """

    rank: int
    world: int
    store: Path

    def variables(self, device: str) -> dict[str, str]:
        """What libraries expect of a rank's environment. All ranks are here, so that they need no network but ``lo``.

        Args:
            device: this rank's, ``"cpu"`` or ``"cuda:N"``: Transformers takes ``LOCAL_RANK`` for its number.
        """
        number = device.partition(":")[2] or str(self.rank)
        found = {"RANK": str(self.rank), "LOCAL_RANK": number, "WORLD_SIZE": str(self.world)}
        found["LOCAL_WORLD_SIZE"] = str(self.world)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            found[name] = os.environ.get(name) or "lo"
        if device == "cpu":
            found["CUDA_VISIBLE_DEVICES"] = ""  # else Transformers shards over the GPUs that are there
        return found


def started() -> bool:
    """True where this process belongs to an initialised process group."""
    return dist.is_available() and dist.is_initialized()


def start(device: str, launch: Launch | None = None) -> None:
    """Join a launch, unless already joined: by default the one of the environment (``RANK``, ``WORLD_SIZE``...).

    A process that no launcher started is a launch of one rank and needs no group.
    """
    if started() or (launch is None and int(os.environ.get("WORLD_SIZE", "1")) < 2):
        return
    options: dict[str, Any] = {}
    if launch is not None:
        options = {"rank": launch.rank, "world_size": launch.world}
        options["store"] = dist.FileStore(str(launch.store), launch.world)  # type: ignore[attr-defined]
        options["timeout"] = datetime.timedelta(seconds=LIMIT_S)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=torch.device(device), **options)
    else:
        dist.init_process_group("gloo", **options)


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
    """True where every rank says True. Collective.

    A rank that says False knows the answer: it goes on after :data:`DISSENT_S`, whatever the others wait in.

    Raises:
        PeerRankFailed: a rank has ended, or did not come within :data:`LIMIT_S`.
    """
    if not started():
        return flag
    try:
        group = _voters()
        wire = "cpu" if group is not None else _wire(device)
        vote = torch.tensor([int(flag)], dtype=torch.int32, device=wire)
        work: Any = dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group, async_op=True)
        if not flag:
            with contextlib.suppress(RuntimeError):
                work.wait(datetime.timedelta(seconds=DISSENT_S))
            return False
        work.wait()
        return bool(vote.item())
    except RuntimeError as error:  # torch's word for a connection that closed, and for a wait that was too long
        raise PeerRankFailed(
            "the ranks of this launch cannot agree on anything any more",
            why=(str(error).splitlines() or [repr(error)])[0],
            fix="See the log of the rank that ended first; ranks are started again together",
        ) from error


_host_group: tuple[Any, Any] = (None, None)
"""A process group and the one of the same ranks whose collectives run on the host."""


def _voters() -> Any:
    """The group that votes on the host; None where that is the whole launch's own, or torch has none. Collective."""
    global _host_group
    if dist.get_backend() != "nccl" or not dist.is_gloo_available():
        return None
    whole = dist.group.WORLD
    if _host_group[0] is not whole:
        made = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=LIMIT_S))
        _host_group = (whole, made)
    return _host_group[1]


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
