"""Runs the command line as its users do: in processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import zygote
from tests.support.keeper import read_line
from tests.support.processes import Children

LIMIT_S = 100.0
"""Seconds; importing torch and Transformers takes most of it on a busy machine of two cores."""


FORKED = ("load", "explain", "verify", "doctor")
"""Commands that import torch, most of them Transformers too."""


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


def fer(*arguments: str | Path, limit_s: float = LIMIT_S, fresh: bool = False, **environment: str) -> Done:
    """Run ``fer`` with these arguments to its end.

    Args:
        fresh: start an interpreter for a command that otherwise is forked from a process with torch imported.
    """
    command, env = [str(argument) for argument in arguments], {**os.environ, **environment}
    if command[0] in FORKED and not fresh:
        child = zygote.shared.fork("fer", *command, env=env, preload=zygote.WITH_TRANSFORMERS)
        try:
            out, err = child.communicate(limit_s)
        finally:
            child.kill()
        return Done(child.wait(limit_s), out, err)
    done = subprocess.run(
        [sys.executable, "-m", "fer", *command],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def start_keeper(children: Children) -> subprocess.Popen[str]:
    """``fer keeper run`` in a process; returns once it listens."""
    keeper = children.spawn([sys.executable, "-m", "fer", "keeper", "run"], stderr=subprocess.STDOUT)
    assert read_line(keeper.stdout, LIMIT_S), "the keeper ended at once"
    return keeper
