"""What became known of an archive after it was written: whether it is proven, which of its graphs failed.

It lies beside the archive and names the archive's digest, so that a new archive under the same name starts afresh.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from fer.cudagraph.sections import replace_file

Proof = Literal["unproven", "proven", "failed"]
_KNOWN: Final = ("unproven", "proven", "failed")


@dataclass
class State:
    """What is known of one archive.

    Attributes:
        quarantined: graphs that failed, with the reason; they are captured natively for as long as this stands.
        by: the version of FER that judged it; another one judges again what had failed.
        outdated: why the next start shall save anew, ``""`` where it need not.
    """

    digest: str
    proof: Proof = "unproven"
    why: str = ""
    quarantined: dict[str, str] = field(default_factory=dict)
    by: str = ""
    outdated: str = ""


def beside(archive: Path) -> Path:
    """Where the state of an archive lies."""
    return archive.with_name(archive.name + ".state")


def load(archive: Path, digest: str) -> State:
    """The state of this very archive; a fresh, unproven one where none is readable or another archive's is found."""
    try:
        data = json.loads(beside(archive).read_text("utf-8"))
        if data["digest"] == digest and data["proof"] in _KNOWN:
            lost = {str(name): str(why) for name, why in data["quarantined"].items()}
            by, outdated = str(data.get("by", "")), str(data.get("outdated", ""))
            return State(digest, data["proof"], str(data["why"]), lost, by, outdated)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass  # without it the archive is merely unproven
    return State(digest)


def save(archive: Path, state: State) -> None:
    """Replace the state atomically. Raises ArchiveError."""
    replace_file(beside(archive), [(0, json.dumps(vars(state), indent=1, sort_keys=True).encode())])
