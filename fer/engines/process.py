"""State of the whole process that decides what an engine builds, wherever it was set."""

from __future__ import annotations

from typing import Any

import torch


def state() -> dict[str, Any]:
    """Torch's process-wide switches with an effect on the bytes of built and loaded weights, as plain data by name.

    The default type is what tensors are made of where nothing else is said. The others choose how products are
    computed, and with that the last bits of what post-processing makes of weights. Random numbers are not in it:
    weights drawn anew at each start are no weights to keep.
    """
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        # Of the two interfaces to these, reading the older raises once the newer has been used.
        "matmul_precision": {name: _precision(name) for name in ("cuda.matmul", "cudnn.conv", "mkldnn.matmul")},
    }


def _precision(name: str) -> str:
    found: Any = torch.backends
    for part in (*name.split("."), "fp32_precision"):
        found = getattr(found, part, "")
    return str(found)
