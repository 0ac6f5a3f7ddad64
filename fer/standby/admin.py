"""An operator's side of a running ``fer serve``: its admin socket."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

from fer import paths
from fer.errors import PeerRefused, RequestError, UsageError, from_dict
from fer.memory import fdpass

ADMIN = "admin.sock"
_LIMIT_S = 600.0
"""Seconds for an answer: a switch lets running answers end first."""


def find(runtime_dir: Path | None = None) -> list[Path]:
    """The admin sockets of all services of this user.

    Args:
        runtime_dir: where to look; by default wherever FER's sockets may lie.
    """
    places = [runtime_dir] if runtime_dir is not None else paths.runtime_dirs()
    return sorted({found for place in places for found in place.glob(f"serve-*/{ADMIN}")})


def only(sockets: list[Path]) -> Path:
    """The one service there is. Raises UsageError where there are none or several."""
    if len(sockets) == 1:
        return sockets[0]
    if not sockets:
        raise UsageError("no fer serve runs here", fix="Give --admin PATH; fer serve logs its admin socket")
    listed = ", ".join(map(str, sockets))
    raise UsageError(f"{len(sockets)} services run here", why=listed, fix="Give one of them as --admin PATH")


def ask(
    path: Path, method: str, url: str, body: dict[str, Any] | None = None, *, limit_s: float = _LIMIT_S
) -> dict[str, Any]:
    """One request at an admin socket; the object that it answers.

    Args:
        body: sent as JSON.
        limit_s: seconds for the answer.

    Raises:
        PeerRefused: the directory, or the process behind the socket, is not this user's.
        UsageError: nobody listens there.
        FerError: the service refuses, or could not do it; of the kind that it met.
    """
    paths.check_private(path.parent)
    connection = http.client.HTTPConnection("fer", timeout=limit_s)
    connection.sock = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(limit_s)
        fdpass.connect(sock, path)
        _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid != os.getuid():
            raise PeerRefused(f"the process behind {path} is user {uid}", why=f"this process is user {os.getuid()}")
        connection.request(method, url, None if body is None else json.dumps(body).encode())
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UsageError(f"no fer serve answers at {path}", why=str(error), fix="Is it still running?") from error
    finally:
        connection.close()
    if isinstance(answer.get("fer"), dict):
        raise from_dict(answer["fer"])
    if response.status >= 400:
        raise RequestError(str(answer.get("error", {}).get("message", answer)), status=response.status)
    return answer
