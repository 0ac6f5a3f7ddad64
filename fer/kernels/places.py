"""Where compiled kernels may live: looked at before the engine starts, instead of failing in the middle of it.

A folder is tried as the kernels' cache will use it: made, written, and mapped as code, since host libraries are loaded
from it. What is wrong with one is named, and the next candidate is taken.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fer.errors import FerError
from fer.kernels import entry
from fer.kernels.components import triton_root
from fer.paths import check_private, ensure_private
from fer.paths import home as default_home

NETWORKS: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "gpfs", "ceph", "fuse.sshfs", "beegfs"})
VARIABLE: Final = "TRITON_CACHE_DIR"


@dataclass(frozen=True)
class Place:
    """A folder for the cache, and why the ones before it were not taken.

    Attributes:
        open_to: who else can put kernels there, ``""`` where nobody can.
    """

    path: Path
    chosen_by: str
    refused: Mapping[str, str] = field(default_factory=dict)
    open_to: str = ""


def choose(environ: Mapping[str, str], *, home: Path | None = None, look: Callable[[Path], str] | None = None) -> Place:
    """The first folder that can be used: Triton's own choice, FER's, the user's cache, a private one in /tmp.

    Args:
        look: what is wrong with a folder; by default :func:`trouble`.

    Raises:
        FerError: none can; the message names each with its trouble.
    """
    look = look or trouble
    refused: dict[str, str] = {}
    for name, path in _candidates(environ, home):
        if path is None:
            refused[name] = "HOME is not set, and this user has no home folder"
            continue
        if why := _private(path) if name == "/tmp" else "":
            refused[str(path)] = why
            continue
        if why := look(path):
            refused[str(path)] = f"{why} ({name})"
            continue
        return Place(path, name, refused, open_to(path))
    raise FerError(
        "there is no folder for compiled kernels",
        why="; ".join(f"{path}: {why}" for path, why in refused.items()),
        fix=f"Set {VARIABLE} to a folder on a local disk that is not mounted noexec",
    )


def _candidates(environ: Mapping[str, str], home: Path | None) -> list[tuple[str, Path | None]]:
    named = VARIABLE if environ.get(VARIABLE) else "TRITON_HOME" if environ.get("TRITON_HOME") else "HOME"
    found: list[tuple[str, Path | None]] = [(named, triton_root(environ))]
    with contextlib.suppress(RuntimeError):  # Path.home() of a user without one
        found.append(("FER_HOME", (home or default_home()) / "kernels" / "triton"))
    if environ.get("XDG_CACHE_HOME"):
        found.append(("XDG_CACHE_HOME", Path(environ["XDG_CACHE_HOME"]) / "triton"))
    found.append(("/tmp", Path(tempfile.gettempdir()) / f"fer-{os.getuid()}" / "triton"))
    return found


def trouble(path: Path) -> str:
    """What would go wrong with a cache in this folder, ``""`` if nothing. Leaves it made and empty."""
    made = next((parent for parent in (path, *path.parents) if parent.exists()), path)
    if kind := network(made):
        return f"it is on {kind}, where renames and removals fail at times"
    probe = path / f".tmp.{os.getpid()}.{secrets.token_hex(4)}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o700)
    except OSError as error:
        return f"it cannot be written to: {error.strerror}"
    try:
        os.write(handle, bytes(mmap.PAGESIZE))
        mmap.mmap(handle, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
        return ""
    except PermissionError:
        return "it is mounted noexec, so that host libraries cannot be loaded from it"
    except OSError as error:
        return f"it cannot be written to: {error.strerror}"
    finally:
        os.close(handle)
        with contextlib.suppress(OSError):
            probe.unlink()


def open_to(path: Path) -> str:
    """Who beside this user and root can write to a folder, ``""`` for nobody.

    Named and not refused: volumes of containers are often open to all, and what a user chose is theirs to choose. A
    group may be one's own, and is on systems that give every container another user id.
    """
    try:
        facts = path.stat()
    except OSError:
        return ""
    if facts.st_uid not in (0, os.getuid()):
        return f"user {facts.st_uid}"
    return "everybody" if facts.st_mode & stat.S_IWOTH else ""


def network(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The kind of network file system a folder lies on, ``""`` for a local one or where it cannot be told."""
    try:
        device = os.stat(path).st_dev
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        numbers = fields.split()[2] if len(fields.split()) > 2 else ""
        kind = rest.split()[0] if rest else ""
        if numbers == f"{os.major(device)}:{os.minor(device)}" and kind in NETWORKS:
            return kind
    return ""


def _private(path: Path) -> str:
    """Why a folder below /tmp is not ours alone; made if it is missing."""
    try:
        ensure_private(path.parent)
        check_private(path.parent)
    except (FerError, OSError) as error:
        return str(error)
    return ""


def compiler(environ: Mapping[str, str]) -> str:
    """The C compiler Triton would call, ``""`` where there is none."""
    named = environ.get("CC")
    for name in [named] if named else ["gcc", "clang"]:
        if found := shutil.which(name, path=environ.get("PATH", os.defpath)):
            return found
    return ""


def lacks_compiler(environ: Mapping[str, str], root: Path, *, helpers_fit: str = "") -> str:
    """Whether the engine would need a C compiler that is not there; a sentence that names it, ``""`` if all is well.

    Args:
        root: the cache; a helper library in it makes the compiler unnecessary, if it is one for this installation.
        helpers_fit: how the archive's helpers differ from this installation, ``""`` where they fit or there are none.
    """
    if compiler(environ):
        return ""
    if not helpers_fit and any(_is_helper(Path(each.path)) for each in entry.entries_in(str(root))):
        return ""
    why = f"; the kept ones are for another installation: {helpers_fit}" if helpers_fit else ""
    return f"no C compiler (CC, gcc or clang) is there to build Triton's helper library{why}"


def _is_helper(folder: Path) -> bool:
    import sysconfig

    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    return any(name.startswith("cuda_utils") and name.endswith(suffix) for name in entry.loose_in(str(folder)))
