"""One CUDA device as this process sees it: its primary context, its identity, its free memory."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fer.errors import DriverError, OutOfMemory
from fer.memory import driver
from fer.memory.base import Room
from fer.memory.patience import patiently

_log = logging.getLogger("fer.memory")


class DeviceFacts:
    """What the driver says of a device; no context is made for it.

    Attributes:
        ordinal: CUDA's number of the device in this process; torch's too.
        name: marketing name.
        uuid: ``"GPU-..."``, or ``"MIG-..."`` for a MIG instance.
        pci_bus: ``"0000:1b:00.0"``.

    Raises:
        DriverError: no driver, no such device, or a process forked after CUDA was used.
    """

    def __init__(self, ordinal: int) -> None:
        driver.call("cuInit", 0)
        self.ordinal = ordinal
        self._device = driver.call("cuDeviceGet", ordinal)
        self.name = _text(driver.call("cuDeviceGetName", 256, self._device))
        self.pci_bus = _text(driver.call("cuDeviceGetPCIBusId", 32, self._device)).lower()
        self.uuid = _uuid(self._device, self.name)

    def attribute(self, name: str) -> int:
        """A device attribute by the name of its enumerator, without ``CU_DEVICE_ATTRIBUTE_``."""
        kind = getattr(driver.bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(driver.call("cuDeviceGetAttribute", kind, self._device))


class CudaDevice(DeviceFacts):
    """A device and its primary context, the one torch uses, whether or not torch has begun to.

    The context is retained for the life of the process: giving it back could destroy it under a library that uses
    it without retaining it.

    Raises:
        DriverError: as :class:`DeviceFacts`; or there is no memory for a context.
    """

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self.pid = os.getpid()
        self._context = self._retain()

    def _retain(self) -> Any:
        """The context; a process that is dying may still have the memory that it takes, or the whole device."""

        def take() -> Any:
            try:
                return driver.call("cuDevicePrimaryCtxRetain", self._device)
            except DriverError as error:
                if driver.code_of(error) in (driver.OUT_OF_MEMORY, driver.UNAVAILABLE):
                    raise OutOfMemory(f"{self.name} has no room for a context", why=str(error)) from error
                raise

        try:
            return patiently(take)
        except OutOfMemory as error:
            assert isinstance(error.__cause__, DriverError)
            raise error.__cause__ from None

    @property
    def context(self) -> int:
        """The ``CUcontext`` as a number, for calls that take it so."""
        return int(self._context)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current for this thread; any thread may come here, the garbage collector's included."""
        driver.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            driver.call("cuCtxPopCurrent")

    def room(self) -> Room:
        """Free and total bytes as the driver reports them."""
        with self.current():
            free, total = driver.call("cuMemGetInfo")
        return Room(free=int(free), total=int(total))

    def synchronize(self) -> None:
        """Wait for all work of the device; call inside of :meth:`current`."""
        driver.call("cuCtxSynchronize")

    def quiet(self) -> bool:
        """Wait for all work before memory is unmapped; False where a graph is being captured and nothing may wait.

        Waiting while a capture runs would not only fail, it would ruin the capture.
        """
        if _capturing():
            return False
        try:
            self.synchronize()
        except DriverError as error:
            if driver.code_of(error) in driver.STREAM_CAPTURE:
                return False
            _log.warning("the device could not be waited for: %s", error)
        return True


def current_ordinal() -> int:
    """Torch's current CUDA device, 0 where torch is not in use."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    return 0


def _capturing() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def _uuid(device: Any, name: str) -> str:
    # Bindings 12 keep the MIG-aware form apart; from 13 on the plain name is that form.
    modern = "cuDeviceGetUuid_v2" if hasattr(driver.bindings(), "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    raw = bytes(driver.call(modern, device).bytes)
    return f"{'MIG' if ' MIG ' in name else 'GPU'}-{uuid.UUID(bytes=raw)}"


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.split(b"\0", 1)[0].decode(errors="replace")
