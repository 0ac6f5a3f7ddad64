"""Where ``fer`` begins: ``fer run`` takes the short way, everything else the command line.

``fer run`` stands in the way of every restart, and the libraries that the other commands need take longer to load than
all that it does. So its usual forms are recognised here; help, mistakes and all else go to :mod:`fer.cli.main`, which
has the same command and the same words.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_FLAGS: Final = {"--launcher": "launcher", "--runtime-dir": "runtime_dir"}


@dataclass
class _Run:
    command: list[str]
    launcher: str = "auto"
    runtime_dir: str | None = None


def main() -> None:
    """Entry point of the program ``fer``."""
    asked = _recognised(sys.argv[1:])
    if asked is None:
        from fer.cli.main import main as whole

        whole()
    else:
        sys.exit(_run(asked))


def _recognised(arguments: Sequence[str]) -> _Run | None:
    """``run [--launcher NAME] [--runtime-dir PATH] [--] COMMAND …``; None for anything that is not just that."""
    if arguments[:1] != ["run"]:
        return None
    found, at = _Run([]), 1
    while at < len(arguments) and arguments[at].startswith("-"):
        flag, equals, value = arguments[at].partition("=")
        if flag == "--" and not equals:
            at += 1
            break
        if flag not in _FLAGS:
            return None
        if not equals:
            at += 1
            if at == len(arguments):
                return None
            value = arguments[at]
        setattr(found, _FLAGS[flag], value)
        at += 1
    found.command = list(arguments[at:])
    return found if found.command else None


def _run(asked: _Run) -> int:
    from fer.cli.settings import settings
    from fer.errors import FerError
    from fer.standby.launcher_run import run as stand_for

    try:
        given = Path(asked.runtime_dir) if asked.runtime_dir is not None else None
        options = settings(log="info", runtime_dir=given)
        say = logging.getLogger("fer.run").info
        return stand_for(asked.command, launcher=asked.launcher, runtime_dir=options.runtime_dir, say=say)
    except FerError as error:
        from fer.cli.exit_codes import code_of
        from fer.cli.output import print_error

        print_error(error, as_json=False)
        return code_of(error)
