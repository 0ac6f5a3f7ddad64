"""From ``--device`` to torch's name of a device."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fer.errors import OptionError

_NODE = re.compile(r"nvidia\d+")

GPUS = Path("/proc/driver/nvidia/gpus")
"""The GPUs that NVIDIA's kernel module drives."""
INSTANCES = Path("/proc/driver/nvidia/capabilities")
"""Where it lists instances of a GPU that is divided (MIG), as ``gpu0/mig/gi1``; CUDA sees one of those in its place."""
NODES = Path("/dev")
"""Has ``nvidia0`` and so on for the GPUs that a container may use; the kernel's list shows it those of the host."""


def resolve(device: str) -> str:
    """``"auto"`` becomes the current GPU where torch sees one, else ``"cpu"``; other names are checked. Imports torch.

    Raises:
        OptionError: torch does not know the name, or sees no such device.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"unknown device {device!r}", fix="Use cpu, cuda, cuda:N or auto") from error
    if found.type == "cpu":
        return "cpu"
    if found.type != "cuda":
        raise OptionError(f"weights on {found.type!r} cannot be kept", fix="Use cpu, cuda, cuda:N or auto")
    if found.index is not None and torch.backends.cuda.is_built() and found.index < _listed():
        return f"cuda:{found.index}"
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise OptionError(
            f"there is no device {device!r}", why=f"torch sees {count} GPUs", fix="See fer doctor, or use --device cpu"
        )
    return f"cuda:{torch.cuda.current_device() if found.index is None else found.index}"


def foreseen(device: str) -> str | None:
    """What :func:`resolve` will answer, in a process that has chosen no GPU; None where the driver has to be asked.

    Where GPUs are listed that CUDA cannot use, after half an update of the driver say, ``"auto"`` is the CPU for that,
    and a GPU here. Imports torch.
    """
    import torch

    built = torch.backends.cuda.is_built()
    if device == "cpu" or (device == "auto" and not built):
        return "cpu"
    named = re.fullmatch(r"auto|cuda(?::(\d+))?", device)
    number = int((named and named[1]) or 0)
    return f"cuda:{number}" if named and built and number < _listed() else None


def _listed() -> int:
    """GPUs that this process may use, as far as that shows without asking the driver, which takes some 20 ms.

    Less than there are where ``CUDA_VISIBLE_DEVICES`` says more than numbers, or GPUs are divided: what is hidden then
    the driver knows best.
    """
    try:
        there = min(len(os.listdir(GPUS)), sum(bool(_NODE.fullmatch(name)) for name in os.listdir(NODES)))
    except OSError:
        return 0
    if any(INSTANCES.glob("gpu*/mig/gi*")):
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    try:
        numbers = [int(each) for each in chosen.split(",")]
    except ValueError:
        return 0
    plain = len({*numbers}) == len(numbers) and all(0 <= number < there for number in numbers)
    return len(numbers) if plain else 0


def named(devices: str, world: int) -> list[str]:
    """The devices that several ranks were given, as they stand there: one for all, or one for each.

    Raises:
        OptionError: their number is not that of the ranks, or one is named twice: NCCL takes one rank a GPU.
    """
    names = [name.strip() for name in devices.split(",")]
    if world > 1 and len(names) == 1 and names[0] not in ("auto", "cpu", "cuda"):
        raise OptionError(f"{world} ranks cannot share {names[0]}", fix=f"Name {world} devices, or auto, cuda or cpu")
    if len(names) == 1:
        return names * world
    if len(names) != world:
        raise OptionError(f"--device names {len(names)} devices for {world} ranks", fix="Name one for each, or auto")
    if len(set(names)) != world or not all(name.startswith("cuda:") for name in names):
        raise OptionError(f"--device {devices} cannot be", fix="Name a different GPU for each rank: cuda:0,cuda:1")
    return names


def of_rank(devices: str, rank: int, world: int) -> str:
    """Torch's name of a rank's device: of GPUs that are not named, the one with its number. Imports torch.

    Raises:
        OptionError: see :func:`named` and :func:`resolve`; or there are fewer GPUs than ranks.
    """
    name = named(devices, world)[rank]
    if world == 1 or name not in ("auto", "cuda"):
        return resolve(name)
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto" and not count:
        return "cpu"
    if count < world:
        raise OptionError(
            f"{world} ranks need as many GPUs",
            why=f"torch sees {count}",
            fix="Lower --tp, or use --device cpu",
        )
    return f"cuda:{rank}"
