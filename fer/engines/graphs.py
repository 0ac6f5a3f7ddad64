"""What an engine says of its decode graphs: FER captures, keeps and restores them by this description."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import torch


SHALLOW: Final = 0
"""Number of the inputs with which a step depends on them and the weights alone: every row decodes at position 0."""

DEEP: Final = 1
"""Number of the inputs with which rows decode far into a filled cache, each always at the same position of its own."""


class Replayable(Protocol):
    """A graph as an engine uses it: torch's own, or a restored one."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...

    def pool(self) -> Any: ...


class Session(Protocol):
    """What an engine asks after its memory may have moved (sleep, wake, other weights).

    Attributes:
        captured: graphs were captured since somebody last said otherwise; steps ran over the cache for that.
    """

    captured: bool

    @property
    def missing(self) -> bool:
        """Whether :meth:`capture_missing` has something to do."""

    def verify_owners(self) -> list[str]:
        """Stop using the graphs whose memory moved; what moved, by name."""

    def capture_missing(self, most: int | None = None) -> None:
        """Capture what could not be restored or was taken back, or so many sizes of that; to be called by the engine
        while no row is at work."""

    def wait(self, timeout: float | None = None) -> bool:
        """True once every graph is ready or failed; they are usable one by one before that."""

    def wait_for(self, size: int, timeout: float) -> bool:
        """True once the graph of so many rows is ready, or will not come; False where it takes longer."""


class DecodeGraphs(ABC):
    """One decode step for each of a list of batch sizes.

    All that a step reads or writes must be weights, a tensor of :meth:`tensors`, or made by the step itself; what it
    returns lies at the same address in every process that restores the graph.

    Attributes:
        batch_sizes: the sizes with most traffic first; they are restored in this order.
        warm_ups: steps run before each capture.
    """

    batch_sizes: Sequence[int]
    warm_ups: int = 2
    session: Session | None = None
    """What watches over the graphs, once the stage has run; None where none are FER's."""

    cleared: bool = False
    """Whether memory that the cache is allocated from reads as zeros already."""

    deep: bool = False
    """Whether :meth:`fill` knows the inputs :data:`DEEP` too."""

    static_bytes: int = 64 << 20
    scratch_bytes: int = 16 << 30
    pool_bytes: int = 16 << 30
    """Device bytes to have at hand for inputs, for warm-ups with libraries' workspaces, and for what steps make: of the
    last two at most a third of what is free is taken, and what is left of it goes back."""

    def pin(self, layout: Mapping[str, Any]) -> bool:
        """Take this size and layout of the cache, recorded earlier, instead of measuring; False where it cannot be."""
        return dict(layout) == dict(self.layout())

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Every tensor of the module, by path."""

    @abstractmethod
    def layout(self) -> Mapping[str, Any]:
        """Size and layout of the key/value cache as plain data; part of the archive's fingerprint."""

    @abstractmethod
    def kv_bytes(self) -> int:
        """Device bytes :meth:`Engine.allocate_kv` takes, generously: torch rounds up."""

    @abstractmethod
    def largest_kv_bytes(self) -> int:
        """Device bytes of the largest tensor of the cache."""

    @abstractmethod
    def allocate(self) -> None:
        """Make the tensors that inputs are written to (called with torch allocating in the range ``static``)."""

    @abstractmethod
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every tensor besides the weights that a step touches, by a name that stays the same."""

    @abstractmethod
    def step(self, size: int) -> Mapping[str, torch.Tensor]:
        """Run one step on the first ``size`` rows and return its outputs; the work that is captured."""

    def cache_layers(self) -> Sequence[Sequence[str]]:
        """Names of the cache's tensors, those of one layer together; by default ``kv.…`` are layers of their own."""
        return [[name] for name in self.tensors() if name.startswith("kv.")]

    @abstractmethod
    def fill(self, size: int, number: int) -> None:
        """Write one of the two sets of fixed inputs, :data:`SHALLOW` or (where :attr:`deep` is set) :data:`DEEP`.

        The shallow ones are such that a step depends on them and the weights alone. With the deep ones it may read
        the cache up to positions that depend on the row alone, not on the batch size.
        """

    @abstractmethod
    def use(self, size: int, graph: Replayable | None, outputs: Mapping[str, torch.Tensor] | None) -> None:
        """From now on replay this graph for this batch size; None: run it eagerly or pad to a larger one.

        May be called from another thread than the engine's.
        """
