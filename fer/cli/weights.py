"""``fer load | status | explain | verify | evict``: what is kept, why a start would miss, and room for another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fer.cli.exit_codes import MISS
from fer.cli.flags import Device, Html, Model, RuntimeDir, SlabBytes, Trace, Transport, Verify
from fer.cli.output import JsonFlag, ago, emit, escape, guarded, holder, place, size, table
from fer.cli.settings import settings

if TYPE_CHECKING:
    from rich.console import Console

    from fer.weights.client import KeeperClient

Edition = Annotated[str | None, typer.Argument(help="An edition, or the beginning of its name.", show_default=False)]
Gpu = Annotated[str | None, typer.Option("--gpu", help="A GPU's UUID, or host.", show_default=False)]


def load(
    model: Model,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="torch's name of a dtype, or auto.")] = "auto",
    verify: Verify = None,
    transport: Transport = None,
    slab_bytes: SlabBytes = None,
    runtime_dir: RuntimeDir = None,
    html: Html = None,
    trace: Trace = None,
    json: JsonFlag = False,
) -> None:
    """Load a model and leave its weights with the keeper, ahead of the first engine.

    This process ends when the weights are kept. With the transport cuda-ipc it stays, since they live only as long as
    it does.
    """
    with guarded(json):
        from fer.cli.preload import preload

        options = settings(
            log="warning" if json else "info",
            verify=verify,
            transport=transport,
            slab_bytes=slab_bytes,
            runtime_dir=runtime_dir,
        )
        preload(model, options, device=device, dtype=dtype, html=html, trace=trace, as_json=json)


def status(runtime_dir: RuntimeDir = None, json: JsonFlag = False) -> None:
    """Show the keeper: what it holds, on which GPU, who uses it, and whether it would survive its own death."""
    with guarded(json):
        from fer.weights.client import KeeperClient

        options = settings(runtime_dir=runtime_dir)
        with KeeperClient.connect(options.runtime_dir, label="fer status") as client:
            found = client.status()
        emit(json, plain(found), lambda console: _print_status(console, found))


def _print_status(console: Console, found: Any) -> None:
    protection = found.protection
    if protection == "none":
        protection = "[bold red]none: its own death would lose what it holds[/]"
    console.print(f"Keeper {found.pid}, version {escape(found.version)}, protected by {protection}")
    if not found.editions:
        console.print("It holds no editions.")
    rows = table("edition", "model", "ranks", "gpu", "size", "slabs", "age", "used by", right=("size", "slabs"))
    for edition in found.editions:
        users = ", ".join(holder(user) for user in edition.holders)
        rows.add_row(
            edition.edition[:12],
            escape(Path(model_of(edition.fields)).name),
            escape(place(edition.rank)),
            edition.gpu,
            size(edition.bytes),
            str(edition.slabs),
            ago(edition.created),
            escape(users) or "nobody",
        )
    if found.editions:
        console.print(rows)
    for service in found.services:
        pids = ", ".join(str(process.pid) for process in service.processes)
        who = f"answered for by {pids}" if pids else "nobody answers for it just now"
        left = f"; {size(service.estate)} of memory are kept for the next" if service.estate else ""
        console.print(f"{escape(service.service)}: {who}{left}")


def explain(
    model: Model,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="torch's name of a dtype, or auto.")] = "auto",
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Say whether a start with this model would attach, and if not, which fields differ from what is kept."""
    with guarded(json):
        from fer.cli.explanation import explain as find

        options = settings(runtime_dir=runtime_dir)
        found = find(model, device=device, dtype=dtype, runtime_dir=options.runtime_dir)
        emit(json, found.to_json(), found.print)
        if not found.would_attach:
            raise typer.Exit(MISS)


def verify(
    edition: Edition = None,
    full: Annotated[bool, typer.Option("--full", help="Fail where tensors have no digests to compare.")] = False,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Compare every byte of kept editions (all of them, or one) with what was published."""
    with guarded(json):
        from fer.cli.verification import verify as check

        options = settings(log="warning" if json else "info", runtime_dir=runtime_dir)
        check(edition, full=full, runtime_dir=options.runtime_dir, as_json=json)


def evict(
    edition: Edition = None,
    gpu: Gpu = None,
    everything: Annotated[bool, typer.Option("--all", help="Every edition that nobody uses.")] = False,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Give up editions that nobody uses, and free their memory. Name one, a GPU, or --all."""
    with guarded(json):
        from fer.errors import UsageError
        from fer.weights.client import KeeperClient

        if chosen := sum((edition is not None, gpu is not None, everything)) - 1:
            what = "name what to evict" if chosen < 0 else "too much is named at once"
            raise UsageError(what, fix="Give exactly one of EDITION, --gpu and --all")
        options = settings(runtime_dir=runtime_dir)
        with KeeperClient.connect(options.runtime_dir, label="fer evict") as client:
            name = None if edition is None else full_name(client, edition)
            gone = client.evict(name, gpu=gpu)
            left = [] if name else client.status().editions
        used = [info for info in left if info.holders and gpu in (None, info.gpu)]

        def text(console: Console) -> None:
            for info in gone:
                console.print(f"Evicted {info.edition[:12]}: {size(info.bytes)} freed on {info.gpu}")
            if not gone:
                console.print("Nothing to evict: all that is kept is in use." if used else "Nothing to evict.")
            for info in used:
                users = escape(", ".join(holder(user) for user in info.holders))
                console.print(f"Kept {info.edition[:12]}, {size(info.bytes)} on {info.gpu}: used by {users}")

        emit(json, {"evicted": [plain(info) for info in gone], "in_use": [plain(info) for info in used]}, text)


def full_name(client: KeeperClient, beginning: str) -> str:
    """The edition whose name begins so.

    Raises:
        UsageError: none does, or more than one.
    """
    from fer.errors import UsageError

    names = [info.edition for info in client.status().editions]
    found = [name for name in names if name.startswith(beginning)]
    if beginning in found:
        return beginning
    if len(found) != 1:
        raise UsageError(
            f"{len(found) or 'no'} editions begin with {beginning!r}",
            fix="Give more of its name" if found else f"The keeper holds: {', '.join(names) or 'none'}",
        )
    return found[0]


def model_of(fields: bytes) -> str:
    """The model's name out of an edition's fingerprint, ``"?"`` where it cannot be read."""
    from fer.errors import FerError
    from fer.fingerprint import Fingerprint

    try:
        return str(Fingerprint.from_json(fields).group.get("model", "?"))
    except (FerError, ValueError):
        return "?"


def plain(thing: Any) -> Any:
    """A structure of the wire as plain data for JSON; fingerprints are decoded, other bytes are left out."""
    import json

    import msgspec

    if isinstance(thing, msgspec.Struct):
        # A reply's number belongs to the connection, not to its meaning.
        return {name: plain(getattr(thing, name)) for name in thing.__struct_fields__ if name != "seq"}
    if hasattr(thing, "__dataclass_fields__"):
        return {name: plain(getattr(thing, name)) for name in thing.__dataclass_fields__}
    if isinstance(thing, dict):
        return {str(key): plain(value) for key, value in thing.items()}
    if isinstance(thing, list | tuple | set | frozenset):
        return [plain(item) for item in thing]
    if isinstance(thing, bytes):
        try:
            return json.loads(thing)
        except ValueError:
            return f"{len(thing)} bytes"
    return thing
