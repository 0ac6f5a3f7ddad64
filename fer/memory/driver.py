"""The gate to the CUDA driver: every call goes through :func:`call` and every result through :func:`check`."""

from __future__ import annotations

import functools
import importlib
import logging
from contextlib import suppress
from typing import Any, Final

from fer.errors import DriverError

_log = logging.getLogger("fer.memory")

OUT_OF_MEMORY: Final = 2
UNAVAILABLE: Final = 46
"""Another process has the device, which only one may use (compute mode EXCLUSIVE_PROCESS)."""
STREAM_CAPTURE: Final = frozenset({900, 901, 906, 908})
"""Codes of calls that are not allowed while a stream is being captured."""

EXPLANATIONS: Final = {
    1: "the driver found an argument out of range, or a handle or descriptor that is not what it must be",
    2: "the device has not enough free memory",
    3: "the driver is not initialised in this process; a process forked after CUDA was used cannot use it",
    4: "the driver is shutting down with the process",
    46: "another process holds the device exclusively, or MPS refuses this one",
    100: "no GPU is visible; look at CUDA_VISIBLE_DEVICES and at the container's devices",
    101: "there is no such device number; CUDA_VISIBLE_DEVICES hides or renumbers devices",
    201: "no context of this device is current, or an IPC handle was opened in the process that exported it",
    208: "the memory is already mapped",
    211: "not mapped",
    214: "the GPU reported an uncorrectable memory error; it may need a reset",
    217: "the two GPUs cannot reach each other's memory",
    304: "the operating system refused (descriptors, locked memory, or a missing device file)",
    400: "a handle is not valid (any more)",
    700: "an earlier kernel touched memory it may not touch; this context is lost, restart the process",
    719: "an earlier kernel failed; this context is lost, restart the process",
    800: "the operation is not permitted for this memory or this process",
    801: "the driver or the GPU does not support this; `fer doctor` says what is missing",
    802: "the system is not ready yet (fabric manager, driver start)",
    803: "the driver does not fit the CUDA user-space library; update one of them",
    900: "a CUDA graph is being captured",
    906: "a CUDA graph is being captured",
}


@functools.cache
def bindings() -> Any:
    """The module of driver bindings, imported on first use.

    Raises:
        DriverError: cuda-bindings is not installed.
    """
    missing: ImportError | None = None
    for name in ("cuda.bindings.driver", "cuda.cuda"):  # the second: bindings before 12.6
        try:
            return importlib.import_module(name)
        except ImportError as error:
            missing = missing or error
    raise DriverError(
        "the Python bindings of the CUDA driver are missing",
        why=str(missing),
        fix="Install them: pip install 'fast-engine-recovery[cuda]'",
        call="import",
        code=-1,
    ) from missing


def load() -> None:
    """Load the driver's library and find its functions. It opens no device for that.

    What is missing is told by the first call that needs it.
    """
    with suppress(DriverError):
        call("cuDriverGetVersion")


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function by name; its result without the status (None, the value, or a tuple of several).

    Raises:
        DriverError: the call failed; fields ``call`` and ``code``.
    """
    function = getattr(bindings(), name, None)
    if function is None:
        raise DriverError(f"the CUDA bindings have no {name}", fix="Update cuda-bindings.", call=name, code=-1)
    try:
        result = function(*arguments)
    except RuntimeError as error:  # how the bindings say that libcuda, or one function of it, is not there
        raise DriverError(
            f"{name} cannot be called", why=str(error).rstrip("."), fix="Install a NVIDIA driver.", call=name, code=-1
        ) from error
    return check(name, result)


def check(name: str, result: tuple[Any, ...]) -> Any:
    """Unwrap what a driver function returned.

    Raises:
        DriverError: the status is not success; fields ``call`` and ``code``.
    """
    status, *values = result
    code = int(status)
    if code:
        label = getattr(status, "name", str(code))
        raise DriverError(f"{name} failed with {label} ({code})", why=EXPLANATIONS.get(code, ""), call=name, code=code)
    return values[0] if len(values) == 1 else tuple(values) or None


def code_of(error: DriverError) -> int:
    """The driver's status code, -1 where the call did not get as far as the driver."""
    return int(error.fields.get("code", -1))


def quietly(name: str, *arguments: Any) -> None:
    """A driver call that undoes something: what fails here must not hide why it is being undone."""
    try:
        call(name, *arguments)
    except DriverError as error:
        _log.warning("while giving memory back: %s", error)
