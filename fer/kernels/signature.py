"""Signatures of archives by OpenSSH: who made this file, as one of those whose code is taken.

``ssh-keygen -Y sign`` writes ``ARCHIVE.sig``; the keys that are believed stand in a file in OpenSSH's format of allowed
signers. Its keys are the ones people have; nothing is invented here.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from fer.errors import ArchiveUntrusted, UsageError

NAMESPACE: Final = "fer-kernels"
"""What a signature is for: one made for a commit or a mail is none for an archive."""

_LIMIT_S: Final = 120.0


def sign(archive: Path, key: Path) -> Path:
    """Sign with a private key (or one that an agent holds, by its public file); the signature's file.

    Raises:
        UsageError: the key cannot be used, or OpenSSH is missing.
    """
    place = beside(archive)
    place.unlink(missing_ok=True)
    _, error = _keygen("sign", "-f", str(key), "-n", NAMESPACE, str(archive))
    if not place.is_file():
        raise UsageError(f"{archive} cannot be signed", why=error, fix="Check the key's file and its mode")
    return place


def beside(archive: Path) -> Path:
    """Where the signature of an archive lies."""
    return archive.with_name(archive.name + ".sig")


@contextmanager
def verified(archive: Path, signers: Path) -> Iterator[tuple[Path, str]]:
    """The very file whose signature was verified, and who signed it.

    The path given is that of an open descriptor: whoever exchanges the file afterwards changes nothing.

    Raises:
        ArchiveUntrusted: there is no signature, or it is not by one of the signers, or not of these bytes.
        UsageError: a file is missing, or OpenSSH is.
    """
    signature = beside(archive)
    for path, what in ((archive, "archive"), (signers, "list of signers")):
        if not path.is_file():
            raise UsageError(f"there is no {what} {path}", fix="Check the path")
    if not signature.is_file():
        raise ArchiveUntrusted(
            f"{archive} is not signed", why=f"there is no {signature}", fix="Ask its maker to sign it"
        )
    with archive.open("rb") as file:
        names, error = _keygen("find-principals", "-s", str(signature), "-f", str(signers))
        who = names.splitlines()[0] if names else ""
        if who:
            arguments = ("-s", str(signature), "-f", str(signers), "-n", NAMESPACE, "-I", who)
            said, error = _keygen("verify", *arguments, stdin=file)
            if said.startswith("Good"):
                yield Path(f"/proc/self/fd/{file.fileno()}"), who
                return
        raise ArchiveUntrusted(
            f"the signature of {archive} is not believed",
            why=error or "its key is not in the list of signers",
            fix="Add the maker's key to the list, or get the archive again",
        )


def _keygen(action: str, *arguments: str, stdin: IO[bytes] | None = None) -> tuple[str, str]:
    """What ``ssh-keygen -Y`` says, empty unless it succeeded, and its error."""
    try:
        done = subprocess.run(
            ["ssh-keygen", "-Y", action, *arguments],
            stdin=stdin if stdin is not None else subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_LIMIT_S,
        )
    except FileNotFoundError as error:
        raise UsageError("ssh-keygen is missing", fix="Install OpenSSH's client") from error
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"ssh-keygen did not end in {_LIMIT_S:.0f} s", fix="A key with a passphrase needs an agent"
        ) from error
    out = done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
    return out, done.stderr.decode(errors="replace").strip()
