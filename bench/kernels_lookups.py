"""Which kernels a start looked up, in any of its processes: by FER's record, or by Triton's manager that tells of it.

``TRITON_CACHE_MANAGER=bench.kernels_lookups:Telling`` is Triton's manager with one more line for each lookup.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from triton.runtime.cache import FileCacheManager

FOLDER = "BENCH_LOOKUPS"


class Telling(FileCacheManager):
    """Triton's own manager; writes down what it answers."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        group: dict[str, str] | None = super().get_group(filename)
        line = json.dumps({"key": self.key, "name": filename, "hit": group is not None, "ms": 0.0}).encode() + b"\n"
        handle = os.open(
            Path(os.environ[FOLDER], f"{os.getpid()}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.write(handle, line)
        os.close(handle)
        return group


def counted(folder: Path) -> dict[str, int]:
    """Kernels by what became of them: a kernel that any process had to compile counts as compiled."""
    from fer.kernels import coverage

    missed, found = set(), set()
    for record in coverage.read(folder):
        (found if record.hit else missed).add((record.key, record.name.removesuffix(".json")))
    return {"hits": len(found - missed), "compiled": len(missed)}
