"""From torch's name of a device to the memory behind it."""

from __future__ import annotations

import re
import threading
from contextlib import suppress

from fer.errors import FerError, MappingError, OptionError
from fer.memory.base import Backend
from fer.memory.host import HostBackend

_host = HostBackend()


def open_backend(device: str, transport: str = "auto") -> Backend:
    """The backend of ``"cpu"``, ``"cuda"`` (torch's current device) or ``"cuda:N"``; the same one for each device.

    Opening a CUDA device makes its context, if none exists, and reserves the arena's weights range.

    Args:
        transport: for CUDA: ``"vmm"`` (descriptors), ``"cuda-ipc"`` (legacy handles), or ``"auto"``, which takes
            descriptors where the device can share memory so and legacy handles elsewhere. The backend's ``kind``
            says which it became.

    Raises:
        OptionError: the name is neither.
        DriverError: the driver, the device or the bindings are missing.
        MappingError: ``"vmm"`` was asked for and the device cannot share memory by descriptor.
    """
    if transport not in ("auto", "vmm", "cuda-ipc"):
        raise OptionError(f"unknown transport {transport!r}", fix="Use auto, vmm or cuda-ipc.")
    if device == "cpu":
        return _host
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise OptionError(f"unknown device {device!r}", fix="Use cpu, cuda or cuda:N.")
    from fer.memory import ipc
    from fer.memory.cuda import current_ordinal, open_device

    ordinal = int(match[1]) if match[1] else current_ordinal()
    if transport == "cuda-ipc":
        return ipc.open_device(ordinal)
    try:
        return open_device(ordinal)
    except MappingError:
        if transport == "vmm":
            raise
        return ipc.open_device(ordinal)


def open_ahead(device: str, transport: str = "auto") -> None:
    """Open a device in the background: the driver takes a quarter of a second for a context, and no processor time.

    Whoever opens it then waits for that, and is told what went wrong.
    """
    if device == "cuda":  # each thread has a current device of its own
        from fer.memory.device import current_ordinal

        device = f"cuda:{current_ordinal()}"

    def work() -> None:
        with suppress(FerError):
            open_backend(device, transport)

    with suppress(RuntimeError):  # no thread can be had: it is opened when it is needed
        threading.Thread(target=work, name="fer-device", daemon=True).start()
