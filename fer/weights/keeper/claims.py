"""Who answers for a service: one cohort of processes at a time, and the next only when the last of them is gone.

A *cohort* is the processes that serve together, as the ranks of an engine; its first is the one that asked. The end of
any of them ends its time: the keeper sees it by pidfd, sends SIGKILL to the others, and waits until all are gone. Only
then the first that waits is granted the service. A connection that closes means nothing here: its process may live and
write to a client or a GPU. What cannot be seen to have ended counts as alive, however long that takes.

Held services are in the journal, so a keeper that is killed changes nothing. Against a second keeper, or one that lost
the journal, stands the service's lock (:mod:`fer.weights.locks`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from fer.errors import Refused
from fer.memory.fd import Fd
from fer.weights import locks
from fer.weights.keeper.editions import Store
from fer.weights.keeper.estates import Estates
from fer.weights.keeper.pidfds import is_over, open_exactly
from fer.weights.keeper.records import Peer, Service, new_id
from fer.weights.keeper.shelf import Shelf
from fer.weights.wire import Bequeath, ClaimService, Holder, Process

FENCE_S = 10.0
"""Seconds after SIGKILL from which on a process counts as stuck, which is said; nothing is granted before it ends."""
_LOOK_S = 0.25
"""Seconds between looks at a lock that another has and that cannot be waited for."""


class Claims:
    """Services of a store, and the pidfds of those that hold them."""

    def __init__(self, store: Store, shelf: Shelf) -> None:
        self._store, self._shelf, self.state = store, shelf, store.state
        self.estates = Estates(store, shelf)
        self._pidfds: dict[Process, Fd] = {}
        self._foreign: dict[str, Fd] = {}  # locks that another keeper made, to wait for their end
        self._watch: Callable[[int, Callable[[int], None]], None] = lambda fd, call: None
        self._unwatch: Callable[[int], None] = lambda fd: None
        self._changed: Callable[[], None] = lambda: None
        self._look_at: float | None = None

    def start(
        self,
        watch: Callable[[int, Callable[[int], None]], None],
        unwatch: Callable[[int], None],
        changed: Callable[[], None],
    ) -> None:
        """Begin to watch, in the loop of the server: the processes of all services that a predecessor granted.

        Args:
            changed: called when a service may have become free.
        """
        self._watch, self._unwatch, self._changed = watch, unwatch, changed
        self.estates.start(watch, unwatch, changed)
        for service in self.state.services.values():
            for process in service.processes:
                self._follow(process)
        ended = [self._ended(service) for service in self.state.services.values()]
        if any(ended):
            changed()

    # --- what is asked ---

    def take(self, peer: Peer, request: ClaimService, fds: list[Fd]) -> Service | None:
        """Grant a service; None where the request has to wait.

        Raises:
            Refused: ``not_yours``, ``process_gone``, ``cannot_fence`` (see :meth:`_check`), ``not_the_lock`` or
                ``held`` for a claim that is made again without right.
        """
        self._check(peer, request.processes)
        service = self.state.services.get(request.service)
        if service is not None and service.processes == request.processes and not service.dying:
            service.peer, service.label = peer.id, peer.label  # by a new connection, or answered a second time
            return service
        if request.again and not locks.fits(fds[0], request.service):
            raise Refused("the descriptor is not the service's lock", why="another has made it", code="not_the_lock")
        if service is not None and service.processes and not self._ended(service):
            if request.again:
                who = self.obstacle(request.service)[0]
                raise Refused(f"the service {request.service} is another's", why=who, code="held")
            return None
        if not request.again and self._waits_before(peer, request.service):
            return None
        return self._grant(peer, request, fds)

    def bequeath(self, peer: Peer, request: Bequeath, fds: list[Fd]) -> None:
        """Keep what a holder leaves to the next one. Takes the descriptors out of ``fds``.

        Raises:
            Refused: ``not_yours``: this connection does not hold the service.
        """
        service = self._held(peer, request.service)
        if service is None:
            raise Refused(f"{request.service} is not this connection's", why="others hold it", code="not_yours")
        if request.estate is None:
            self.estates.drop(service, "its holder leaves none")
        else:
            self.estates.put(service, request.estate, fds)

    def release(self, peer: Peer, name: str, *, pass_on: bool = False) -> None:
        """Give a service back; nothing happens where this connection does not hold it.

        Args:
            pass_on: keep its estate for the next holder.
        """
        service = self._held(peer, name)
        if service is not None:
            self._vacate(service)
            self._store.note("released", f"{name}: by {peer.pid} {peer.label}".rstrip())
            if not pass_on:
                self.estates.drop(service, "its holder is done")

    def make_room(self, gpu: str, needed: int | None) -> None:
        """Let estates that wait on a GPU go, until so many bytes are free."""
        self.estates.make_room(gpu, needed)

    def leave(self, peer: Peer) -> None:
        """A connection closed. Who holds a service by it holds it still, as long as its processes live."""
        for service in self.state.services.values():
            if service.peer == peer.id:
                service.peer = ""

    def obstacle(self, name: str) -> tuple[str, Holder | None]:
        """Why a service is not granted, in words, and who holds it."""
        service = self.state.services.get(name)
        if service is None or not service.processes:
            return "another keeper, or a process that needs none, has granted it", None
        pids = ", ".join(str(process.pid) for process in service.processes)
        holder = Holder(pid=service.processes[0].pid, label=service.label)
        if service.dying:
            return f"its processes {pids} are being ended and are not all gone", holder
        return f"processes {pids} hold it", holder

    def prune(self) -> None:
        """Forget services that nobody holds or waits for."""
        wanted = {peer.wait.service for peer in self.state.peers.values() if peer.wait is not None}
        for service in list(self.state.services.values()):
            if not service.processes and not self.estates.waits(service) and service.name not in wanted:
                del self.state.services[service.name]
                if service.lock:
                    self._store.condemned.append(service.lock)
        for name in [name for name in self._foreign if name not in wanted]:
            self._forget(self._foreign.pop(name))

    # --- time ---

    def times(self) -> list[float]:
        """Monotonic seconds at which :meth:`expire` has something to do."""
        ends = [s.dying + FENCE_S for s in self.state.services.values() if s.dying and not s.stuck]
        return [*ends, *self.estates.times(), *([self._look_at] if self._look_at is not None else [])]

    def expire(self, now: float) -> None:
        """Say which processes are stuck, and look again at locks that cannot be waited for."""
        for service in self.state.services.values():
            if service.dying and not service.stuck and service.dying + FENCE_S <= now:
                service.stuck = True
                left = [str(p.pid) for p in service.processes if p in self._pidfds and not is_over(self._pidfds[p])]
                self._store.note("stuck", f"{service.name}: {', '.join(left)} did not end {FENCE_S:g} s after SIGKILL")
        again = self._look_at is not None and self._look_at <= now
        if again:
            self._look_at = None
        if again or any(at <= now for at in self.estates.times()):
            self._changed()

    # --- inside ---

    def _held(self, peer: Peer, name: str) -> Service | None:
        service = self.state.services.get(name)
        mine = service is not None and service.peer == peer.id and service.processes and not service.dying
        return service if mine else None

    def _check(self, peer: Peer, processes: list[Process]) -> None:
        """Refuse processes that this peer may not speak for, or that could not be ended when they have to be."""
        if processes[0].pid != peer.pid:
            raise Refused(
                f"process {processes[0].pid} does not speak for itself",
                why=f"the connection is that of {peer.pid or 'one in another PID namespace'}",
                fix="Claim from the process that serves, in the keeper's PID namespace.",
                code="not_yours",
            )
        for process in processes:
            if process in self._pidfds:
                continue
            with contextlib.ExitStack() as closing:
                fd = open_exactly(process)
                if fd is None:
                    raise Refused(f"process {process.pid} is gone", why="it ended", code="process_gone")
                closing.enter_context(fd)
            if _user(process.pid) != peer.uid:
                raise Refused(f"process {process.pid} is another user's", code="not_yours")
        if len(processes) > 1 and os.getuid() not in (0, peer.uid):
            why = f"the keeper of user {os.getuid()} may not end processes of user {peer.uid}"
            raise Refused("several processes cannot hold a service here", why=why, code="cannot_fence")

    def _waits_before(self, peer: Peer, name: str) -> bool:
        """Whether somebody has waited for a service for longer than this peer."""
        order = peer.wait.order if peer.wait is not None else self.state.counter + 1
        waits = [other.wait for other in self.state.peers.values() if other.wait is not None and other is not peer]
        return any(wait.service == name and wait.order < order for wait in waits)

    def _grant(self, peer: Peer, request: ClaimService, fds: list[Fd]) -> Service | None:
        service = self.state.services.get(request.service) or Service(request.service)
        if not service.lock:
            lock = fds.pop(0) if request.again else locks.make(request.service)
            if lock is None:
                self._wait_for_lock(request.service)
                return None
            service.lock = new_id("l")
            self._shelf.put(service.lock, lock)
        self.estates.waits(service)  # what nobody should find any more is let go first
        service.processes, service.peer, service.label = list(request.processes), peer.id, peer.label
        self.state.services[request.service] = service
        for process in service.processes:
            self._follow(process)
        again = ", which held it before" if request.again else ""
        self._store.note("granted", f"{service.name}: to {peer.pid} {peer.label}".rstrip() + again)
        return service

    def _wait_for_lock(self, name: str) -> None:
        if name in self._foreign:
            return
        fd = locks.wait_for(name)
        if fd is None:
            self._look_at = time.monotonic() + _LOOK_S
            return
        self._foreign[name] = fd

        def ended(events: int) -> None:
            self._forget(self._foreign.pop(name))
            self._changed()

        self._watch(fd.fileno(), ended)

    def _forget(self, fd: Fd) -> None:
        self._unwatch(fd.fileno())
        fd.close()

    def _follow(self, process: Process) -> None:
        """Watch a process from now on; one that is gone has no pidfd."""
        if process in self._pidfds:
            return
        fd = open_exactly(process)
        if fd is None:
            return
        self._pidfds[process] = fd

        def died(events: int) -> None:
            self._unwatch(fd.fileno())  # it stays readable
            ended = [self._ended(each) for each in self.state.services.values() if process in each.processes]
            if any(ended):
                self._changed()

        self._watch(fd.fileno(), died)

    def _ended(self, service: Service) -> bool:
        """Whether nobody holds a service any more; the first death begins the end of the others."""
        left = [fd for process in service.processes if (fd := self._pidfds.get(process)) and not is_over(fd)]
        if len(left) == len(service.processes) and not service.dying:
            return not left
        if not service.dying:
            service.dying = time.monotonic()
        for fd in left:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd.fileno(), signal.SIGKILL)
        if left:
            return False
        service.fence_s = time.monotonic() - service.dying
        pids = ", ".join(str(process.pid) for process in service.processes)
        self._store.note("fenced", f"{service.name}: {pids} ended, the last after {service.fence_s * 1e3:.1f} ms")
        self._vacate(service)
        return True

    def _vacate(self, service: Service) -> None:
        for process in service.processes:
            if any(process in other.processes for other in self.state.services.values() if other is not service):
                continue  # a process may hold several services
            if fd := self._pidfds.pop(process, None):
                self._forget(fd)
        service.processes, service.peer, service.label, service.left = [], "", "", time.monotonic()
        service.dying, service.stuck = 0.0, False


def _user(pid: int) -> int:
    """The real user of a process, -1 where it cannot be read."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
        return int(text.partition("\nUid:")[2].split()[0])
    return -1
