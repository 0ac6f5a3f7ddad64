"""What a start does while its graphs are restored: all that does not need them, and would take its time afterwards."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from fer.cudagraph import parking
from fer.cudagraph.capture import on

if TYPE_CHECKING:
    from fer.cudagraph.plan import Plan
    from fer.stages import Start

log = logging.getLogger("fer")

WAIT_S = 2.0
"""Seconds for which the first prompt waits for libraries that are being made ready; then it makes them itself."""


def begin(start: Start, plan: Plan) -> None:
    """In threads of their own: a slab for the cache, and what libraries make at their first use.

    The latter not where answers wait that need graphs alone: what loads modules waits for each other in the driver.
    Only where graphs are restored: who records their kernels has to see every module that is loaded.
    """
    if plan.restorer is None:
        return
    if start.parked:
        parking.begin_ahead(plan)
    if start.at_once:
        return
    with suppress(RuntimeError):  # no thread can be had: they do it when they are used
        plan.woken = threading.Thread(target=_wake, args=(start, plan), name="fer-libraries", daemon=True)
        plan.woken.start()


def _wake(start: Start, plan: Plan) -> None:
    try:
        with on(f"cuda:{plan.device.ordinal}"):  # each thread has a current device of its own
            start.engine.wake_libraries()
    except Exception:  # whatever it is: who needs them meets it again
        log.debug("libraries were not made ready", exc_info=True)


def first_prompt(start: Start, plan: Plan) -> None:
    """The engine's first prompt, which needs no graph: it waits for kernels to be loaded, as the restore for others."""
    if plan.woken is not None and plan.woken.ident is not None:
        # What it made goes to this thread when it has ended; meanwhile all of it would be made a second time.
        with start.report.step("wait for libraries"):
            plan.woken.join(WAIT_S)
    with start.report.step("first prompt") as span:
        try:
            start.engine.first_prompt()
        except Exception as error:  # the warm-up or the self-test takes one too, and tells
            span.details["failed"] = str(error)
