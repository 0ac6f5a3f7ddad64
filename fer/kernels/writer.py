"""Writes an archive back after a start, in a process of its own: the engine serves already.

One writer at a time; a second one waits, looks at what the first has written, and adds what is missing. What is kept
already stays, also where this start's caches lack it: another machine or rank may have written it. Only complete
groups go in. A writer that is killed leaves the archive as it was.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fer.errors import FerError

WAIT_S: Final = 300.0
log = logging.getLogger("fer")


@dataclass(frozen=True)
class Request:
    """What the process is told, as JSON on its standard input.

    Attributes:
        root: Triton's cache.
        out: the archive.
        keys: entries that the start looked up.
        arch: architecture of the archive's kernels; others are left out.
        doubt: the archive that is there could not be used; it is read to its end before anything relies on it.
        others: folders of the other caches by component; of these, entries written since ``since`` go in.
        since: seconds since the epoch.
    """

    root: str
    out: str
    keys: list[str]
    arch: int
    doubt: bool = False
    others: dict[str, str] = field(default_factory=dict)
    since: float = 0.0


def begin(request: Request) -> threading.Thread:
    """Start the writer. It outlives this process, since what was compiled is worth most after a crash."""
    child = subprocess.Popen(
        [sys.executable, "-m", "fer.kernels.writer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as told:  # a child that died says so by its code
        told.write(json.dumps(asdict(request)))
    child.stdin = None
    thread = threading.Thread(target=_attend, args=(child,), name="fer-kernels-writer", daemon=True)
    thread.start()
    return thread


def _attend(child: subprocess.Popen[str]) -> None:
    """Wait for it, and log what it says."""
    out, _ = child.communicate()
    try:
        answer: dict[str, Any] = json.loads(out)
    except ValueError:
        answer = {"error": f"it ended with code {child.returncode}"}
    if "error" in answer:
        log.warning("compiled kernels were not written back: %s", answer["error"])
    elif answer["written"]:
        log.info("kernels written back: %d entries, %d new", answer["entries"], answer["written"])


def write(request: Request) -> dict[str, Any]:
    """Add to the archive what the start looked up and it lacks.

    Returns:
        ``written``, the number of new entries, and ``entries`` of the archive.

    Raises:
        FerError: it cannot be written.
    """
    from filelock import FileLock

    from fer.kernels import pack, unpack
    from fer.kernels.components import triton_helpers

    out, root = Path(request.out), Path(request.root)
    with FileLock(f"{out}.lock", timeout=WAIT_S, mode=0o600):
        _tidy(out)
        kept: set[tuple[str, str]] = set()
        known: set[tuple[str, str, Any]] = set()
        with contextlib.suppress(FerError):  # one that cannot even be begun is replaced in any case
            entries = (unpack.verify(out) if request.doubt else unpack.peek(out)[0]).entries
            kept = {(each.component, each.path) for each in entries}
            known = {(each.component, each.path, each.files) for each in entries}
        wanted = kept | {("triton", path) for path in {*request.keys, *triton_helpers(root)}}
        others = [
            (name, path) for name, folder in request.others.items() for path in fresh(name, Path(folder), request.since)
        ]
        wanted |= set(others)
        if wanted <= kept and not others:
            return {"written": 0, "entries": len(kept)}
        roots = {"triton": root, **{name: Path(folder) for name, folder in request.others.items()}}
        choice = pack.Choice(archs=(request.arch,), wanted=lambda component, path: (component, path) in wanted)
        keep = out if kept else None
        planned = pack.pack(roots, out, choice, keep=keep, dry_run=True).manifest.entries
        if {(each.component, each.path, each.files) for each in planned} <= known:
            return {"written": 0, "entries": len(kept)}
        keep = keep if _is_sound(out) else None
        packed = pack.pack(roots, out, choice, keep=keep).manifest.entries
        written = {(each.component, each.path, each.files) for each in packed}
        return {"written": len(written - known), "entries": len(written)}


def _is_sound(archive: Path) -> bool:
    from fer.kernels import unpack

    try:
        unpack.verify(archive)
    except FerError as error:
        log.warning("an archive is replaced by what is in the caches: %s", error)
        return False
    return True


def _tidy(out: Path) -> None:
    """What killed writers of this archive left; the lock says that none is at work."""
    for left in out.parent.glob(f".{out.name}.*"):
        with contextlib.suppress(OSError):
            left.unlink()


def fresh(name: str, root: Path, since: float) -> set[str]:
    """Complete entries of one of the other caches that were written since a time."""
    from fer.kernels.registry import REGISTRY

    found = set()
    for each in REGISTRY[name].complete(root, lambda path: True):
        with contextlib.suppress(OSError):
            if max((root / each.path / file).stat().st_mtime for file in each.files) >= since:
                found.add(each.path)
    return found


def main() -> int:
    """Entry point of the process."""
    with contextlib.suppress(OSError):
        os.nice(10)
    try:
        answer = write(Request(**json.loads(sys.stdin.read())))
    except Exception as error:  # the one who waits is told, whatever it is
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
