"""The second transport: legacy CUDA IPC handles, for GPUs or drivers that cannot share memory by descriptor.

A handle names a whole allocation of a living process, so the exporter (``fer load``) has to stay, the weights are
promised only while it lives, the driver chooses the addresses, and nothing can be made read-only. The 64-byte handle
travels inside a small sealed memfd, so that the keeper passes it on like any other slab.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import threading
import weakref
from collections.abc import Mapping as Settings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from fer.errors import DriverError, MappingError, OutOfMemory, ProtocolError, SlabLost
from fer.memory import driver, seal
from fer.memory.base import Backend, Mapping, Room
from fer.memory.device import CudaDevice
from fer.memory.fd import Fd

if TYPE_CHECKING:
    import torch

KIND: Final = "cuda-ipc"

_log = logging.getLogger("fer.memory")
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_FRAME: Final = struct.Struct("<8s64sQQ")
_MAGIC: Final = b"FERIPC1\n"
_BLOCK: Final = 2 << 20
"""Smaller allocations share a block with strangers, and a handle would hand those out too."""


@dataclass(frozen=True, kw_only=True)
class Handle:
    """Where exported bytes lie: ``size`` bytes at ``offset`` of the allocation that ``raw`` (64 bytes) names."""

    raw: bytes
    offset: int
    size: int

    def pack(self) -> bytes:
        """The form that travels."""
        return _FRAME.pack(_MAGIC, self.raw, self.offset, self.size)

    @classmethod
    def unpack(cls, data: bytes) -> Handle:
        """Read the form that travels.

        Raises:
            SlabLost: it is no handle.
        """
        if len(data) != _FRAME.size or not data.startswith(_MAGIC):
            raise SlabLost("a received descriptor holds no CUDA IPC handle")
        _, raw, offset, size = _FRAME.unpack(data)
        return cls(raw=raw, offset=offset, size=size)


class IpcMapping(Mapping):
    """A legacy allocation of this process, or one of another process opened here."""

    kind = KIND

    def __init__(self, backend: IpcBackend, address: int, size: int, *, opened: int, moved: bool) -> None:
        self.address, self.size, self.moved = address, size, moved
        self._backend, self._opened = backend, opened
        self._closer = weakref.finalize(self, backend._release, address, opened)
        self._closer.atexit = False  # the driver frees everything with the process, in an order of its own

    def export(self) -> Fd:
        if self._opened or not self._closer.alive:
            raise MappingError(
                "only the process that made a slab can export it", why="this one attached it or closed it"
            )
        return self._backend.export_ranges([(self.address, self.size)])[0]

    def protect(self) -> None:
        """Nothing: CUDA has no read-only form of this memory. What engines write is found by verification only."""

    def close(self) -> None:
        self._closer()

    @property
    def closed(self) -> bool:
        return not self._closer.alive


class IpcBackend(Backend):
    """Slabs of one GPU by legacy CUDA IPC. Use :func:`open_device`.

    Raises:
        DriverError: no driver or no such device.
    """

    kind = KIND
    granularity = _BLOCK
    base = 0

    def __init__(self, ordinal: int) -> None:
        self._cuda = CudaDevice(ordinal)
        self.device, self.gpu = f"cuda:{ordinal}", self._cuda.uuid

    def create(self, size: int, *, address: int = 0) -> IpcMapping:
        if size <= 0:
            raise ValueError(f"a slab of {size} bytes")
        size = -(-size // _BLOCK) * _BLOCK
        try:
            with self._cuda.current():
                where = int(driver.call("cuMemAlloc", size))
        except DriverError as error:
            if driver.code_of(error) != driver.OUT_OF_MEMORY:
                raise MappingError(f"a slab of {size} bytes could not be made", why=str(error)) from error
            free = self.room().free
            raise OutOfMemory(
                f"a slab of {size} bytes does not fit on {self.device}",
                why=f"{free} bytes are free",
                fix="Free memory on the GPU, or evict kept weights with `fer evict`.",
                needed=size,
                free=free,
            ) from error
        return IpcMapping(self, where, size, opened=0, moved=bool(address) and where != address)

    def export_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[Fd]:
        """Descriptors for parts of memory that ``cudaMalloc`` gave, torch's ordinary blocks included.

        Args:
            ranges: ``(address, bytes)``. Several may lie in one allocation: a handle always names the allocation, so
                each carries its own offset.

        Raises:
            MappingError: CUDA IPC cannot share this memory, as with torch's expandable segments.
        """
        handles: dict[int, bytes] = {}
        with self._cuda.current(), ExitStack() as undo:
            made = []
            for address, size in ranges:
                made.append(undo.enter_context(self._export(address, size, handles)))
            undo.pop_all()
        return made

    def attach(self, fd: Fd, size: int, *, address: int = 0) -> IpcMapping:
        with fd:
            try:
                handle = Handle.unpack(seal.read_sealed(fd, _FRAME.size))
            except ProtocolError as error:
                raise SlabLost("a received descriptor holds no CUDA IPC handle", why=str(error)) from error
        if handle.size != size:
            raise SlabLost(f"a CUDA IPC handle covers {handle.size} bytes", why=f"{size} were expected")
        try:
            with self._cuda.current():
                # The driver counts how often a handle is open in this context and answers with the same address.
                opened = int(driver.call("cuIpcOpenMemHandle", _to_driver(handle.raw), _LAZY_PEER_ACCESS))
        except DriverError as error:
            raise SlabLost(
                "a CUDA IPC handle does not open",
                why=f"{error}; the process that exported it has ended, or is this one",
                fix="Run `fer load` again and keep it running.",
            ) from error
        where = opened + handle.offset
        return IpcMapping(self, where, size, opened=opened, moved=bool(address) and where != address)

    def room(self) -> Room:
        return self._cuda.room()

    def storage(self, mapping: Mapping, offset: int, nbytes: int) -> torch.UntypedStorage:
        from fer.memory import torch_private

        return torch_private.storage_within(mapping, offset, nbytes, self.device)

    def _export(self, address: int, size: int, handles: dict[int, bytes]) -> Fd:
        kind = driver.bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        try:
            if not int(driver.call("cuPointerGetAttribute", kind, address)):
                raise _not_shareable(address, "the driver calls it unfit for IPC")
            start, length = (int(value) for value in driver.call("cuMemGetAddressRange", address))
            if start not in handles:
                handles[start] = _from_driver(driver.call("cuIpcGetMemHandle", start))
        except DriverError as error:
            raise _not_shareable(address, str(error)) from error
        if address + size > start + length:
            raise _not_shareable(address, f"its allocation ends {address + size - start - length} bytes too early")
        return seal.sealed_bytes("fer-ipc", Handle(raw=handles[start], offset=address - start, size=size).pack())

    def _release(self, address: int, opened: int) -> None:
        """Close or free; never raises, because the garbage collector calls it too."""
        if os.getpid() != self._cuda.pid:
            return  # a forked child: the driver is not usable here and the memory is the parent's
        try:
            with self._cuda.current():
                if not self._cuda.quiet():
                    _log.warning("memory at %#x is kept for good: it was dropped while a graph was captured", address)
                    return
                if opened:
                    driver.call("cuIpcCloseMemHandle", opened)
                else:
                    driver.call("cuMemFree", address)
        except DriverError as error:
            _log.warning("memory at %#x was not given back: %s", address, error)


def expandable_segments(environ: Settings[str, str]) -> bool:
    """True where torch is told to allocate expandable segments, whose memory legacy IPC cannot share."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments":
                return value.strip().lower() == "true"
    return False


def _not_shareable(address: int, why: str) -> MappingError:
    expandable = expandable_segments(os.environ)
    return MappingError(
        f"the memory at {address:#x} cannot be shared by CUDA IPC",
        why=f"{why}; torch allocates expandable segments" if expandable else why,
        fix="Take expandable_segments:True out of PYTORCH_ALLOC_CONF." if expandable else "Use FER_TRANSPORT=vmm.",
    )


def _from_driver(handle: object) -> bytes:
    # By address: the field is called ``reserved`` in some releases of the bindings and hidden in others.
    return ctypes.string_at(int(handle.getPtr()), 64)  # type: ignore[attr-defined]


def _to_driver(raw: bytes) -> object:
    handle: object = driver.bindings().CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), raw, 64)  # type: ignore[attr-defined]
    return handle


_opening = threading.Lock()
_open: dict[tuple[int, int], IpcBackend] = {}


def open_device(ordinal: int) -> IpcBackend:
    """The backend of one CUDA device, made on first use; a process has one for each device.

    Raises:
        DriverError: as :class:`IpcBackend`.
    """
    key = (os.getpid(), ordinal)
    with _opening:
        if key not in _open:
            _open[key] = IpcBackend(ordinal)
        return _open[key]
