"""Every descriptor the keeper holds for others, by name, here and in the fd store."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping

from fer.memory.fd import Fd
from fer.weights.keeper.notify import Notifier

Held = Fd | socket.socket
"""What lies on a shelf; either owns its descriptor and may be closed twice."""


class Shelf:
    """Descriptors by name.

    What is put here is handed to the fd store by :meth:`secure`, before anything refers to it; what is dropped leaves
    the store at once. Without a store the shelf works the same and protects nothing.
    """

    def __init__(self) -> None:
        self._fds: dict[str, Held] = {}
        self._unsecured: list[str] = []
        self.store: Notifier | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._fds

    def __getitem__(self, name: str) -> Fd:
        held = self._fds[name]
        assert isinstance(held, Fd), name
        return held

    def __len__(self) -> int:
        return len(self._fds)

    def names(self) -> list[str]:
        """All names."""
        return list(self._fds)

    def put(self, name: str, fd: Held) -> None:
        """Own a descriptor under a name of its own."""
        assert name not in self._fds, name
        self._fds[name] = fd
        self._unsecured.append(name)

    def restore(self, fds: Mapping[str, Held]) -> None:
        """Own descriptors that came out of the store, and so need not go in."""
        self._fds.update(fds)

    def secure(self) -> None:
        """Have the store keep what is new, and wait until it does.

        Raises:
            OSError: the store is gone; everything is still here.
        """
        names, self._unsecured = self._unsecured, []
        if self.store is None:
            return
        for name in names:
            if name in self._fds:
                self.store.store(name, self._fds[name])
        if names:
            self.store.barrier()

    def hand_over(self, store: Notifier) -> None:
        """Give everything to a store that has nothing yet. Raises OSError as :meth:`secure` does."""
        self.store = store
        self._unsecured = self.names()
        self.secure()

    def drop(self, names: Iterable[str]) -> None:
        """Close descriptors, here and in the store; unknown names are no error.

        Waits for the store: whoever asked for room is about to allocate what this frees.

        Raises:
            OSError: the store is gone; everything is closed here.
        """
        dropped = [name for name in names if name in self._fds]
        for name in dropped:
            self._fds.pop(name).close()
        if self.store is not None and dropped:
            for name in dropped:
                self.store.remove(name)
            self.store.barrier()

    def close(self) -> None:
        """Close everything here, and leave the store as it is."""
        for fd in self._fds.values():
            fd.close()
        self._fds.clear()
