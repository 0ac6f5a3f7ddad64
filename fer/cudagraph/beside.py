"""What a start does while its graphs are restored: all that does not need them, and would take its time afterwards."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from fer.cudagraph import parking

if TYPE_CHECKING:
    from fer.cudagraph.plan import Plan
    from fer.stages import Start

log = logging.getLogger("fer")


def begin(start: Start, plan: Plan) -> None:
    """In threads of their own: a slab for the cache, and what libraries make at their first use.

    Only where graphs are restored: who records their kernels has to see every module that is loaded.
    """
    if plan.restorer is None:
        return
    if start.parked:
        parking.begin_ahead(plan)
    with suppress(RuntimeError):  # no thread can be had: they do it when they are used
        threading.Thread(target=_wake, args=(start,), name="fer-libraries", daemon=True).start()


def _wake(start: Start) -> None:
    try:
        start.engine.wake_libraries()
    except Exception:  # whatever it is: who needs them meets it again
        log.debug("libraries were not made ready", exc_info=True)


def first_prompt(start: Start) -> None:
    """The engine's first prompt, which needs no graph: it waits for kernels to be loaded, as the restore for others."""
    with start.report.step("first prompt") as span:
        try:
            start.engine.first_prompt()
        except Exception as error:  # the warm-up or the self-test takes one too, and tells
            span.details["failed"] = str(error)
