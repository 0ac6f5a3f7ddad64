"""``fer launcher``: run, look at and stop the process that engines are forked from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fer.cli.flags import RuntimeDir
from fer.cli.output import JsonFlag, ago, count, emit, escape, guarded, table
from fer.cli.settings import settings

if TYPE_CHECKING:
    from rich.console import Console

    from fer.standby.launcher_wire import Status

app = typer.Typer(no_args_is_help=True, help="A process that has imported what engines import, and forks them.")

Name = Annotated[str, typer.Option("--name", help="Which launcher, where there are several.")]


@app.command("run")
def run(
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import this; may be repeated. By default torch, Transformers and what FER's own engine needs.",
            show_default=False,
        ),
    ] = None,
    preload: Annotated[
        list[Path] | None,
        typer.Option(
            "--preload",
            metavar="FOLDER",
            help="Hold tokenizer and configuration of this model folder ready; may be repeated.",
            show_default=False,
        ),
    ] = None,
    name: Name = "default",
    runtime_dir: RuntimeDir = None,
) -> None:
    """Run a launcher in the foreground until it is stopped; engines that it has forked go on after that.

    `fer run -- CMD` and `fer serve` find it by its name. It proves itself fit before it serves, and is replaced by a
    fresh one when packages, code or the environment have changed.
    """
    arguments = [sys.executable, "-m", "fer.standby.launcher", "--name", name]
    if runtime_dir is not None:
        arguments += ["--runtime-dir", str(runtime_dir)]
    arguments += [part for module in modules or () for part in ("--import", module)]
    arguments += [part for folder in preload or () for part in ("--preload", str(folder))]
    sys.stdout.flush()
    # Replaced, not started: this interpreter has loaded the command line, which engines must not carry around.
    os.execv(sys.executable, arguments)


@app.command("status")
def status(name: Name = "default", runtime_dir: RuntimeDir = None, json: JsonFlag = False) -> None:
    """What a launcher has imported, whether it is fit, and the engines that it has forked."""
    with guarded(json):
        found = _ask(name, runtime_dir, stop=False)
        emit(json, _data(found), lambda console: _print(console, found))


@app.command("stop")
def stop(name: Name = "default", runtime_dir: RuntimeDir = None, json: JsonFlag = False) -> None:
    """Stop a launcher. Engines that it has forked go on."""
    with guarded(json):
        found = _ask(name, runtime_dir, stop=True)

        def text(console: Console) -> None:
            left = f"; {count(len(found.engines), 'engine')} it has forked go on" if found.engines else ""
            console.print(f"The launcher {escape(found.name)} has stopped{left}.")

        emit(json, {"stopped": True, "engines": [engine.pid for engine in found.engines]}, text)


def _ask(name: str, runtime_dir: Path | None, *, stop: bool) -> Status:
    from fer.standby.launcher_client import ask

    return ask(name, settings(runtime_dir=runtime_dir).runtime_dir, stop=stop)


def _data(found: Status) -> dict[str, object]:
    import msgspec

    return {key: value for key, value in msgspec.to_builtins(found).items() if key != "type"}


def _print(console: Console, found: Status) -> None:
    console.print(f"launcher {escape(found.name)}, process {found.pid}: [bold]{found.state}[/] for {ago(found.since)}")
    if found.why:
        console.print(f"  spoiled: {escape(found.why)}")
    console.print(f"  imported: {escape(', '.join(found.imported) or 'nothing')} ({count(found.modules, 'module')})")
    for folder in found.warm:
        console.print(f"  held ready: {escape(folder)}")
    console.print(f"  forked {count(found.forked, 'engine')}, refused {count(found.refused, 'request')}")
    if found.last_refusal:
        console.print(f"  last refusal: {escape(found.last_refusal)}")
    if found.fresh_why:
        console.print(f"  template {found.generation}; the one before was given up: {escape(found.fresh_why)}")
    if found.engines:
        rows = table("process", "since", "command", right=("process",))
        for engine in found.engines:
            rows.add_row(str(engine.pid), ago(engine.since), escape(engine.command))
        console.print(rows)
