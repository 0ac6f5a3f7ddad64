"""The interface both kinds of memory stand behind.

A *slab* is one descriptor-backed region. A *backend* makes slabs for one device and maps received ones; a
*mapping* is a slab seen in this process. Torch storages hold their mapping, so the memory stays mapped exactly as
long as something uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    import torch

    from fer.memory.fd import Fd

HOST: Final = "host"
"""The ``gpu`` of editions that live in host memory."""

Kind = Literal["host", "cuda", "cuda-ipc"]
"""What a slab's descriptor stands for: a sealed memfd, CUDA virtual memory, or a legacy CUDA IPC handle."""

ALIGNMENT = 512
"""Bytes; torch's caching allocator hands out addresses with this alignment, so kernels may rely on it."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """Free and total bytes of a device, as its driver (or kernel and cgroup) reports them."""

    free: int
    total: int


class Mapping(ABC):
    """One slab, mapped into this process.

    Attributes:
        kind: what its descriptor stands for.
        address: first byte, in the device's address space.
        size: bytes, a multiple of the backend's granularity.
        moved: True where the recorded address was taken and the slab was mapped elsewhere.
    """

    kind: Kind
    address: int
    size: int
    moved: bool

    @abstractmethod
    def export(self) -> Fd:
        """A new descriptor of the slab, owned by the caller. Only the process that made the slab may export it."""

    @abstractmethod
    def protect(self) -> None:
        """Make the slab read-only in this process for good and seal it where the kernel can (host).

        Raises:
            MappingError: the slab is still mapped writable somewhere.
        """

    def forget_descriptor(self) -> None:
        """Close what only :meth:`export` needs, once the slab was handed over."""

    @abstractmethod
    def close(self) -> None:
        """Unmap. Safe to call twice. Nothing may use the memory any more."""


class Backend(ABC):
    """Slabs of one device.

    Attributes:
        kind: of its slabs.
        device: torch's name of the device, ``"cpu"`` or ``"cuda:0"``.
        gpu: ``"host"``, or the physical GPU's UUID as the driver prints it (``"GPU-..."``).
        granularity: bytes; every slab's size is a multiple of it.
        base: address of the device's ``weights`` range, 0 where addresses are not recorded (host).
    """

    kind: Kind
    device: str
    gpu: str
    granularity: int
    base: int

    @abstractmethod
    def create(self, size: int, *, address: int = 0) -> Mapping:
        """A fresh slab of at least ``size`` bytes, mapped writable, at ``address`` where one is given and free.

        Raises:
            OutOfMemory: the device (or the cgroup) has not that much; nothing was allocated.
        """

    @abstractmethod
    def attach(self, fd: Fd, size: int, *, address: int = 0) -> Mapping:
        """Map a received slab read-only; takes ownership of ``fd`` and closes it, whatever happens.

        Raises:
            SlabLost: the descriptor does not import (any more), or is no slab of that size.
            MappingError: no address range could be had.
        """

    def attach_many(self, slabs: Sequence[tuple[Fd, int, int]]) -> list[Mapping]:
        """Map several slabs, ``(fd, size, address)`` each; all or none. Takes ownership of every ``fd``.

        Raises:
            SlabLost, MappingError: as :meth:`attach`; what was mapped before is unmapped again.
        """
        mappings: list[Mapping] = []
        try:
            for fd, size, address in slabs:
                mappings.append(self.attach(fd, size, address=address))
        except BaseException:
            for mapping in mappings:
                mapping.close()
            raise
        finally:
            for fd, _, _ in slabs:
                fd.close()
        return mappings

    @abstractmethod
    def room(self) -> Room:
        """Free and total bytes right now."""

    @abstractmethod
    def storage(self, mapping: Mapping, offset: int, nbytes: int) -> torch.UntypedStorage:
        """A torch storage over part of a mapping; it keeps the mapping alive."""
