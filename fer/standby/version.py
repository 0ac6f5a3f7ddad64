"""A model as a service's engines are started on it, and the proof that two engines have the same one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fer.errors import CheckpointError
from fer.standby.process import Command
from fer.standby.wire import Ready

Commands = Callable[[Path], Sequence[Command]]
"""The commands, one a rank, of an engine whose rank 0 is to answer at a socket."""

SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".json", ".model", ".txt", ".tiktoken", ".jinja", ".py")
"""Ends of the names of files that answers can depend on; others, such as locks and logs, may come and go."""


@dataclass(eq=False, kw_only=True)
class Version:
    """One model folder that engines are started on. An update brings the next one, of the same folder even.

    Attributes:
        online: what an engine that may claim the service is; ``batch`` the preemptible one, None where there is none.
        model: the folder, None where the engines have none.
        number: 1 for the first.
        editions: what the keeper holds of it, as far as its engines said; ``published``: by these engines themselves.
    """

    online: Commands
    batch: Commands | None = None
    model: Path | None = None
    number: int = 1
    editions: set[str] = field(default_factory=set)
    published: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return f"version {self.number}" + (f" ({self.model.name})" if self.model is not None else "")

    def note(self, ready: Ready) -> None:
        """One of its engines is ready: remember the edition that its weights are part of."""
        for stage in ready.report.get("stages", []):
            edition = (stage.get("details") or {}).get("edition")
            if stage["name"] == "weights" and edition:
                self.editions.add(str(edition))
                if stage["path"] != "attached":
                    self.published.add(str(edition))

    def weights(self) -> str:
        """What the model's files are just now: engines that were started on equal ones answer alike.

        Files are told apart by device, inode, size and time of change, not read: two that differ here may hold the
        same, and an answer is then not completed by the other engine. Blocks as the file system does.
        """
        if self.model is None:
            return f"version {self.number}"
        digest = hashlib.sha256(str(self.model.absolute()).encode())
        try:
            with os.scandir(self.model) as entries:
                of_model = (entry for entry in entries if entry.name.endswith(SUFFIXES) and entry.is_file())
                found = sorted((entry.name, entry.stat()) for entry in of_model)
        except OSError:
            return ""
        for name, stat in found:
            digest.update(repr((name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)).encode())
        return digest.hexdigest()[:16]


def unpublished(ready: Ready) -> str:
    """Why an engine's weights are its own alone, ``""`` where the keeper has them."""
    for stage in ready.report.get("stages", []):
        if stage["name"] == "weights" and (stage.get("details") or {}).get("published") is False:
            return str(stage["why"]) or "no reason was given"
    return ""


def positions(folder: Path) -> int | None:
    """The positions that a model was made for, None where its configuration does not say.

    Raises:
        CheckpointError: the folder is none of a model.
    """
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
        text = config.get("text_config") or config
        found = text.get("max_position_embeddings")
    except OSError as error:
        why = f"config.json: {error.strerror}"
        raise CheckpointError(f"{folder} is no model folder", why=why, path=str(folder)) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder} is no model folder", why=f"config.json: {error}", path=str(folder)) from error
    return found if isinstance(found, int) and found > 0 else None
