"""Runs the command line as its users do: in processes."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.processes import Children

LIMIT_S = 100.0
"""Seconds; importing torch and Transformers takes most of it on a busy machine of two cores."""


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        return dict(json.loads(self.out))


def fer(*arguments: str | Path, limit_s: float = LIMIT_S, **environment: str) -> Done:
    """Run ``fer`` with these arguments to its end."""
    import os

    done = subprocess.run(
        [sys.executable, "-m", "fer", *map(str, arguments)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def start_keeper(children: Children) -> subprocess.Popen[str]:
    """``fer keeper run`` in a process; returns once it listens."""
    keeper = children.spawn([sys.executable, "-m", "fer", "keeper", "run"], stderr=subprocess.STDOUT)
    assert keeper.stdout is not None
    ready, _, _ = select.select([keeper.stdout], [], [], LIMIT_S)
    assert ready, "the keeper said nothing"
    line = keeper.stdout.readline()
    assert line, "the keeper ended at once"
    return keeper
