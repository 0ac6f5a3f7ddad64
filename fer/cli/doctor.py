"""``fer doctor``: is this machine ready, and if not, what is to be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fer.cli.exit_codes import CHECK_FAILED
from fer.cli.flags import RuntimeDir
from fer.cli.output import JsonFlag, emit, escape, guarded, table

if TYPE_CHECKING:
    from rich.console import Console

    from fer.diagnosis import Finding

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(runtime_dir: RuntimeDir = None, json: JsonFlag = False) -> None:
    """Check what keeping weights needs of this machine, and say what to do where something is missing."""
    with guarded(json):
        from fer.diagnosis import examine

        findings = examine(runtime_dir)
        worst = max((finding.level for finding in findings), key=list(_COLOURS).index)
        data = {"worst": worst, "checks": [finding.to_json() for finding in findings]}
        emit(json, data, lambda console: _print(console, findings))
        if worst == "fail":
            raise typer.Exit(CHECK_FAILED)


def _print(console: Console, findings: list[Finding]) -> None:
    rows = table("", "check", "found")
    for finding in findings:
        colour = _COLOURS[finding.level]
        text = escape(finding.found)
        if finding.fix:
            text += f"\n[bold]do:[/] {escape(finding.fix)}"
        rows.add_row(f"[{colour}]{finding.level}[/]", finding.check, text)
    console.print(rows)
    counts = ", ".join(f"{sum(f.level == level for f in findings)} {level}" for level in _COLOURS)
    console.print(f"\n{counts}")
