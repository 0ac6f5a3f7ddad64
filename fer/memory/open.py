"""From torch's name of a device to the memory behind it."""

from __future__ import annotations

import re

from fer.errors import OptionError
from fer.memory.base import Backend
from fer.memory.host import HostBackend

_host = HostBackend()


def open_backend(device: str) -> Backend:
    """The backend of ``"cpu"``, ``"cuda"`` (torch's current device) or ``"cuda:N"``; the same one for each device.

    Opening a CUDA device makes its context, if none exists, and reserves the arena's weights range.

    Raises:
        OptionError: the name is neither.
        DriverError: the driver, the device or the bindings are missing.
        MappingError: the device cannot share memory by descriptor (see the ``cuda-ipc`` transport).
    """
    if device == "cpu":
        return _host
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise OptionError(f"unknown device {device!r}", fix="Use cpu, cuda or cuda:N.")
    from fer.memory.cuda import current_ordinal, open_device

    return open_device(int(match[1]) if match[1] else current_ordinal())
