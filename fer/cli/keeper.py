"""``fer keeper``: run and stop the process that holds the weights."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fer.cli.flags import RuntimeDir
from fer.cli.output import JsonFlag, emit, guarded
from fer.cli.settings import settings

app = typer.Typer(no_args_is_help=True, help="The small process that holds weights while engines come and go.")


@app.command("run")
def run(runtime_dir: RuntimeDir = None) -> None:
    """Run a keeper in the foreground until it is stopped.

    Under systemd (unit of type notify with FileDescriptorStoreMax) its descriptors outlive it there; elsewhere it runs
    under a minimal parent of its own that does the same.
    """
    arguments = [sys.executable, "-m", "fer.weights.keeper"]
    if runtime_dir is not None:
        arguments += ["--runtime-dir", str(runtime_dir)]
    # Replaced, not started: this interpreter has loaded the command line, which the keeper must not carry around.
    os.execv(sys.executable, arguments)


@app.command("stop")
def stop(
    force: Annotated[bool, typer.Option("--force", help="Stop even while engines use or load weights.")] = False,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Stop the keeper and free all that it holds. Refused while engines use or load weights, unless forced.

    Engines that are running go on either way; after a forced stop their memory is freed when they end.
    """
    with guarded(json):
        from fer.weights.client import KeeperClient

        options = settings(runtime_dir=runtime_dir)
        with KeeperClient.connect(options.runtime_dir, label="fer keeper stop") as client:
            client.stop(force=force)
        emit(json, {"stopped": True}, lambda console: console.print("The keeper has stopped."))
