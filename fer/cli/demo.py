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
    failover: Annotated[
        bool,
        typer.Option(
            "--failover", help="Kill the engine under a client's answer: with a standby, a launcher, neither."
        ),
    ] = False,
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
        options = settings(home=home)
        if failover:
            _failover(model, device, html, trace, options.home, json)
            return
        from fer.cli.demo_run import run

        run(model, device=device, question=question, html=html, trace=trace, home=options.home, as_json=json)


def _failover(
    model: Path | None, device: str, html: Path | None, trace: Path | None, home: Path | None, as_json: bool
) -> None:
    from fer import paths
    from fer.cli.demo_failover import run
    from fer.cli.demo_run import demonstration_model
    from fer.cli.serve import need
    from fer.errors import OptionError

    if trace is not None:
        raise OptionError("--trace is of starts", why="--failover shows a client's tokens", fix="Use --html or --json")
    need("starlette", "uvicorn", "prometheus_client")
    home = home or paths.home()
    run(model or demonstration_model(home), home=home, device=device, html=html, as_json=as_json)
