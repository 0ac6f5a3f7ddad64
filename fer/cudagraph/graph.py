"""What stands in for ``torch.cuda.CUDAGraph`` in an engine: a restored graph that replays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fer.cudagraph.libcuda import Cuda
from fer.errors import FerBug


@dataclass
class Graph:
    """A restored graph: an executable of its own, never updated in place, and all it needs to stay valid.

    Attributes:
        name: as in the archive.
        keep: strong references to binaries, ranges and tensors the graph points into.
        device: CUDA's number of its GPU; None where that is torch's current one.
    """

    name: str
    executable: int
    cuda: Cuda
    pool_id: Any = None
    keep: list[Any] = field(default_factory=list, repr=False)
    stream: Callable[[], int] | None = None
    device: int | None = None

    def replay(self) -> None:
        """Launch on torch's current stream of its GPU. Raises DriverError, FerBug after :meth:`reset`."""
        if not self.executable:
            raise FerBug(f"graph {self.name} was reset")
        with self._on_device():
            code = self.cuda.launch(self.executable, self._stream())
        if code:
            self.cuda.check("launch", code)

    def reset(self) -> None:
        """Destroy the executable. Its last replay must have ended."""
        if self.executable:
            self.cuda.exec_destroy(self.executable)
            self.executable = 0

    def pool(self) -> Any:
        """Names the pool its outputs lie in. Not one that torch knows: captures into it would write over graphs."""
        return self.pool_id

    def _on_device(self) -> AbstractContextManager[object]:
        """The default stream is a number that means another one on each GPU."""
        if self.device is None or self.stream is not None:
            return nullcontext()
        torch = sys.modules["torch"]
        return nullcontext() if torch.cuda.current_device() == self.device else torch.cuda.device(self.device)

    def _stream(self) -> int:
        if self.stream is not None:
            return self.stream()
        torch = sys.modules["torch"]
        return int(torch.cuda.current_stream().cuda_stream)
