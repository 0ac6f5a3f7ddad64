"""A cache on the host whose memory outlives the process: a memfd, mapped."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

from fer.errors import MappingError
from fer.memory.base import HOST
from fer.memory.fd import Fd
from fer.memory.kept import KeptMemory
from fer.memory.seal import fixed_memfd, is_fixed_size


class HostCache:
    """Tensors of one shape, one after another in one memfd. The mapping lives as long as any of them.

    Args:
        fd: of exactly ``size`` bytes; stays the caller's.

    Raises:
        MappingError: it is no memfd of that size, or the system cannot map it.
    """

    def __init__(self, fd: Fd, count: int, shape: Sequence[int], dtype: torch.dtype) -> None:
        elements = torch.Size(shape).numel()
        self.size = count * elements * dtype.itemsize
        if not is_fixed_size(fd, self.size):
            raise MappingError("memory for the cache does not fit", why=f"it is no memfd of {self.size} bytes")
        self._fd = fd.dup()
        try:
            memory = mmap.mmap(fd.fileno(), self.size)
        except OSError as error:
            raise MappingError("memory for the cache cannot be mapped", why=error.strerror or str(error)) from error
        step = elements * dtype.itemsize
        self.tensors = [
            torch.frombuffer(memory, dtype=dtype, count=elements, offset=number * step).view(*shape)
            for number in range(count)
        ]

    @classmethod
    def create(cls, count: int, shape: Sequence[int], dtype: torch.dtype) -> HostCache:
        """One of zeros. Raises MappingError."""
        size = count * torch.Size(shape).numel() * dtype.itemsize
        try:
            fd = fixed_memfd("fer-cache", size)
        except OSError as error:
            raise MappingError("memory for the cache cannot be had", why=error.strerror or str(error)) from error
        with fd:
            return cls(fd, count, shape, dtype)

    def keep(self) -> KeptMemory:
        """Its memory as a descriptor, the caller's."""
        return KeptMemory(HOST, "host", [(self.size, self._fd.dup())])
