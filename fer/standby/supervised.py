"""What an engine's process owes its supervisor: the control socket, and an end that says why.

A module of its own: :mod:`fer.standby.worker` runs as ``__main__``, and must not be imported before by what a launcher
imports ahead, as :mod:`fer.standby.duty` is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from fer.errors import FerError, OutOfMemory, PeerRankFailed, ProtocolError, UsageError
from fer.standby import wire


class Supervised:
    """The control socket. A thread waits for its end from the beginning: imports and loads take long.

    Args:
        hear: takes orders, in that thread.
    """

    def __init__(self, hear: Callable[[wire.Order], None] = lambda order: None) -> None:
        self._hear = hear
        self._sock = socket.socket(fileno=os.dup(0))
        self._sock.setblocking(True)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        threading.Thread(target=self._watch, name="supervised", daemon=True).start()

    def say(self, message: wire.Control) -> None:
        """Tell the supervisor. It may have gone: then the watch ends this process."""
        try:
            self._sock.sendall(wire.line(message))
        except OSError:
            pass

    def _watch(self) -> NoReturn:
        try:
            with self._sock.makefile("rb") as lines:
                for line in lines:
                    self._hear(wire.order(line))
        except (OSError, ProtocolError):
            pass
        os._exit(1)


@contextlib.contextmanager
def guarded(supervised: Supervised) -> Iterator[None]:
    """Around an engine's work: what it raises is said, and ends the process."""
    try:
        yield
    except BaseException as raised:
        error = raised if isinstance(raised, FerError) else _lacking(raised)
        if error is None:
            traceback.print_exc()
        else:
            supervised.say(wire.Broken(plain(error)))
            sys.stderr.write(f"fer: {error}\n")
        # Not through the interpreter's end: after an error of a GPU the tidying up of libraries may wait for ever.
        sys.stderr.flush()
        os._exit(2 if isinstance(error, UsageError) else 1)


def _lacking(error: BaseException) -> OutOfMemory | None:
    """What a library says where memory is short, as the supervisor understands it: others may give way."""
    if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":  # torch's; not imported here
        return None
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    return OutOfMemory("the engine lacks memory", why=why, fix="End what else uses the device's memory")


def end_with(work: Callable[[], None]) -> NoReturn:
    """Do one of the two things this process is for; without either it is of no use."""
    status = 0
    try:
        work()
    except PeerRankFailed as error:  # its own log has the rest
        sys.stderr.write(f"fer: {error}\n")
        status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    # Not through the interpreter's end: after an error of a GPU the tidying up of libraries may wait for ever.
    sys.stderr.flush()
    os._exit(status)


def plain(error: FerError) -> dict[str, object]:
    """An error as it is sent."""
    import json

    return dict(json.loads(json.dumps(error.to_dict(), default=str)))
