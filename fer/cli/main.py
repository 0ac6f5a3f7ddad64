"""``fer``: the command line. Commands import what they need when they run, so that ``fer --help`` is quick."""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer

from fer import __version__
from fer.cli import batch, demo, doctor, graphs, keeper, kernels, launcher, run, serve, switch, update, weights
from fer.cli.exit_codes import TABLE
from fer.cli.output import StdoutLost, print_error, watch_stdout
from fer.errors import FerError, UsageError

EPILOG = "\n\n".join(["Exit codes:", *(f"{row.code}: {row.meaning}" for row in TABLE)])

app = typer.Typer(
    name="fer",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback in frames hides its own end, and its locals may hold secrets
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
    rich_markup_mode="rich",
)
app.command("demo")(demo.demo)
app.add_typer(keeper.app, name="keeper")
app.add_typer(graphs.app, name="graphs")
app.add_typer(kernels.app, name="kernels")
app.command("load")(weights.load)
app.command("status")(weights.status)
app.command("explain")(weights.explain)
app.command("verify")(weights.verify)
app.command("evict")(weights.evict)
app.command("serve")(serve.serve)
app.command("switch")(switch.switch)
app.command("update")(update.update)
app.add_typer(batch.app, name="batch")
app.command("run", context_settings=run.CONTEXT)(run.run)
app.add_typer(launcher.app, name="launcher")
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fer {__version__}")
        raise typer.Exit


@app.callback()
def _fer(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Fast Engine Recovery: brings an LLM inference engine back with what an earlier start already made."""


def commands() -> list[str]:
    """Every command as it is typed, such as ``"keeper run"``."""
    names = []
    for group in app.registered_groups:
        names += [f"{group.name} {_name(command)}" for command in group.typer_instance.registered_commands]  # type: ignore[union-attr]
    return sorted([*names, *map(_name, app.registered_commands)])


def _name(command: Any) -> str:
    """As it is typed: the function's, where it was given none."""
    return str(command.name or command.callback.__name__.replace("_", "-"))


def main() -> None:
    """Entry point: runs the command that the arguments name and exits with one of the codes in ``exit_codes``."""
    watch_stdout()
    try:
        try:
            _run()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # what cannot be written is to be known here, not while the interpreter ends
    except StdoutLost as error:
        if error.errno != errno.EPIPE:  # a reader that has seen enough is no mistake to speak of
            print_error(FerError("the result cannot be written to stdout", why=error.strerror or ""), as_json=False)
        sys.exit(1)


def _run() -> None:
    if "--json" not in sys.argv[1:]:
        app(prog_name="fer")
        return
    # A program reads this: mistakes in the arguments are an object as well.
    try:
        code: Any = app(prog_name="fer", standalone_mode=False)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's and click's usage errors, whichever of them is in use
            raise
        print_error(UsageError(error.format_message(), fix="See fer --help"), as_json=True)
        code = 2
    sys.exit(code if isinstance(code, int) else 0)
