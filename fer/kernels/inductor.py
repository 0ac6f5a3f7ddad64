"""What torch's compiler keeps (graphs, AOTAutograd, autotuning), by torch's own cache artifacts.

torch collects what one process used into one blob, with pickles in it, and gives it back to another process of the same
torch, CUDA and GPU model. Its kernels' binaries are not reliably part of it: they lie in Triton's cache. The names of
those that belong to a blob are written down beside it, so that a restored blob without its kernels is told as such.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fer.kernels import entry
from fer.kernels.components import triton_entry
from fer.paths import ensure_private

BLOB: Final = "artifacts.bin"
NEEDS: Final = "needs.json"


@dataclass(frozen=True)
class Loaded:
    """What became of a blob; ``missing`` are kernels of Triton's cache that belong to it and are not there."""

    bytes: int
    missing: tuple[str, ...]


def save(root: Path, name: str, kernels: Collection[str]) -> Path | None:
    """Keep what torch's compiler used in this process; None where it was not used, or has nothing to keep.

    Args:
        root: the component's folder.
        name: of the entry: the engine's and model's.
        kernels: keys of Triton's kernels that this process looked up.

    Raises:
        OSError, PeerRefused: it cannot be written, or the folder is not private.
    """
    if "torch._dynamo" not in sys.modules:
        return None
    import torch

    # What was loaded from a blob is in the artifacts too, so that a later blob is never smaller.
    found = torch.compiler.save_cache_artifacts()
    if found is None:
        return None
    data, told = found
    keys = {str(kind): sorted(map(str, names)) for kind, names in sorted(told.artifacts.items())}
    if _needs(root / name).get("artifacts") == keys:
        return root / name / BLOB  # torch's bytes differ from process to process; what is in them does not
    ensure_private(root.parent)
    ensure_private(root)
    folder = root / name
    ensure_private(folder)
    digest = hashlib.sha256(data).hexdigest()
    needs = {"schema": 1, "sha256": digest, "artifacts": keys, "kernels": sorted(kernels)}
    entry.write(str(folder), NEEDS, json.dumps(needs).encode())
    return Path(entry.write(str(folder), BLOB, data))


def load(root: Path, name: str, triton: Path | None) -> Loaded | None:
    """Give a blob back to torch's compiler, if it is whole; imports torch's compiler, which takes seconds.

    The blob holds pickles: the folder must be this user's alone, which :func:`fer.paths.ensure_private` proves.

    Raises:
        PeerRefused: the folder is not private.
    """
    folder = root / name
    if not (folder / BLOB).is_file():
        return None
    ensure_private(root)
    ensure_private(folder)
    try:
        data = entry.read(str(folder / BLOB))
    except entry.Odd:
        return None
    if _needs(folder).get("sha256") != hashlib.sha256(data).hexdigest():
        return None
    import torch._dynamo

    torch.compiler.load_cache_artifacts(data)
    return Loaded(len(data), tuple(missing(needs_of(folder), triton)))


def missing(kernels: Collection[str], triton: Path | None) -> list[str]:
    """Keys of kernels that Triton's cache does not hold complete."""
    return [key for key in kernels if triton is None or triton_entry(str(triton / key)) is None]


def needs_of(folder: Path) -> list[str]:
    """The kernels that belong to a blob, as far as it is known."""
    kernels = _needs(folder).get("kernels")
    return [str(key) for key in kernels] if isinstance(kernels, list) else []


def _needs(folder: Path) -> Mapping[str, Any]:
    with contextlib.suppress(entry.Odd, ValueError):
        data = json.loads(entry.read(str(folder / NEEDS)))
        return data if isinstance(data, dict) else {}
    return {}
