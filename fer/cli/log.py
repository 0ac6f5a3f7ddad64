"""FER's log on stderr, for commands. Loads nothing of the command line's libraries."""

from __future__ import annotations

import contextlib
import logging
import sys


class Stderr(logging.Handler):
    """Writes to what ``sys.stderr`` is at that moment: a progress bar takes its place to stay below the text."""

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is None:
            return  # closed when the program began; print() would take stdout
        with contextlib.suppress(OSError, ValueError):  # a log that takes nothing more is no reason to stop serving
            print(self.format(record), file=sys.stderr, flush=True)


def log_to_stderr(level: str = "info") -> None:
    """Show FER's log, the one line a stage among it, on stderr."""
    logger = logging.getLogger("fer")
    handler = Stderr()
    handler.setFormatter(logging.Formatter("fer: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
