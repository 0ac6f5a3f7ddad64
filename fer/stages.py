"""The Stage protocol, and the stages in the order a start runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fer.engines.base import Engine
    from fer.memory.kept import KeptMemory
    from fer.options import Options
    from fer.report import Report


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of one engine: what every stage is given.

    Attributes:
        parked: the engine is to stand by, without memory for its cache.
        at_once: it serves as soon as it is there, answers that are under way first: these wait for what they need.
    """

    engine: Engine
    options: Options
    report: Report
    parked: bool = False
    at_once: bool = False


class Stage(ABC):
    """One kind of deterministic work that is kept and given back.

    A stage never fails an engine that could have started without it: it falls back to the engine's own path and says
    so in its one line of the report. It raises only where the settings forbid the fallback, or where the engine
    itself fails.

    Attributes:
        name: as in options, report and log.
    """

    name: str

    def imagine(self, engine: Engine) -> None:
        """Make of an engine what needs neither its device nor settings: by a process that waits to be started."""

    def begin(self, start: Start) -> None:
        """Begin in the background what takes long and waits for nothing; before the engine's code is imported."""

    def prepare(self, start: Start) -> None:
        """Take what later phases could take first, such as addresses; before the engine forms its process groups."""

    def ahead(self, start: Start) -> None:
        """What can be done while that which :meth:`begin` began goes on."""

    @abstractmethod
    def run(self, start: Start) -> None:
        """Do the stage's part of the start and report the path taken."""

    def finish(self, start: Start) -> None:
        """After the first token: what takes time and nobody waits for. Reports, if the path is known only now."""


class Wide(Stage):
    """A stage that begins before the weights and has a hand in where the engine allocates."""

    def prepare(self, start: Start) -> None:
        """After the process groups stand, before the weights: what has to be first, or can go on beside them."""

    def placing(self, start: Start) -> AbstractContextManager[None]:
        """Around the engine's allocation of its key/value cache."""
        return nullcontext()

    def in_place(self, start: Start) -> bool:
        """Whether :meth:`placing` gives a parked engine the addresses of its whole cache, so that it allocates as ever.

        Where not, the engine allocates a small cache while it is parked, and its whole one by ``unpark()``.
        """
        return False

    def park(self, start: Start) -> bool:
        """Take the cache's memory from an engine at rest; whether there is less of it now."""
        return start.engine.park()

    def keep(self, start: Start) -> KeptMemory | None:
        """The cache's memory, for an engine after this one; None where it would end with this process."""
        return start.engine.keep()

    def unpark(self, start: Start, kept: KeptMemory | None = None) -> bool:
        """Give it memory again, or what an engine before it kept. Ranks do so each for itself, and need no other one.

        Returns:
            Whether what was kept holds what it held.

        Raises:
            OutOfMemory: the engine is parked as before.
            MappingError: what was kept does not fit; the engine is to be given other memory.
        """
        start.engine.unpark(*([kept] if kept is not None else []))
        return kept is not None

    def served(self, start: Start) -> None:
        """The engine serves: what waited for that, so as to be in nobody's way, goes on."""

    def overwrote(self, start: Start) -> bool:
        """Whether the stage itself had steps run over the cache since :meth:`unpark`."""
        return False

    def resume(self, start: Start) -> None:
        """What is to do before the engine serves, after every rank has its memory; ranks do it together."""


class Absent(Stage):
    """A stage this version of FER does not have; the report says so instead of passing it over."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, start: Start) -> None:
        """Report the stage as absent, or as off where it was switched off."""
        if getattr(start.options, self.name):
            start.report.stage(self.name, path="absent", why="this version of FER has no such stage; engine's own path")
        else:
            start.report.stage(self.name, path="off", why=f"{self.name}=false")


def weights_stage() -> Stage:
    """The weights stage. Imports torch."""
    from fer.weights.stage import WeightsStage

    return WeightsStage()


def before_weights() -> list[Stage]:
    """What must be in place before anything compiles or allocates."""
    from fer.kernels.stage import KernelsStage

    return [KernelsStage(), Absent("distinit")]


def cudagraph_stage() -> Wide:
    """The CUDA graph stage."""
    from fer.cudagraph.stage import CudaGraphStage

    return CudaGraphStage()
