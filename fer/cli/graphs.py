"""``fer graphs inspect | verify | diff | prune``: archives of CUDA graphs, looked at without a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fer.cli.exit_codes import INTEGRITY
from fer.cli.flags import Home
from fer.cli.output import JsonFlag, ago, count, emit, emit_differences, escape, guarded, size

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(name="graphs", help="Look at archives of CUDA graphs; none of it needs a GPU.", no_args_is_help=True)

One = Annotated[Path | None, typer.Argument(help="An archive; all of them by default.", show_default=False)]
Left = Annotated[Path, typer.Argument(help="An archive.", show_default=False)]
Right = Annotated[Path, typer.Argument(help="Another one.", show_default=False)]


@app.command("inspect")
def inspect(archive: One = None, home: Home = None, json: JsonFlag = False) -> None:
    """Say what archives hold: graphs, nodes, binaries, what was refused and why, whether they are proven."""
    with guarded(json):
        described = [_described(path) for path in _chosen(archive, home)]

        def text(console: Console) -> None:
            for each in described:
                _print_archive(console, each)
            if not described:
                console.print("There are no archives.")

        emit(json, {"archives": described}, text)


@app.command("verify")
def verify(archive: One = None, home: Home = None, json: JsonFlag = False) -> None:
    """Read archives to the last byte and compare every checksum and digest."""
    with guarded(json):
        from fer.cudagraph import store

        found = {str(path): store.damage(path) for path in _chosen(archive, home)}

        def text(console: Console) -> None:
            for path, damaged in found.items():
                console.print(f"{escape(path)}: {'damaged in ' + ', '.join(damaged) if damaged else 'sound'}")
            if not found:
                console.print("There are no archives.")

        emit(json, {"archives": [{"path": path, "damaged": damaged} for path, damaged in found.items()]}, text)
        if any(found.values()):
            raise typer.Exit(INTEGRITY)


@app.command("diff")
def diff(left: Left, right: Right, json: JsonFlag = False) -> None:
    """Say where two archives differ, in a graph down to the first node and parameter."""
    with guarded(json):
        from fer.cudagraph import archive, compare

        sides = [archive.read(path, binaries=False) for path in (left, right)]
        found = compare.compare(*sides)
        emit_differences(json, found)


@app.command("prune")
def prune(
    everything: Annotated[bool, typer.Option("--all", help="Remove every archive.")] = False,
    days: Annotated[
        float | None,
        typer.Option("--older-than", help="Remove those older than so many days, too.", show_default=False),
    ] = None,
    home: Home = None,
    json: JsonFlag = False,
) -> None:
    """Remove archives that are damaged or whose proof failed."""
    with guarded(json):
        from fer.cudagraph import store

        gone = store.prune(home, everything=everything, older_than_s=None if days is None else days * 86400)

        def text(console: Console) -> None:
            for path in gone:
                console.print(f"Removed {escape(str(path))}")
            if not gone:
                console.print("Nothing to remove.")

        emit(json, {"removed": [str(path) for path in gone]}, text)


def _chosen(archive: Path | None, home: Path | None) -> list[Path]:
    from fer.cudagraph import store
    from fer.errors import UsageError

    if archive is None:
        return store.find(home)
    if not archive.is_file():
        raise UsageError(f"there is no archive {archive}", fix="See fer graphs inspect for all of them")
    return [archive]


def _described(path: Path) -> dict[str, Any]:
    from fer.cudagraph import archive as archives
    from fer.cudagraph import store
    from fer.errors import ArchiveError

    listed = store.look(path)
    data: dict[str, Any] = {"path": str(path), "bytes": listed.bytes, "trouble": listed.trouble}
    if listed.trouble:
        return data
    try:
        archive = archives.read(path)
    except ArchiveError as error:
        return {**data, "trouble": str(error)}
    tables = archive.tables
    return {
        **data,
        "proof": listed.proof,
        "why": listed.why,
        "quarantined": dict(listed.quarantined),
        "created": listed.facts.get("created", 0),
        "graphs": {graph.name: len(graph.nodes) for graph in tables.top()},
        "functions": len(tables.functions),
        "binaries": len(tables.images),
        "binary_bytes": sum(len(image.data) for image in tables.images),
        "contents": [{"name": c.name, "address": c.address, "bytes": len(c.data)} for c in archive.contents],
        "ranges": listed.facts.get("ranges", {}),
        "refused": listed.facts.get("refused", {}),
        "fingerprint": listed.facts.get("fingerprint", {}),
    }


def _print_archive(console: Console, each: dict[str, Any]) -> None:
    console.print(f"[bold]{escape(each['path'])}[/], {size(each['bytes'])}")
    if each["trouble"]:
        console.print(f"  cannot be used: {escape(each['trouble'])}")
        return
    nodes = sum(each["graphs"].values())
    console.print(
        f"  {count(len(each['graphs']), 'graph')} of {count(nodes, 'node')}, "
        f"{count(each['functions'], 'function')} in {each['binaries']} binaries ({size(each['binary_bytes'])}), "
        f"saved {ago(each['created'])} ago, {each['proof']}{': ' + escape(each['why']) if each['why'] else ''}"
    )
    for name, why in {**each["refused"], **each["quarantined"]}.items():
        console.print(f"  {escape(name)} is captured natively: {escape(why)}")
