"""What ``fer load`` does: a cold load that leaves its weights with the keeper, then the end of the process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fer.cli.output import emit, err, escape, save, size
from fer.errors import FerError, PublishRefused

if TYPE_CHECKING:
    from rich.console import Console

    from fer.engines.transformers import TransformersEngine
    from fer.options import Options
    from fer.report import Report

_POLL_S = 0.2


def preload(
    model: Path, options: Options, *, device: str, dtype: str, html: Path | None, trace: Path | None, as_json: bool
) -> None:
    """Load, publish, wait for the digests, and print what became of it.

    Args:
        html, trace: files for the report as a page and as a Chrome trace.

    Raises:
        PublishRefused: the weights were loaded but could not be kept.
    """
    from fer.engines.devices import resolve
    from fer.engines.transformers import TransformersEngine
    from fer.orchestrator import preload as run

    # These settings may be there for engines; loading ahead makes sense with these values only.
    options = options.replace(on_miss="load", weights=True, mode="daemon" if options.mode == "off" else None)
    engine = TransformersEngine(model, device=resolve(device), dtype=dtype)
    with _progress(engine, shown=not as_json and sys.stderr.isatty()):
        report = run(engine, options)
        stage = report.stages["weights"]
        if stage.path != "attached" and not stage.details.get("published"):
            raise PublishRefused("the weights were loaded but are not kept", why=stage.why, fix="See fer doctor")
        _finish_digests()
    if html is not None:
        save(html, report.to_html())
    if trace is not None:
        save(trace, json.dumps(report.to_chrome_trace()))
    _print(report, as_json)
    if stage.details.get("transport") == "cuda-ipc" and stage.path != "attached":
        _export_until_ended(engine, stage.details["edition"], options.runtime_dir)


def _finish_digests() -> None:
    """Wait for the digests that an engine leaves to the background: this process has nothing else to do."""
    from fer.weights.background import Digests

    for thread in threading.enumerate():
        if isinstance(thread, Digests):
            thread.join()


def _print(report: Report, as_json: bool) -> None:
    stage = report.stages["weights"]

    def text(console: Console) -> None:
        verb = "Already kept" if stage.path == "attached" else "Kept"
        place = f"edition {stage.details['edition'][:12]}, {size(stage.details['bytes'])}"
        console.print(f"{verb}: {place}, {escape(str(stage.details.get('transport', '')))}, in {report.total_s:.1f} s")

    emit(
        as_json, {"weights": {"path": stage.path, "why": stage.why, **stage.details}, "report": report.to_json()}, text
    )


def _export_until_ended(engine: TransformersEngine, edition: str, runtime_dir: Path | None) -> None:
    """Legacy IPC memory belongs to this process: stay until told to end, then take the edition back."""
    from fer.weights.client import KeeperClient

    err().print("Legacy IPC: the weights are there as long as this process. End it with Ctrl-C or SIGTERM.")
    # Blocked and then waited for, so that none can slip in between a check and the wait.
    ends = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    signal.sigwait(ends)
    with contextlib.suppress(FerError), KeeperClient.connect(runtime_dir, label="fer load") as client:
        client.report_lost(edition, f"its exporter, process {os.getpid()}, was ended")
    del engine  # alive until here, and with it the memory


@contextlib.contextmanager
def _progress(engine: TransformersEngine, *, shown: bool) -> Iterator[None]:
    """A bar of the memory taken so far against the weights' size.

    Loading is the engine's own code and reports nothing, but weights that have been read take memory.
    """
    if not shown:
        yield
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True) as bar:
        total = engine.estimated_bytes()
        task = bar.add_task(escape(engine.folder.name), total=total or None)
        used = _used_memory(engine.device)
        ended = threading.Event()

        def watch() -> None:
            before = used()
            while not ended.wait(_POLL_S):
                before = min(before, used())
                taken = used() - before
                # Imports take memory too, and publishing some more for a moment.
                bar.update(task, completed=min(taken, total) if total else taken)

        watcher = threading.Thread(target=watch, name="fer-progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _used_memory(device: str) -> Callable[[], int]:
    """A function that gives the bytes in use where the weights go."""
    if device == "cpu":
        page = os.sysconf("SC_PAGESIZE")
        return lambda: int(Path("/proc/self/statm").read_text().split()[1]) * page
    import torch

    def used() -> int:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it without types
            return 0
        free, total = torch.cuda.mem_get_info(device)
        return total - free

    return used
