"""``fer batch``: requests that can wait, and the preemptible engine that answers them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fer.cli.flags import Admin, RuntimeDir
from fer.cli.output import JsonFlag, count, emit, err, escape, guarded
from fer.cli.settings import settings

if TYPE_CHECKING:
    from fer.standby.batch_run import Progress

app = typer.Typer(no_args_is_help=True, help="Requests that can wait, and the preemptible engine that answers them.")

UNFINISHED = 1


@app.command()
def run(
    requests: Annotated[Path, typer.Argument(help="Requests, a line of JSON each, in OpenAI's batch form.")],
    output: Annotated[
        Path, typer.Option("--output", help="Where results go, a line each; one that is there is gone on with.")
    ],
    url: Annotated[str, typer.Option("--url", help="Address of the service.")] = "http://127.0.0.1:8000",
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests at once.")] = 8,
    tier: Annotated[
        str, typer.Option("--tier", metavar="flex|default", help="The service_tier of requests that name none.")
    ] = "flex",
    patience_s: Annotated[
        float,
        typer.Option("--patience-s", help="Seconds for which one request is tried while the service cannot answer."),
    ] = 3600.0,
    json: JsonFlag = False,
) -> None:
    """Send the requests of a file, and write each result as it comes.

    Killed and started again it goes on where it was: requests that have a result are not sent again. A line that is no
    request gets an error in the output. The exit code is 0 when every line has an answer, 1 when some have not.
    """
    with guarded(json):
        from fer.errors import OptionError
        from fer.standby.batch_run import Runner

        if tier not in ("flex", "default"):
            raise OptionError(f"--tier {tier!r} is not known", fix="Use flex or default")
        runner = Runner(url, concurrency=concurrency, tier=tier, patience_s=patience_s)
        progress = runner.run(requests, output)
        for text in progress.complaints:
            err().print(escape(text), soft_wrap=True)
        emit(json, progress.to_json(), lambda console: console.print(_summary(progress)))
        if not progress.complete:
            raise typer.Exit(UNFINISHED)


def _summary(progress: Progress) -> str:
    parts = [f"{count(progress.answered, 'answer')} written"]
    parts += [f"{progress.before} there before"] if progress.before else []
    parts += [f"{count(progress.refused, 'request')} refused"] if progress.refused else []
    parts += [f"{count(progress.bad, 'line')} not understood"] if progress.bad else []
    parts += [f"{progress.left} left: run it again"] if progress.left else []
    return ", ".join(parts)


def _order(what: str, admin: Path | None, runtime_dir: Path | None) -> dict[str, Any]:
    from fer.standby.admin import ask, find, only

    options = settings(runtime_dir=runtime_dir)
    return ask(admin or only(find(options.runtime_dir)), "POST", f"/admin/batch/{what}")


@app.command()
def pause(admin: Admin = None, runtime_dir: RuntimeDir = None, json: JsonFlag = False) -> None:
    """End the batch engine of a running `fer serve`, and start none until `fer batch resume`. Requests wait."""
    with guarded(json):
        answer = _order("pause", admin, runtime_dir)
        emit(json, answer, lambda console: console.print(f"paused; {count(answer['waiting'], 'request')} waiting"))


@app.command()
def resume(admin: Admin = None, runtime_dir: RuntimeDir = None, json: JsonFlag = False) -> None:
    """Start the batch engine again, as soon as an online engine is active."""
    with guarded(json):
        answer = _order("resume", admin, runtime_dir)
        emit(json, answer, lambda console: console.print(f"resumed; {count(answer['waiting'], 'request')} waiting"))
