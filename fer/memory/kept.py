"""Memory that several processes have one after another, as descriptors; whoever wrote it may be gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fer.memory.fd import Fd


@dataclass
class KeptMemory:
    """A cache's memory, in the order of its addresses. Whoever has it closes it; what is mapped of it stays.

    Attributes:
        gpu: UUID of the GPU, or ``"host"``.
        kind: ``cuda`` for the driver's memory, ``host`` for memfds of a size that cannot change.
        parts: bytes and descriptor of each.
    """

    gpu: str
    kind: Literal["host", "cuda"]
    parts: list[tuple[int, Fd]]

    def close(self) -> None:
        """Close the descriptors."""
        for _, fd in self.parts:
            fd.close()
