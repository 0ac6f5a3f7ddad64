"""``fer run -- CMD``: an engine by a launcher where one fits, else plainly."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from fer.cli.flags import RuntimeDir
from fer.cli.output import guarded
from fer.cli.settings import settings

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""What comes behind ``--``, or behind the first word, belongs to the command."""


def run(
    context: typer.Context,
    launcher: Annotated[
        str, typer.Option("--launcher", metavar="NAME|auto|off", help="Which launcher; auto is the one named default.")
    ] = "auto",
    runtime_dir: RuntimeDir = None,
) -> None:
    """Run a command, forked from a launcher that has its imports done, or plainly where none fits.

    One line on stderr says which, and why. This process stands for the engine: it forwards signals, stops and goes on
    with it, and ends with its exit code (128 and the number for a signal). If it dies, the engine is killed.
    """
    with guarded():
        from fer.standby.launcher_run import run as stand_for

        options = settings(log="info", runtime_dir=runtime_dir)
        say = logging.getLogger("fer.run").info
        code = stand_for(context.args, launcher=launcher, runtime_dir=options.runtime_dir, say=say)
        raise typer.Exit(code)
