"""A cache without memory: one slab stands for it while the engine starts, and nothing while it waits."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from fer.cudagraph.plan import Plan
from fer.errors import MappingError
from fer.memory.kept import KeptMemory
from fer.memory.patience import patiently

if TYPE_CHECKING:
    from fer.engines.graphs import DecodeGraphs

log = logging.getLogger("fer")

CHUNK: Final = 1 << 30
"""Bytes of one allocation of a cache's memory."""


@contextlib.contextmanager
def cleared(graphs: DecodeGraphs) -> Iterator[None]:
    """Around the allocation of the cache from a range, whose memory reads as zeros, also where a slab stands for it."""
    graphs.cleared = True
    try:
        yield
    finally:
        graphs.cleared = False


def fill(plan: Plan) -> None:
    """Before an engine that is to serve allocates its cache: memory for all of it.

    Raises:
        OutOfMemory: there is not enough, and none came within :data:`~fer.memory.patience.FREED_S`.
        MappingError, DriverError: as :meth:`~fer.memory.ranges.NamedRange.map`.
    """
    patiently(lambda: plan.ranges.kv.map(plan.graphs.kv_bytes(), chunk=CHUNK))


def begin_ahead(plan: Plan) -> None:
    """:func:`begin`'s driver calls beside what the start does next; it then waits for them."""
    made: Future[None] = Future()

    def work() -> None:
        try:
            _alias(plan)
            made.set_result(None)
        except BaseException as error:
            made.set_exception(error)

    with contextlib.suppress(RuntimeError):  # no thread can be had: it is done when it is needed
        threading.Thread(target=work, name="fer-slab", daemon=True).start()
        plan.slab = made


def begin(plan: Plan) -> None:
    """Before the engine allocates its cache: one slab over and over, and nothing is saved of graphs over that.

    Raises:
        OutOfMemory: there is not enough, and none came within :data:`~fer.memory.patience.FREED_S`.
        MappingError, DriverError: as :meth:`~fer.memory.ranges.NamedRange.map_over_and_over`.
    """
    if plan.slab is not None:
        plan.slab.result()
    else:
        _alias(plan)
    plan.unsaved = plan.unsaved or "the engine stands by, with no memory for its cache"


def _alias(plan: Plan) -> None:
    patiently(lambda: plan.ranges.kv.map_over_and_over(plan.graphs.kv_bytes(), slab(plan)))


def park(plan: Plan) -> None:
    """Give the cache's memory back, to the last byte; its addresses stay, and so do the graphs.

    To be called while no step runs, and none will before :func:`unpark`.
    """
    if plan.graphs.session is not None:
        plan.graphs.session.wait()  # a node that is still being made may name an address, and is refused over nothing
    plan.ranges.kv.rest()


def unpark(plan: Plan, kept: KeptMemory | None = None) -> bool:
    """Put memory where the cache lies, and see that all that graphs use is where it was.

    Args:
        kept: of an engine before; else the memory is new, and zeroed.

    Returns:
        Whether what was kept still holds what it held: not where graphs had to be captured over it.

    Raises:
        OutOfMemory: there is not enough, and none came within :data:`~fer.memory.patience.FREED_S`;
            the engine is parked as before.
        MappingError: what is kept does not fit, or is another GPU's; the engine is parked, whatever it was before.
    """
    if kept is not None and kept.gpu != plan.device.uuid:
        raise MappingError("memory kept for the cache is another GPU's", why=f"{kept.gpu}, not {plan.device.uuid}")
    kv, session = plan.ranges.kv, plan.graphs.session
    if session is not None:
        session.captured = False
    with plan.restorer.still() if plan.restorer is not None else contextlib.nullcontext():
        # A start's slab goes first, and what it was to be in place of: there may be no room for both.
        if kv.mapped and (kept is not None or not kv.backed):
            kv.rest()
        parts = kept.parts if kept is not None else ()
        try:
            patiently(lambda: kv.back(chunk=CHUNK, kept=parts))
        except BaseException:
            # What is still to be restored would be refused over nothing, and blamed for it.
            if plan.restorer is not None:
                plan.restorer.cancel()
            raise
    if session is None or not (moved := session.verify_owners()):
        return kept is not None
    log.warning("graphs: %s", "; ".join(moved[:3]))
    session.capture_missing()
    return False


def keep(plan: Plan) -> KeptMemory:
    """The cache's memory, for an engine after this one. Raises MappingError, DriverError."""
    return KeptMemory(plan.device.uuid, "cuda", plan.ranges.kv.export())


def slab(plan: Plan) -> int:
    """Bytes of the slab: no tensor of the cache may overlap itself, or replays would not give the recorded outputs."""
    recorded = plan.archive.facts["kv"]["slab"] if plan.archive is not None else 0
    return max(int(recorded), plan.graphs.largest_kv_bytes())
