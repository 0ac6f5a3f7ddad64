"""From ``--device`` to torch's name of a device. Imports torch."""

from __future__ import annotations

from fer.errors import OptionError


def resolve(device: str) -> str:
    """``"auto"`` becomes the current GPU where torch sees one, else ``"cpu"``; other names are checked.

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
    count = torch.cuda.device_count()
    if (found.index or 0) >= count:
        raise OptionError(
            f"there is no device {device!r}", why=f"torch sees {count} GPUs", fix="See fer doctor, or use --device cpu"
        )
    return f"cuda:{torch.cuda.current_device() if found.index is None else found.index}"
