"""To answer for a service alone: the engine's side of :mod:`fer.weights.keeper.claims`.

::

    with hold("serve 127.0.0.1:8000", connect=..., wait_s=10) as tenure:   # raises ServiceHeld after that
        ...                                                               # until release(), or the process's end
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from fer.errors import KeeperError, KeeperUnavailable, ProtocolError, ServiceHeld
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.weights import locks, wire
from fer.weights.keeper.pidfds import started

if TYPE_CHECKING:
    from fer.weights.client import KeeperClient

log = logging.getLogger("fer")

_RETRY_S = 0.5
"""Seconds between attempts to find a keeper again. Nobody else can hold the service meanwhile, so there is no hurry."""


class _Lost(Protocol):
    def __call__(self, why: str) -> object: ...


def this_process() -> wire.Process:
    """The calling process, as it names itself to a keeper."""
    return wire.Process(os.getpid(), started(os.getpid()))


@dataclass
class Inherited:
    """An estate and the descriptors of its slabs, whoever has it closes them."""

    estate: wire.Estate
    fds: list[Fd]

    def close(self) -> None:
        """Close the descriptors; what is mapped of them stays."""
        fdpass.close_all(self.fds)


class Tenure:
    """This process's hold on a service. It ends by :meth:`release`, or with the first process of its cohort.

    Attributes:
        by: ``keeper``, or ``lock`` where there was none: then the kernel's lock alone keeps others out.
        fence_s: seconds that the processes before took to end.
    """

    def __init__(
        self,
        service: str,
        processes: Sequence[wire.Process],
        lock: Fd,
        client: KeeperClient | None,
        connect: Callable[[], KeeperClient],
        *,
        fence_s: float = 0.0,
        inherited: Inherited | None = None,
        lost: _Lost,
    ) -> None:
        self.service, self.fence_s = service, fence_s
        self._processes, self._lock, self._client, self._connect = list(processes), lock, client, connect
        self._lost, self._inherited = lost, inherited
        self._left: tuple[wire.Estate, list[Fd]] | None = None
        self._changing = threading.Lock()
        self._over = threading.Event()
        if client is not None:
            # A descriptor of its own: the number of one that is closed meanwhile may be another's.
            threading.Thread(target=self._watch, args=(client.end(),), name="tenure", daemon=True).start()

    @property
    def by(self) -> str:
        """Who granted it."""
        return "keeper" if self._client is not None else "lock"

    def take_estate(self) -> Inherited | None:
        """What the holder before left, once: from then on its descriptors are the caller's.

        It is left to the next one, too, until something else is bequeathed.
        """
        with self._changing:
            found, self._inherited = self._inherited, None
            if found is not None and self._left is None:
                self._left = (found.estate, [fd.dup() for fd in found.fds])
        return found

    def decline_estate(self) -> None:
        """Give back what the holder before left, if it did."""
        if (found := self.take_estate()) is not None:
            found.close()
            with contextlib.suppress(KeeperError):  # with the keeper it is gone anyway
                self.bequeath(None, [])

    def bequeath(self, estate: wire.Estate | None, fds: Sequence[Fd]) -> bool:
        """Leave memory to the next holder, in place of what was left before; None: leave nothing.

        The memory lives as long as the keeper has it, whatever becomes of this process.

        Args:
            fds: one for each slab; they stay the caller's.

        Returns:
            False where there is no keeper that could keep it.

        Raises:
            Refused: the keeper does not take it.
        """
        with self._changing:
            kept = [fd.dup() for fd in fds]
            fdpass.close_all(self._left[1] if self._left is not None else [])
            self._left = (estate, kept) if estate is not None else None
            if self._client is None:
                return False
            self._client.bequeath(self.service, estate, kept)
            return True

    def release(self, *, pass_on: bool = False) -> None:
        """Let the next one have it. Twice is once.

        Args:
            pass_on: with what was left to it; else that goes.
        """
        if self._over.is_set():
            return
        self._over.set()
        self._lock.close()
        if self._client is not None:
            # Where the keeper is gone there is nothing to give back: closing the lock was it.
            with contextlib.suppress(KeeperError):
                self._client.release_service(self.service, pass_on=pass_on)
            self._client.close()
        if (inherited := self.take_estate()) is not None:
            inherited.close()
        with self._changing:
            fdpass.close_all(self._left[1] if self._left is not None else [])
            self._left = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _watch(self, end: Fd) -> None:
        """When the keeper is gone for good, tell the next one that the service is held."""
        while self._client is not None:
            _wait_for_end(end)
            while not self._over.wait(_RETRY_S):
                try:
                    client = self._connect()
                except KeeperError:
                    continue
                try:
                    with self._lock.dup() as lock:
                        granted = client.claim_service(self.service, self._processes, lock=lock, wait_s=0.0)[1]
                    fdpass.close_all(granted)
                except KeeperUnavailable:
                    client.close()
                    continue
                except (KeeperError, ValueError) as error:
                    client.close()
                    if not self._over.is_set():
                        self._lost(str(error))
                    return
                with self._changing:
                    self._client.close()
                    self._client, end = client, client.end()
                    if self._left is not None:
                        with contextlib.suppress(KeeperError):  # it is offered again with the next change
                            client.bequeath(self.service, *self._left)
                log.info("the keeper before is gone; process %d holds %s with this one", os.getpid(), self.service)
                break
            else:
                return


def hold(
    service: str,
    *,
    connect: Callable[[], KeeperClient],
    wait_s: float,
    processes: Sequence[wire.Process] | None = None,
    lost: _Lost = lambda why: os._exit(1),
) -> Tenure:
    """Become the only one who answers for a service.

    Args:
        connect: makes a connection to the keeper; this hold takes it over.
        wait_s: seconds to wait in order of asking, the end of a cohort that died included.
        processes: everyone who serves together, this process first; by default this process.
        lost: called from a thread where another keeper says that the service is another's, which cannot be.

    Raises:
        ServiceHeld: another holds it.
        Refused: the keeper does not take these processes.
    """
    processes = [this_process()] if processes is None else processes
    try:
        client = connect()
    except KeeperError as error:
        lock = locks.make_within(service, wait_s)
        if lock is None:
            raise _held(service, f"its lock is taken, and no keeper says by whom: {error}") from error
        log.warning(
            "no keeper: %s is held by the kernel's lock alone, and nobody ends what is left of a cohort", service
        )
        return Tenure(service, processes, lock, None, connect, lost=lost)
    try:
        answer, fds = client.claim_service(service, processes, wait_s=wait_s)
        if not answer.held:
            raise _held(service, answer.why)
        lock, *slabs = fds
        inherited = Inherited(answer.estate, slabs) if answer.estate is not None else None
        return Tenure(service, processes, lock, client, connect, fence_s=answer.fence_s, inherited=inherited, lost=lost)
    except BaseException:
        client.close()
        raise


def _held(service: str, why: str) -> ServiceHeld:
    return ServiceHeld(
        f"{service} is answered for by others",
        why=why,
        fix="It becomes free when they end; fer status shows them",
        service=service,
    )


class ServiceCalls:
    """What a :class:`~fer.weights.client.KeeperClient` can ask about services."""

    _sock: socket.socket
    _call: Any

    def claim_service(
        self, service: str, processes: Sequence[wire.Process], *, wait_s: float, lock: Fd | None = None
    ) -> tuple[wire.ServiceAnswer, list[Fd]]:
        """Ask to be the one who answers for a service, waiting in order of asking; see :func:`hold`.

        The service stays this process's when the connection closes, until one of ``processes`` ends.

        Args:
            lock: of a service that is held already, by a connection to another keeper.

        Returns:
            The answer, and where it is held now the lock and the slabs of what the holder before left.

        Raises:
            Refused: ``not_yours``, ``process_gone``, ``cannot_fence``; with ``lock`` also ``not_the_lock``, ``held``.
        """
        into: list[Fd] = []
        request = wire.ClaimService(0, service=service, processes=list(processes), wait_s=wait_s, again=bool(lock))
        fds = [] if lock is None else [lock]
        answer: wire.ServiceAnswer = self._call(request, wire.ServiceAnswer, fds=fds, into=into, wait_s=wait_s)
        if len(into) != answer.held + len(answer.estate.slabs if answer.estate is not None else ()):
            fdpass.close_all(into)
            raise ProtocolError("the keeper's answer has other descriptors than it names", code="wrong_fds")
        return answer, into

    def bequeath(self, service: str, estate: wire.Estate | None, fds: Sequence[Fd]) -> None:
        """Leave an estate to the next holder of a service that this connection holds; None: none.

        Raises:
            Refused: ``not_yours``, ``too_many_descriptors``.
            ProtocolError: a slab is not what it is said to be.
        """
        self._call(wire.Bequeath(0, service=service, estate=estate), wire.Done, fds=list(fds))

    def release_service(self, service: str, *, pass_on: bool = False) -> None:
        """Give a service back, and its estate if it is not passed on; nothing happens where others hold it."""
        self._call(wire.ReleaseService(0, service=service, pass_on=pass_on), wire.Done)

    def end(self) -> Fd:
        """A descriptor that hangs up when either side has closed the connection; the caller's own."""
        return Fd(os.dup(self._sock.fileno()))


def _wait_for_end(end: Fd) -> None:
    with end:
        poll = select.poll()
        poll.register(end.fileno(), select.POLLRDHUP)
        poll.poll()
