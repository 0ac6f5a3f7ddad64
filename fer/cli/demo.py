"""``fer demo``: the main job, on a real model and with real deaths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fer.cli.flags import Device, Home, Trace
from fer.cli.output import JsonFlag, guarded
from fer.cli.settings import settings

QUESTION = "What is the capital of France?"


def demo(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="A Hugging Face model folder; by default SmolLM2-135M.", show_default=False),
    ] = None,
    device: Device = "auto",
    question: Annotated[str, typer.Option("--question", help="What the engine is asked.")] = QUESTION,
    html: Annotated[
        Path | None, typer.Option("--html", help="Where the waterfall goes.", show_default="in FER_HOME")
    ] = None,
    trace: Trace = None,
    home: Home = None,
    json: JsonFlag = False,
) -> None:
    """Start an engine, kill it, and bring it back from memory; then kill the keeper and do it again.

    Every start is a process of its own, every death a SIGKILL. The answers must agree token by token, else the command
    fails. A keeper that is already running is left alone: the demo has one of its own and stops it at the end.
    """
    with guarded(json):
        from fer.cli.demo_run import run

        options = settings(home=home)
        run(model, device=device, question=question, html=html, trace=trace, home=options.home, as_json=json)
