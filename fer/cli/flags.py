"""Flags of commands, derived from the table of settings so that name, help and default cannot disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fer.options import Options


def setting(name: str) -> Any:
    """The flag of one of the settings of :class:`fer.options.Options`; its value is checked when options are loaded."""
    (found,) = (s for s in Options.settings() if s.name == name)
    default = "" if found.default is None else f" Default: {found.default}."
    doc = found.doc[0].upper() + found.doc[1:]
    return typer.Option(
        found.flag,
        help=f"{doc}.{default} Variable: {found.variable}.",
        metavar="|".join(found.choices) or None,
        show_default=False,
    )


RuntimeDir = Annotated[Path | None, setting("runtime_dir")]
Home = Annotated[Path | None, setting("home")]
Verify = Annotated[str | None, setting("verify")]
Transport = Annotated[str | None, setting("transport")]
Mode = Annotated[str | None, setting("mode")]
SlabBytes = Annotated[str | None, setting("slab_bytes")]

Admin = Annotated[
    Path | None,
    typer.Option("--admin", help="Admin socket of the service; by default the only one there is.", show_default=False),
]

Html = Annotated[
    Path | None, typer.Option("--html", help="Write the waterfall, an HTML page, here.", show_default=False)
]
Trace = Annotated[
    Path | None,
    typer.Option("--trace", help="Write a trace for chrome://tracing or Perfetto here.", show_default=False),
]

Model = Annotated[Path, typer.Option("--model", help="A Hugging Face model folder.", show_default=False)]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N, or auto (a GPU where there is one).")]
