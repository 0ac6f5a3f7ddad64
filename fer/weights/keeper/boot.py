"""From a bare process, or from what a killed keeper left in the fd store, to a server that may accept."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path

import msgspec

from fer import paths
from fer.errors import FerError
from fer.memory.fd import Fd
from fer.options import KeeperOptions
from fer.weights.keeper import notify, sockets
from fer.weights.keeper.budget import Budget
from fer.weights.keeper.connection import Connection
from fer.weights.keeper.editions import Store
from fer.weights.keeper.journal import Journal
from fer.weights.keeper.place import Place
from fer.weights.keeper.process import raise_limits
from fer.weights.keeper.protection import Protection
from fer.weights.keeper.records import State
from fer.weights.keeper.server import Server
from fer.weights.keeper.shelf import Shelf

log = logging.getLogger("fer.keeper")

_states = msgspec.msgpack.Decoder(State)
LISTENER, JOURNAL, LOCK = "listener", "journal", "lock"
"""The keeper's own descriptors on the shelf."""


def boot(directory: Path, store: str) -> Server:
    """A keeper for a directory; goes on where one that was killed stopped, if its descriptors were passed to us.

    Args:
        store: ``systemd`` to use the service manager's fd store, ``minder`` for our own.

    Raises:
        KeeperError, PeerRefused, OptionError: it cannot be the keeper of that directory.
    """
    raise_limits()
    options = KeeperOptions.load()
    fds = notify.inherited()
    shelf = Shelf()
    paths.ensure_private(directory)
    lock = fds.pop(LOCK, None)
    fresh = lock is None
    if lock is None:
        lock = sockets.lock(directory)
    sockets.sign(lock)
    journal_fd, listener_fd = fds.pop(JOURNAL, None), fds.pop(LISTENER, None)
    journal = Journal(journal_fd) if journal_fd else Journal.create()
    if listener_fd:
        listener = socket.socket(fileno=listener_fd.detach())
    else:
        listener = sockets.listen(directory, others=bool(options.allow_uids))
    state, kind = _recall(journal)
    known = Store(state)
    protection = Protection(directory, shelf, known.note)
    budget = Budget(editions=options.budget_editions, bytes=options.budget_bytes, grace_s=options.grace_s)
    place = Place(directory, lock, time.monotonic(), fresh=fresh)
    server = Server(place, listener, journal, known, shelf, protection, budget=budget, allow_uids=options.allow_uids)
    _protect(protection, store, fds)
    own: dict[str, Fd | socket.socket] = {LOCK: lock, LISTENER: listener, JOURNAL: journal.fd}
    inherited = {LOCK: not fresh, LISTENER: bool(listener_fd), JOURNAL: bool(journal_fd)}
    shelf.restore({name: held for name, held in own.items() if inherited[name]})
    for name, held in own.items():
        if not inherited[name]:
            shelf.put(name, held)
    _restore(server, fds)
    server.begin(kind, f"keeper {os.getpid()} in {directory}")
    return server


def _recall(journal: Journal) -> tuple[State, str]:
    """The state to go on with, and how that is called: started, restarted, or forgot."""
    content = journal.read()
    if content is None:
        return State(started=time.time()), "started"
    try:
        state = _states.decode(content)
    except msgspec.DecodeError as error:
        # Another version wrote it. Dying here would only be repeated for ever, with the memory held by nobody's use.
        log.error("the journal of the keeper before cannot be read, everything is dropped: %s", error)
        return State(started=time.time(), restarts=1), "forgot"
    state.restarts += 1
    return state, "restarted"


def _protect(protection: Protection, store: str, fds: dict[str, Fd]) -> None:
    sock, minder = fds.pop("notify", None), fds.pop("minder", None)
    if sock is not None and minder is not None:
        protection.under_minder(sock, minder)
    elif store == "systemd" and (manager := notify.from_environment()) is not None:
        protection.under_systemd(manager)


def _restore(server: Server, fds: dict[str, Fd]) -> None:
    """Put inherited descriptors in their places, before the first request is looked at.

    What the journal does not know was given to the store by a request that will be executed again, or was about to be
    dropped: it goes. What the journal knows and the store has not ends whatever needed it.
    """
    state, store, shelf = server.store.state, server.store, server.shelf
    known = {name for e in state.editions.values() for name in e.names()}
    known |= {name for t in state.transactions.values() for name in t.names()}
    known |= {service.lock for service in state.services.values() if service.lock}
    known |= {name for service in state.services.values() for name in service.bequeathed()}
    shelf.restore({name: fd for name, fd in fds.items() if name in known or name not in state.peers})
    store.condemned += [name for name in fds if name not in known and name not in state.peers]
    for edition in list(state.editions.values()):
        missing = [name for name in edition.names() if name not in fds]
        if missing and edition.id in state.editions:
            why = f"the fd store did not give back {len(missing)} of its descriptors"
            store.drop(store.batch(edition.batch), "lost", why)
    for service in state.services.values():
        if service.lock not in fds:
            service.lock = ""
        if any(name not in fds for name in service.bequeathed()):
            server.claims.estates.drop(service, "the fd store did not give all of it back")
    for peer in list(state.peers.values()):
        fd = fds.get(peer.id)
        broken = any(name not in fds for t in state.transactions.values() if t.peer == peer.id for name in t.names())
        if fd is not None:
            sock = socket.socket(fileno=fd.detach())
            shelf.restore({peer.id: sock})
            connection = Connection.over(sock, peer.id)
            connection.peer = peer
            server.adopt(connection)
        if fd is None or broken:
            server.abandon(peer)


def serve(directory: Path, store: str) -> int:
    """Be the keeper; the process's exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s fer-keeper[%(process)d] %(message)s")
    logging.raiseExceptions = False  # a log that nobody reads any more is no reason to stop
    try:
        server = boot(directory, store)
    except FerError as error:
        log.error("%s", error)
        return 3
    except OSError as error:
        log.error("cannot keep anything in %s: %s", directory, error)
        return 3
    try:
        print(f"fer keeper {os.getpid()} listens in {directory}", flush=True)  # noqa: T201 - supervisors wait for it
    except OSError:
        pass  # nobody reads it
    return server.run()
