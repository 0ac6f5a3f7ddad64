"""What ``fer verify`` does: reads every byte of kept editions and compares it with what was published."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fer.cli.exit_codes import INTEGRITY
from fer.cli.output import emit, err, escape, size
from fer.errors import FerError, IntegrityError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fer.memory.base import Backend
    from fer.weights.client import EditionInfo, KeeperClient


def verify(edition: str | None, *, full: bool, runtime_dir: Path | None, as_json: bool) -> None:
    """Verify one edition or all, print one line each.

    Args:
        full: compare the sha256 of every tensor as well.

    Raises:
        IntegrityError: an edition differs; all were verified before this is raised.
    """
    from fer.cli.weights import full_name
    from fer.weights.client import KeeperClient

    with KeeperClient.connect(runtime_dir, label="fer verify") as client:
        name = None if edition is None else full_name(client, edition)
        chosen = [info for info in client.status().editions if name in (None, info.edition)]
        results = [_verify_one(client, info, full, shown=not as_json) for info in chosen]

    def text(console: Console) -> None:
        for result in results:
            good = "[green]intact[/]" if result["intact"] else "[bold red]NOT INTACT[/]"
            console.print(f"{result['edition'][:12]}  {size(result['bytes'])}  {good}  {escape(result['found'])}")
        if not results:
            console.print("The keeper holds no editions.")

    emit(as_json, {"editions": results, "intact": all(result["intact"] for result in results)}, text)
    broken = [result["edition"] for result in results if not result["intact"]]
    if broken and as_json:  # stdout holds its one object already
        raise typer.Exit(INTEGRITY)
    if broken:
        raise IntegrityError(
            f"{len(broken)} of {len(results)} editions are not intact", fix=f"fer evict {broken[0][:12]}"
        )


def _verify_one(client: KeeperClient, info: EditionInfo, full: bool, *, shown: bool) -> dict[str, Any]:
    try:
        with _progress(f"reading {info.edition[:12]}", shown):
            found = _read(client, info, full)
        return {"edition": info.edition, "bytes": info.bytes, "intact": True, "found": found}
    except UsageError:
        raise
    except FerError as error:
        return {"edition": info.edition, "bytes": info.bytes, "intact": False, "found": str(error)}
    finally:
        client.release(info.edition)


def _read(client: KeeperClient, info: EditionInfo, full: bool) -> str:
    """What was compared.

    Raises:
        IntegrityError, SlabLost: something differs or is gone.
        UsageError: the edition is on a GPU that this process does not see.
    """
    from fer.weights import attach, manifest

    with client.lease(info.edition) as leased, ExitStack() as undo:
        record = manifest.decode(leased.manifest)
        backends = _backends(info.gpu, {slab.kind for slab in record.slabs})
        mappings = attach.map_slabs(record, leased.slabs, backends)
        for mapping in mappings:
            undo.callback(mapping.close)
        found = attach.Check(record, mappings, backends, "full").finish()
        if leased.digests is not None:
            # The views are gone before the mappings are closed under them.
            count = attach.compare_digests(attach.views(record, mappings, backends), leased.digests)
            return f"{found} and {count} tensors' digests"
    if full:
        raise IntegrityError("its tensors have no digests yet", fix="Wait until the engine that published it made them")
    return f"{found}; its tensors have no digests yet"


def _backends(gpu: str, kinds: set[str]) -> dict[str, Backend]:
    """The memory of an edition's GPU, and host memory, by slab kind."""
    from fer.memory import gpus
    from fer.memory.base import HOST
    from fer.memory.open import open_backend

    host = open_backend("cpu")
    if gpu == HOST:
        return {host.kind: host}
    uuids = gpus.visible(gpus.inventory(), os.environ).uuids
    if gpu not in uuids:
        raise UsageError(
            f"the edition is on {gpu}, which this process does not see",
            why=f"it sees {', '.join(uuids) or 'no GPU'}",
            fix="Clear CUDA_VISIBLE_DEVICES, or name an edition that is elsewhere",
        )
    transport = "cuda-ipc" if "cuda-ipc" in kinds else "vmm"
    device = open_backend(f"cuda:{uuids.index(gpu)}", transport=transport)
    return {host.kind: host, device.kind: device}


@contextmanager
def _progress(what: str, shown: bool) -> Iterator[None]:
    if not (shown and sys.stderr.isatty()):
        yield
        return
    with err().status(what):
        yield
