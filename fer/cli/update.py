"""``fer update``: another model in place of the one that a running ``fer serve`` serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fer.cli.flags import Admin, RuntimeDir
from fer.cli.output import JsonFlag, emit, escape, guarded
from fer.cli.settings import settings

if TYPE_CHECKING:
    from rich.console import Console

LIMIT_S = 6 * 3600.0
"""Seconds for the whole of it: a large model is read from a slow disk as often as there are engines."""


def update(
    model: Annotated[Path, typer.Argument(help="The folder of the model to serve from now on.", show_default=False)],
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Leave the old weights with the keeper: the way back is short then.")
    ] = False,
    cut: Annotated[
        bool,
        typer.Option(
            "--cut",
            help="Let streamed answers end with an error that take longer than the service's --drain-s; without it the "
            "update is refused then.",
        ),
    ] = False,
    admin: Admin = None,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Have a running `fer serve` serve another model, with no failed request.

    An engine of the new model starts beside the old ones. When it is ready, the active engine ends its answers and the
    new one takes over; then the others move, one by one, and the old weights are evicted. If anything fails before the
    new engine's first token, the old model serves as before, and the error says why.
    """
    with guarded(json):
        from fer.standby.admin import ask, find, only

        options = settings(runtime_dir=runtime_dir)
        order = {"model": str(model.absolute()), "keep_old": keep_old, "cut": cut}
        answer = ask(admin or only(find(options.runtime_dir)), "POST", "/admin/update", order, limit_s=LIMIT_S)
        emit(json, answer, lambda console: _print(console, answer))


def _print(console: Console, done: dict[str, Any]) -> None:
    console.print(f"active: {escape(str(done['active']))}, version {done['version']} of {escape(done['folder'])}")
    console.print(", ".join(f"{step} {seconds:.3f} s" for step, seconds in done["seconds"].items()))
    for edition in done["evicted"]:
        console.print(f"evicted: {edition[:12]}")
    for edition, why in done["kept"].items():
        console.print(f"kept: {edition[:12]}: {escape(why)}")
    if done["waiting"]:
        console.print(f"not up yet: {', '.join(done['waiting'])}; see /status")
