"""How commands speak: tables and errors for people, one JSON object for programs.

Results go to stdout, everything else (progress, log lines, errors in text) to stderr. With ``--json`` stdout holds
exactly one object; an error is ``{"error": {"kind", "what", "why", "fix", "fields"}}`` there.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fer.cli.exit_codes import MISS, code_of
from fer.errors import FerError, UsageError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


def out() -> Console:
    """Stdout. Made on every call, since tests and pipes replace it; rich itself honours NO_COLOR."""
    return Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def err() -> Console:
    """Stderr."""
    return Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())


def emit(as_json: bool, data: dict[str, Any], text: Callable[[Console], None]) -> None:
    """Print a result: ``data`` as JSON, or what ``text`` prints."""
    if as_json:
        print(json.dumps(data, indent=2, default=str), flush=True)
    else:
        text(out())


def print_error(error: BaseException, as_json: bool) -> None:
    """Print an error the way the command speaks."""
    if isinstance(error, FerError):
        described = error.to_dict()
    else:
        described = {"kind": type(error).__name__, "what": str(error) or type(error).__name__, "why": "", "fix": ""}
    if as_json:
        print(json.dumps({"error": described}, indent=2, default=str), flush=True)
        return
    console = err()
    console.print(f"[bold red]error:[/] {escape(described['what'])}", soft_wrap=True)
    for label in ("why", "fix"):
        if described[label]:
            console.print(f"  [bold]{label}:[/] {escape(described[label])}", soft_wrap=True)
    for user in described.get("fields", {}).get("holders") or ():
        console.print(f"  [bold]holder:[/] {escape(holder(user))}", soft_wrap=True)


def holder(user: Any) -> str:
    """A connected process for people, given as the keeper, an error's fields or a text describe it."""
    if isinstance(user, str):
        return user
    pid, label = (user.get("pid"), user.get("label")) if isinstance(user, dict) else (user.pid, user.label)
    return f"{label or 'process'} ({pid or 'in another PID namespace'})"


class StdoutLost(OSError):
    """What was printed could not be written, as where a disk is full or a reader has gone."""


class Stdout(io.TextIOWrapper):
    """Stdout that tells its own failures from those of other files; afterwards it takes everything and drops it."""

    def write(self, text: str, /) -> int:
        with self._named():
            return super().write(text)

    def flush(self) -> None:
        with self._named():
            super().flush()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is left in the buffer would fail again while the interpreter ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise StdoutLost(error.errno, error.strerror) from error


def watch_stdout() -> None:
    """From now on a failure to print is a :class:`StdoutLost`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        old = sys.stdout
        old.flush()
        # Not old.buffer: two owners of one buffer would close it twice.
        buffer: Any = open(old.fileno(), "wb", buffering=0 if old.write_through else -1, closefd=False)  # noqa: SIM115 - lives on
        sys.stdout = Stdout(
            buffer,
            old.encoding,
            old.errors,
            line_buffering=old.line_buffering,
            write_through=old.write_through,
        )


@contextlib.contextmanager
def guarded(as_json: bool = False) -> Iterator[None]:
    """Around the body of every command: FER's errors are printed and become exit codes.

    Other exceptions are bugs: they keep their traceback (on stderr, so that ``--json`` stays readable).
    """
    try:
        yield
    except FerError as error:
        print_error(error, as_json)
        raise typer.Exit(code_of(error)) from None
    except StdoutLost:
        raise  # fer.cli.main says so
    except Exception as error:
        if not as_json or type(error).__module__.startswith(("typer", "click")):
            raise
        traceback.print_exc()
        print_error(error, as_json)
        raise typer.Exit(code_of(error)) from None


def save(path: Path, text: str) -> None:
    """Write what a flag asked for to a file, and make the folders above it.

    Raises:
        UsageError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written", why=error.strerror or str(error)) from error


def escape(text: str) -> str:
    """Text with rich's markup switched off."""
    from rich.markup import escape as rich_escape

    return rich_escape(text)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the house style; the columns named in ``right`` hold figures."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def emit_differences(as_json: bool, found: Sequence[Any]) -> None:
    """Where two archives differ (``what``, ``left``, ``right`` of each). Raises typer.Exit with MISS if they do."""

    def text(console: Console) -> None:
        rows = table("what", "left", "right")
        for each in found:
            rows.add_row(escape(each.what), escape(each.left), escape(each.right))
        console.print(rows if found else "They are equal.")

    emit(as_json, {"differences": [vars(each) for each in found]}, text)
    if found:
        raise typer.Exit(MISS)


def size(count: int | None) -> str:
    """Bytes for people: ``"1.5 GiB"``; ``"?"`` where unknown."""
    if count is None:
        return "?"
    amount, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """``"1 edition"``, ``"2 editions"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def place(rank: str) -> str:
    """A rank's coordinates for people: only groups of more than one, ``"single"`` where there are none."""
    return ",".join(part for part in rank.split(",") if not part.endswith("/1")) or "single"


def ago(created: float) -> str:
    """Time since a moment (seconds since the epoch) for people: ``"3 min"``."""
    seconds = max(0.0, time.time() - created)
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
