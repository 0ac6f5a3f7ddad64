"""What the holder of a service leaves to the next one: memory that outlives it, as the cache of its answers.

The holder gives descriptors, and a word about them that the keeper does not read. Whoever is granted the service next
gets both, once every process of the holder is gone or it has passed them on; nobody else does. An estate that nobody
takes goes after a while, with the end of its guardian (the process that would start the next holder), or when its GPU's
memory is wanted.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from fer.memory.fd import Fd
from fer.weights.keeper.editions import Store
from fer.weights.keeper.pidfds import is_over, open_exactly
from fer.weights.keeper.records import Service, new_id
from fer.weights.keeper.shelf import Shelf
from fer.weights.wire import Estate, Process

KEEP_S = 120.0
"""Seconds for which an estate waits for a next holder: a start without any help takes less."""


class Estates:
    """The estates of all services, and the pidfds of their guardians."""

    def __init__(self, store: Store, shelf: Shelf) -> None:
        self._store, self._shelf = store, shelf
        self._guardians: dict[Process, Fd] = {}
        self._watch: Callable[[int, Callable[[int], None]], None] = lambda fd, call: None
        self._unwatch: Callable[[int], None] = lambda fd: None
        self._changed: Callable[[], None] = lambda: None

    def start(
        self,
        watch: Callable[[int, Callable[[int], None]], None],
        unwatch: Callable[[int], None],
        changed: Callable[[], None],
    ) -> None:
        """Begin to watch guardians, those of a predecessor's estates too."""
        self._watch, self._unwatch, self._changed = watch, unwatch, changed
        for service in self._store.state.services.values():
            if service.estate is not None:
                self._follow(service.estate.guardian)

    def put(self, service: Service, estate: Estate, fds: list[Fd]) -> None:
        """Keep an estate, in place of an earlier one. Takes the descriptors out of ``fds``."""
        self._condemn(service)
        service.estate, service.bequest = estate, new_id("b")
        for name in service.bequeathed():
            self._shelf.put(name, fds.pop(0))
        self._follow(estate.guardian)

    def drop(self, service: Service, why: str) -> None:
        """Let an estate go; nothing happens where there is none."""
        if service.estate is not None:
            self._store.note("dropped", f"what {service.name} was to hand on, {service.estate.size} bytes: {why}")
        self._condemn(service)

    def waits(self, service: Service) -> bool:
        """Whether an estate still waits for a next holder; lets it go where it does not."""
        if service.estate is None:
            return False
        if service.left + KEEP_S <= time.monotonic():
            self.drop(service, f"nobody took it for {KEEP_S:g} s")
        elif self._orphaned(service.estate.guardian):
            self.drop(service, "its guardian has ended")
        return service.estate is not None

    def times(self) -> list[float]:
        """Monotonic seconds at which an estate has waited for long enough."""
        unheld = [s for s in self._store.state.services.values() if s.estate is not None and not s.processes]
        return [service.left + KEEP_S for service in unheld]

    def make_room(self, gpu: str, needed: int | None) -> None:
        """Let estates that wait on a GPU go, until so many bytes are free; None: all of them."""
        for service in self._store.state.services.values():
            if needed is not None and needed <= 0:
                return
            if service.estate is not None and service.estate.gpu == gpu and not service.processes:
                needed = None if needed is None else needed - service.estate.size
                self.drop(service, "its memory is wanted")

    def close(self) -> None:
        """Close all pidfds."""
        for fd in self._guardians.values():
            fd.close()
        self._guardians.clear()

    def _condemn(self, service: Service) -> None:
        self._store.condemned += service.bequeathed()
        service.estate, service.bequest = None, ""
        wanted = {s.estate.guardian for s in self._store.state.services.values() if s.estate is not None}
        for process in [process for process in self._guardians if process not in wanted]:
            self._forget(self._guardians.pop(process))

    def _orphaned(self, guardian: Process | None) -> bool:
        fd = self._guardians.get(guardian) if guardian is not None else None
        return guardian is not None and (fd is None or is_over(fd))

    def _follow(self, guardian: Process | None) -> None:
        if guardian is None or guardian in self._guardians:
            return
        fd = open_exactly(guardian)
        if fd is None or is_over(fd):
            if fd is not None:
                fd.close()
            return
        self._guardians[guardian] = fd

        def ended(events: int) -> None:
            if (gone := self._guardians.pop(guardian, None)) is not None:
                self._forget(gone)
                self._changed()

        self._watch(fd.fileno(), ended)

    def _forget(self, fd: Fd) -> None:
        self._unwatch(fd.fileno())
        fd.close()
