"""FER: Fast Engine Recovery.

``fer.recover(engine)`` brings an LLM inference engine back after a crash by giving it what an earlier start
already made. Importing this package loads nothing but the standard library; the names below load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Options", "Report", "__version__", "recover"]

if TYPE_CHECKING:
    from fer.options import Options
    from fer.orchestrator import recover
    from fer.report import Report

_HOME = {"recover": "fer.orchestrator", "Options": "fer.options", "Report": "fer.report"}


def __getattr__(name: str) -> Any:
    """Load a public name from its room (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'fer' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
