"""Restored graphs in an engine's use: handed over one by one, taken back when memory moves, captured where missing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fer.cudagraph.capture import capture, on
from fer.cudagraph.restore import outputs_of, touched, verify_owners
from fer.cudagraph.save import layout_digest, name_of, tensors

if TYPE_CHECKING:
    from fer.cudagraph.audit import Owner
    from fer.cudagraph.plan import Plan
    from fer.engines.graphs import DecodeGraphs

log = logging.getLogger("fer")

_LONG_S = 60.0


def size_of(name: str) -> int:
    """The batch size of a graph by its name."""
    return int(name.rpartition("/")[2])


class Session:
    """What an engine keeps of its restored graphs (see :class:`fer.engines.graphs.Session`).

    Args:
        barred: graphs that must not be used, whatever becomes of their restore.
        alone: the engine has no other ranks. Steps may hold collectives, so with others nothing is captured later on:
            they would have to capture the same at the same time.

    Attributes:
        used: restored graphs that the engine has.
        failed: why graphs that were restored could not be handed over.
        captured: graphs were captured since somebody last said otherwise; steps ran over the cache for that.
    """

    def __init__(self, plan: Plan, graphs: DecodeGraphs, barred: Iterable[str], *, alone: bool = True) -> None:
        self._plan, self._graphs, self._alone = plan, graphs, alone
        self._barred = set(barred)
        self._lock = threading.Lock()
        self._missing: set[int] = set()
        self._native: dict[int, list[Owner]] = {}  # where everything was when a size was captured in this process
        self.used: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.captured = False

    def use(self, name: str, graph: Any) -> None:
        """Hand a graph to the engine, unless it is barred; called from whichever thread has it."""
        archive, plan = self._plan.archive, self._plan
        assert archive is not None
        with self._lock:
            if name in self._barred:
                return
            graph.pool_id, graph.device = plan.ranges.pool.name, plan.device.ordinal
            try:
                outputs = outputs_of(archive, name, f"cuda:{plan.device.ordinal}", plan.ranges)
            except Exception as error:  # what an archive says of outputs may be anything; this graph is captured
                log.warning("graph %s is not used: %r", name, error)
                self._barred.add(name)
                self.failed[name] = f"its outputs cannot be had: {error!r}"
                return
            self.used[name] = graph
            self._graphs.use(size_of(name), graph, outputs)

    @property
    def missing(self) -> bool:
        """Whether graphs wait for :meth:`capture_missing`."""
        return bool(self._missing)

    def miss(self, names: Iterable[str]) -> None:
        """These will not come: they are captured when the engine has a moment."""
        with self._lock:
            self._missing |= {size_of(name) for name in names}
            missing = sorted(self._missing)
        if missing and self._alone:
            log.info("graphs: steps of %s rows take a larger graph, or none, until no answer is under way", missing)

    def replaced(self, sizes: Iterable[int]) -> None:
        """These were captured natively just now, and stand in for what was restored of them."""
        owners = owners_of(self._plan)
        with self._lock:
            for size in sizes:
                self._native[size] = owners
                self._missing.discard(size)
                name = name_of(size)
                self._barred.add(name)
                self.used.pop(name, None)

    def wait(self, timeout: float | None = None) -> bool:
        """True once every graph is ready or failed."""
        return self._plan.restorer is None or self._plan.restorer.wait(timeout)

    def wait_for(self, size: int, timeout: float) -> bool:
        """True once the graph of so many rows is ready, or will not come; False where it takes longer."""
        return self._plan.restorer is None or self._plan.restorer.wait_for(name_of(size), timeout)

    def verify_owners(self) -> list[str]:
        """After sleep, wake or a change of weights: stop using the graphs whose memory moved; what moved, by name.

        Graphs captured in this process are held to where everything was then, restored ones to what the archive says.
        """
        now = owners_of(self._plan)
        wrong = moved(self._plan, now)
        assert self._plan.archive is not None
        gone = touched(self._plan.archive.facts, wrong) if wrong else {}
        found = dict.fromkeys(wrong.values())
        with self._lock:
            self._barred |= set(gone)
            sizes = {size_of(name) for name in gone} - set(self._native)
            for size, owners in list(self._native.items()):
                moved_since = verify_owners([(each.name, each.address, each.size) for each in owners], now)
                if moved_since:
                    found |= dict.fromkeys(moved_since.values())
                    sizes.add(size)
                    del self._native[size]
            for size in sizes:
                self._graphs.use(size, None, None)
                self._missing.add(size)
                self.used.pop(name_of(size), None)
        return list(found)

    def capture_missing(self, most: int | None = None) -> None:
        """Capture what is missing, natively; from the engine's own thread, while no row is at work.

        Args:
            most: sizes to capture now, the largest first: others may take its graph.

        What cannot be captured either (lack of memory) runs eagerly, and the log says so.
        """
        if not self._missing or not self.wait(_LONG_S):
            return
        with self._lock:
            sizes = sorted(self._missing)[-(most or 0) :]
            self._missing -= set(sizes)
        if not self._alone:
            log.warning("graphs: %s stay without a graph: ranks would have to capture them together", sizes)
            return
        self.captured = True
        try:
            with on(f"cuda:{self._plan.device.ordinal}"):
                captured = capture(self._graphs, sizes, None, keep=False)
        except RuntimeError as error:  # torch's word for all that can go wrong
            log.warning("graphs: %s stay without a graph: %s", sizes, (str(error).splitlines() or [repr(error)])[0])
            return
        self.replaced(captured.graphs)
        for size, graph in captured.graphs.items():
            self._graphs.use(size, graph, captured.outputs[size])
        log.info("graphs: captured %s that could not be restored", sorted(captured.graphs))
        for size, why in captured.troubles.items():
            log.warning("graphs: %d stays without a graph: %s", size, why)


def owners_of(plan: Plan) -> list[Owner]:
    """Weights and named tensors where they lie now."""
    from fer.cudagraph import plan as planning

    return [*planning.weights_of(plan), *tensors(plan.graphs)]


def moved(plan: Plan, owners: list[Owner]) -> dict[str, str]:
    """What is not as the archive says, by owner; the weights' layout differs for every weight at once."""
    assert plan.archive is not None
    facts = plan.archive.facts
    wrong = verify_owners(facts["owners"], owners)
    if not wrong and layout_digest(plan.graphs.weights()) != facts["weights"]:
        names = [str(name) for name, _, _ in facts["owners"] if str(name).startswith("weight/")]
        return dict.fromkeys(names, "the weights' layout (shapes, strides, types) is another")
    return wrong
