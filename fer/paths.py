"""Where FER keeps things, and the proof that a directory is private."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path

from fer.errors import PeerRefused

SOCKET = "keeper.sock"
"""The keeper's socket in a runtime directory."""


def home() -> Path:
    """Folder of what FER writes to disk: ``FER_HOME``, else ``$XDG_CACHE_HOME/fer``, else ``~/.cache/fer``."""
    if chosen := os.environ.get("FER_HOME"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fer"


def runtime_dirs() -> list[Path]:
    """Folders a keeper's socket may live in, the preferred one first.

    ``FER_RUNTIME_DIR`` alone where it is set, else ``$XDG_RUNTIME_DIR/fer`` and ``/tmp/fer-$UID``. Programs of one
    user see different ``XDG_RUNTIME_DIR``: a service may lack it, so whoever looks for a keeper looks in all of them.
    """
    if chosen := os.environ.get("FER_RUNTIME_DIR"):
        return [Path(chosen).expanduser()]
    places = [Path(f"/tmp/fer-{os.getuid()}")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        places.insert(0, Path(runtime) / "fer")
    return places


def ensure_private(path: Path) -> None:
    """Make the directory with mode 0700 where it is missing, then :func:`check_private`.

    Raises:
        PeerRefused: it is there and is not private.
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    check_private(path)


def check_private(path: Path, *, owners: Collection[int] = ()) -> None:
    """Refuse a directory in which anybody but its owner could put a socket or listen on one.

    Args:
        owners: further user ids whose directory is accepted, beside this process's own.

    Raises:
        PeerRefused: it is a symbolic link, no directory, another user's, or open to group or others.
        FileNotFoundError: it does not exist.
    """
    # lstat and no open: what counts is the name that connect() and bind() will walk through next, and nobody else
    # can exchange it where the directory above is ours or sticky.
    facts = os.lstat(path)
    fix = f"Set FER_RUNTIME_DIR to a directory of your own (mode 0700), not {path}."
    if facts.st_uid == os.getuid():  # never advice to remove what belongs to somebody else
        fix = f"Remove {path}, or set FER_RUNTIME_DIR to a directory of your own (mode 0700)."
    if not stat.S_ISDIR(facts.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no directory"
        raise PeerRefused(f"{path} is {kind}", why="a keeper's directory must be a real one", fix=fix)
    if facts.st_uid != os.getuid() and facts.st_uid not in owners:
        raise PeerRefused(f"{path} belongs to user {facts.st_uid}", why=f"this process is user {os.getuid()}", fix=fix)
    # The execute bit alone (a keeper with allow_uids sets it) lets others reach a name they know, and change nothing.
    if stat.S_IMODE(facts.st_mode) & 0o066:
        mode = oct(stat.S_IMODE(facts.st_mode))
        raise PeerRefused(f"{path} has mode {mode}", why="others could reach into it", fix=f"chmod 700 {path}")
