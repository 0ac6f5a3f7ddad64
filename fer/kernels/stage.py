"""The kernels stage: restore what was compiled once, record what is compiled now, write it back when the engine serves.

One start, step by step::

    run       a folder for the cache that can be used      else its trouble is named and the next one is taken
              the verifying manager and the record         through Triton's own variables and hooks
              an archive of this engine and model          restored and verified
    ahead     what was restored                            prepared in threads, when whoever records graphs is there
    finish    what was found and what was compiled, why    the report
              new kernels                                  into the archive, by a process of its own

Triton is not imported for any of it. Whatever fails here, the engine compiles as usual and the report says why.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fer.errors import FerError
from fer.stages import Stage, Start

if TYPE_CHECKING:
    from fer.engines.base import Engine
    from fer.kernels.session import Session

log = logging.getLogger("fer")


class KernelsStage(Stage):
    """Stage two."""

    name = "kernels"

    def __init__(self) -> None:
        self._session: Session | None = None

    def imagine(self, engine: Engine) -> None:
        """Look at the GPUs, which are the same when the start comes."""
        if engine.device.startswith("cuda"):
            from fer.kernels import gpus

            gpus.look()

    def run(self, start: Start) -> None:
        """Everything that has to happen before the first kernel."""
        if not start.options.kernels or start.options.mode == "off":
            self._say(start, "off", "kernels=false" if start.options.mode != "off" else "mode=off")
            return
        if not start.engine.device.startswith("cuda"):
            self._say(start, "absent", "the engine runs on the CPU; nothing is compiled for a GPU")
            return
        from fer.kernels.session import Session

        self._session = Session()
        try:
            self._session.begin(start)
        except FerError as error:
            self._session.note(str(error))
            log.warning("%s", error)
        except Exception as error:  # a bug of ours must not take down an engine
            self._session.note(_bug(error))
            log.exception("the kernels' stage failed before the first kernel")

    def ahead(self, start: Start) -> None:
        """Prepare what was restored: after the graphs' stage, which sees no module that was loaded before it."""
        if self._session is None:
            return
        try:
            self._session.warm()
        except Exception as error:  # as above; or no thread can be had, and the first calls prepare their kernels
            self._session.note(f"kernels were not prepared: {error}")
            log.warning("kernels were not prepared", exc_info=True)

    def finish(self, start: Start) -> None:
        """After the first token: what was found, what was compiled and why; and the archive gets what it lacks."""
        if self._session is None:
            return
        try:
            self._session.finish(start)
        except Exception as error:  # as above: the engine serves already
            log.exception("the kernels' stage failed after the first token")
            self._say(start, "loaded", _bug(error))

    def _say(self, start: Start, path: str, why: str, **details: Any) -> None:
        start.report.stage(self.name, path=path, why=why, **details)


def _bug(error: Exception) -> str:
    return f"bug in FER, please report: {type(error).__name__}: {error}"
