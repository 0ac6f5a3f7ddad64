"""The keeper's loop: one thread, no call that waits for a peer.

Every request runs through the same steps: look at it, do it, hand new descriptors to the fd store, write the journal,
answer, take it off the socket. Killed between any two of them, the next keeper does what is left, and only that.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from fer.errors import FerBug, FerError, PeerRefused, ProtocolError
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.weights import wire
from fer.weights.keeper.budget import Budget
from fer.weights.keeper.claims import Claims
from fer.weights.keeper.connection import BLOCKED_S, HELLO_S, Connection, Outgoing
from fer.weights.keeper.desk import Desk, Later
from fer.weights.keeper.editions import Store
from fer.weights.keeper.faults import Faults
from fer.weights.keeper.groups import Groups
from fer.weights.keeper.journal import Journal
from fer.weights.keeper.place import Place
from fer.weights.keeper.process import born
from fer.weights.keeper.protection import Protection
from fer.weights.keeper.records import Peer, new_id
from fer.weights.keeper.shelf import Shelf
from fer.weights.keeper.status import status

log = logging.getLogger("fer.keeper")

CONNECTIONS = 1024
"""How many clients are served at a time."""
REPEATABLE = 8192
"""Bytes; longer answers are not remembered, their requests change nothing when they are executed again."""
RESTART = 75
"""Exit code after SIGHUP: whoever keeps our descriptors starts us again, with the code that is now installed."""
_READ_ONLY = (wire.Find, wire.GetSlabs, wire.AskStatus)
_ACCEPT_PAUSE_S = 0.5
_IN = select.EPOLLIN | select.EPOLLRDHUP
_OUT = select.EPOLLOUT | select.EPOLLRDHUP
_QUIET = select.EPOLLRDHUP
_GONE = select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR


class Server:
    """A keeper with all it has; :meth:`run` serves until it is told to stop."""

    def __init__(
        self,
        place: Place,
        listener: socket.socket,
        journal: Journal,
        store: Store,
        shelf: Shelf,
        protection: Protection,
        *,
        budget: Budget,
        allow_uids: tuple[int, ...] = (),
    ) -> None:
        self.place, self.listener, self.journal, self.shelf = place, listener, journal, shelf
        self.protection, self.budget = protection, budget
        self.store = store
        self.groups = Groups(self.store)
        self.claims = Claims(self.store, shelf)
        self.desk = Desk(
            self.store, self.groups, self.claims, shelf, lambda seq: status(seq, store, shelf, self.protection.kind)
        )
        self.faults = Faults(store.state.restarts)
        self.connections: dict[str, Connection] = {}
        self.stopping: int | None = None  # the exit code
        self._users = {os.getuid(), *allow_uids}
        self._epoll = select.epoll()
        self._sources: dict[int, Callable[[int], None]] = {}
        self._ending: list[Connection] = []
        self._accept_at: float | None = None
        self._budget_at: float | None = None
        self._keep_store = False

    # --- the loop ---

    def run(self) -> int:
        """Serve; the process's exit code."""
        self._watch_signals()
        self.listener.setblocking(False)
        self.watch(self.listener.fileno(), lambda events: self._accept())
        self.protection.start(self.watch, self.unwatch)
        self.claims.start(self.watch, self.unwatch, lambda: self._settle([], "fence"))
        while self.stopping is None:
            self._turn(self._epoll.poll(self._timeout()))
        self._stop()
        return self.stopping

    def begin(self, kind: str, text: str) -> None:
        """Note how this keeper came to be, make everything durable and say that it is ready."""
        self.store.note(kind, text)
        self._bury()
        self._balance()
        self._save(kind)
        try:
            if self.shelf.store is not None:
                self.shelf.store.send("READY=1")
        except OSError as error:
            self.protection.lost(f"the fd store failed: {error.strerror or error}")

    def abandon(self, peer: Peer) -> None:
        """Treat a peer as gone whose descriptors did not come back whole."""
        if peer.id in self.connections:
            self._hang_up(self.connections[peer.id], "lost descriptors with the fd store")
        else:
            self._mourn(peer)

    def watch(self, fd: int, callback: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call back with the events of a descriptor."""
        self._sources[fd] = callback
        self._epoll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Stop that; to be called before the descriptor is closed."""
        if self._sources.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def adopt(self, connection: Connection) -> None:
        """Serve a connection."""
        self.connections[connection.id] = connection
        self.watch(connection.sock.fileno(), lambda events: self._on_connection(connection, events), _IN)

    def _turn(self, events: list[tuple[int, int]]) -> None:
        # The dead first: what they held is free before the living ask for it.
        for fd, seen in sorted(events, key=lambda event: not event[1] & _GONE):
            if callback := self._sources.get(fd):  # an earlier event of this turn may have ended it
                callback(seen)
            self._bury()
        self._expire()
        self._bury()
        if self.place.lost and not self.store.in_use():
            log.info("stopping: nobody can reach this keeper and nobody uses what it holds")
            self.stopping = 0
        if self.store.noted:
            self._save("note")

    def _timeout(self) -> float:
        times = [c.deadline for c in self.connections.values() if c.deadline is not None]
        times += [p.wait.until for c in self.connections.values() if c.waiting and (p := c.peer) and p.wait]
        times += [at for at in (self._accept_at, self._budget_at, self.place.look_at, self.protection.retry_at) if at]
        times += self.claims.times()
        return max(min(times) - time.monotonic(), 0) if times else -1

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self.connections.values()):
            if connection.deadline is not None and connection.deadline <= now:
                self._hang_up(connection, "said nothing" if connection.peer is None else "stopped reading")
        if any(c.waiting and c.peer and c.peer.wait and c.peer.wait.until <= now for c in self.connections.values()):
            self._settle([], "wait")
        self.claims.expire(now)
        if self._budget_at is not None and self._budget_at <= now:
            self._settle([], "grace")
        if self.place.look_at is not None and self.place.look_at <= now and self.place.look(now):
            self.store.note("unreachable", f"{self.place.lost}; this keeper ends as soon as nobody uses what it holds")
        if self._accept_at is not None and self._accept_at <= now:
            self._accept_at = None
            self.watch(self.listener.fileno(), lambda events: self._accept())
        if self.protection.retry_at is not None and self.protection.retry_at <= now:
            self.protection.restore()

    def _watch_signals(self) -> None:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._signals = (ours, theirs)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.watch(ours.fileno(), lambda events: self._on_signals(ours.recv(64)))

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGHUP in numbers and self.protection.kind != "none":
            log.info("restarting in place")
            self.stopping, self._keep_store = RESTART, True
        if signal.SIGTERM in numbers or signal.SIGINT in numbers:
            # systemd itself frees the store when the unit stops, and keeps it when the unit is restarted.
            self.stopping, self._keep_store = 0, self.protection.kind == "systemd"
            log.info("stopping on a signal")

    # --- connections ---

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, _ = self.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("cannot accept: %s", error)
                self.unwatch(self.listener.fileno())
                self._accept_at = time.monotonic() + _ACCEPT_PAUSE_S
                return
            connection = Connection.over(sock, new_id("c"))
            connection.deadline = time.monotonic() + HELLO_S
            if connection.uid not in self._users:
                why = f"user {connection.uid} is not in allow_uids of the keeper of user {os.getuid()}"
                connection.refusal = PeerRefused("the keeper does not serve this user", why=why, code="foreign_user")
            elif len(self.connections) >= CONNECTIONS:
                connection.refusal = ProtocolError(f"the keeper serves {CONNECTIONS} connections already", code="busy")
            self.adopt(connection)

    def _on_connection(self, connection: Connection, events: int) -> None:
        if events & _GONE:
            self._hang_up(connection, "")
        elif connection.out is not None:
            if events & select.EPOLLOUT:
                self._flush(connection)
        elif events & select.EPOLLIN and connection.waiting is None:
            self._serve(connection)

    def _hang_up(self, connection: Connection, why: str) -> None:
        """End a connection; what it held goes with the next :meth:`_bury`."""
        if connection.dead:
            return
        connection.dead = True
        if why:
            log.info("dropped connection of %d: it %s", connection.pid, why)
        self.unwatch(connection.sock.fileno())
        self._ending.append(connection)

    def _bury(self) -> None:
        """Take from the dead what they held."""
        while self._ending:
            ending, self._ending = self._ending, []
            for connection in ending:
                self.connections.pop(connection.id, None)
                if connection.out is not None:
                    connection.finish()
                if connection.peer is None:
                    connection.sock.close()
                else:
                    self._mourn(connection.peer)
            if any(connection.peer for connection in ending):
                self._settle([], "hangup")

    def _mourn(self, peer: Peer) -> None:
        state = self.store.state
        self.groups.leave(peer)
        self.claims.leave(peer)
        self.store.release_all(peer)
        state.roles = {role: holder for role, holder in state.roles.items() if holder != peer.id}
        state.peers.pop(peer.id, None)
        self.store.condemned.append(peer.id)

    # --- requests ---

    def _serve(self, connection: Connection) -> None:
        try:
            frame, fds, truncated = connection.peek()
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(connection, "broke")
            return
        try:
            self._answer(connection, frame, fds, truncated)
        except FerError as error:
            log.info("refused %d: %s", connection.pid, error)
            reply = wire.Failed(0, error=error.to_dict())
            self._deliver(connection, Outgoing(wire.encode(reply), "refusal", close=True))
        finally:
            fdpass.close_all(fds)

    def _answer(self, connection: Connection, frame: bytes, fds: list[Fd], truncated: bool) -> None:
        """Execute one request. Raises FerError where that ends the connection."""
        if connection.refusal is not None:
            raise connection.refusal
        request = _read(frame, fds, truncated)
        if isinstance(request, wire.Hello):
            peer = self._greet(connection, request)
        elif connection.peer is not None:
            peer = connection.peer
        else:
            raise ProtocolError("the first request must be hello", code="no_hello")
        name = str(request.__struct_config__.tag)
        if request.seq == peer.done_seq and peer.done:
            self._deliver(connection, Outgoing(peer.done, name))
            return
        if request.seq <= peer.done_seq:
            raise ProtocolError(f"request {request.seq} after request {peer.done_seq}", code="old_number")
        out = self._execute(peer, request, fds)
        if out is None:
            connection.waiting = request
            self._epoll.modify(connection.sock.fileno(), _QUIET)
        if isinstance(request, _READ_ONLY) and out is not None:
            self.faults.at("executed", name)
            self._deliver(connection, out)
        else:
            self._settle([(connection, out)] if out is not None else [], name)

    def _greet(self, connection: Connection, hello: wire.Hello) -> Peer:
        if connection.peer is None:
            label = "".join(c if c.isprintable() else "?" for c in hello.label)  # it goes to logs and terminals
            connection.peer = Peer(connection.id, connection.pid or hello.pid, connection.uid, label)
            connection.peer.born = born(connection.pid)
            self.store.state.peers[connection.id] = connection.peer
            self.shelf.put(connection.id, connection.sock)
            connection.deadline = None
        return connection.peer

    def _execute(self, peer: Peer, request: wire.Request, fds: list[Fd], *, late: bool = False) -> Outgoing | None:
        """The answer to a request, None where it waits. Raises ProtocolError."""
        name = str(request.__struct_config__.tag)
        reply: wire.Reply
        held: list[Fd] = []
        stop = False
        try:
            outcome = self.desk.handle(peer, request, fds, late=late)
            if isinstance(outcome, Later):
                return None
            reply, held, stop = outcome.reply, outcome.fds, outcome.stop
        except ProtocolError:
            raise
        except FerError as error:
            reply = wire.Failed(request.seq, error=error.to_dict())
        except Exception as error:
            log.exception("request %s of %d failed", name, peer.pid)
            bug = FerBug(
                f"the keeper could not execute {name}", why=repr(error), fix="Please report this with its log."
            )
            reply = wire.Failed(request.seq, error=bug.to_dict())
        peer.wait = None
        frame, out_fds, body = wire.pack_reply(reply, held)
        if not out_fds and len(frame) <= REPEATABLE and not isinstance(request, _READ_ONLY):
            peer.done_seq, peer.done = request.seq, frame
        return Outgoing(frame, name, out_fds, body, stop=stop)

    # --- after a change ---

    def _settle(self, ready: list[tuple[Connection, Outgoing]], name: str) -> None:
        """Let a change have its consequences, make them durable, and only then tell anybody."""
        ready = ready + self._wake()
        self.claims.prune()
        self._balance()
        self.faults.at("executed", name)
        self._save(name)
        for connection, out in ready:
            if not connection.dead:
                self._deliver(connection, out)

    def _balance(self) -> None:
        """Apply the budget, and find out when to do so again."""
        now = time.monotonic()
        self.budget.enforce(self.store, now)
        self._budget_at = self.budget.next_end(self.store, now)

    def _wake(self) -> list[tuple[Connection, Outgoing]]:
        """Answers to requests that need not wait any longer, those that came first first."""
        ready: list[tuple[Connection, Outgoing]] = []
        progress = True
        while progress:
            progress = False
            now = time.monotonic()
            waiting = [
                (c.peer.wait.order, c) for c in self.connections.values() if c.waiting and c.peer and c.peer.wait
            ]
            for _, connection in sorted(waiting, key=lambda pair: pair[0]):
                peer, request = connection.peer, connection.waiting
                if peer is None or peer.wait is None or request is None or connection.dead:
                    continue
                out = self._execute(peer, request, [], late=peer.wait.until <= now)
                if out is not None:
                    connection.waiting = None
                    ready.append((connection, out))
                    progress = True
        return ready

    def _save(self, name: str) -> None:
        try:
            self.shelf.secure()
        except OSError as error:
            self.protection.lost(f"the fd store failed: {error.strerror or error}")
        self.faults.at("stored", name)
        self.store.noted = False
        self.journal.write(msgspec.msgpack.encode(self.store.state))
        self.faults.at("journalled", name)
        condemned, self.store.condemned = self.store.condemned, []
        try:
            self.shelf.drop(condemned)
        except OSError as error:
            self.protection.lost(f"the fd store failed: {error.strerror or error}")

    def _deliver(self, connection: Connection, out: Outgoing) -> None:
        connection.out = out
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        """Send the answer as soon as there is room for it, and then take the request off the socket."""
        assert connection.out is not None
        name = connection.out.request
        try:
            connection.send()
            self.faults.at("replied", name)
            connection.consume()
            self.faults.at("consumed", name)
        except BlockingIOError:
            if connection.deadline is None or connection.peer is None:
                connection.deadline = time.monotonic() + BLOCKED_S
                self._epoll.modify(connection.sock.fileno(), _OUT)
            return
        except (OSError, ValueError):
            self._hang_up(connection, "broke")
            return
        out = connection.finish()
        if connection.peer is not None:
            connection.deadline = None
        self._epoll.modify(connection.sock.fileno(), _IN)
        if out.stop:
            self.stopping = 0
        if out.close:
            self._hang_up(connection, "")

    # --- the end ---

    def _stop(self) -> None:
        """Give everything back, or leave it in the store where that is what was asked for."""
        if not self._keep_store:
            self.place.clear()
        store = self.shelf.store
        try:
            if store is not None and not self._keep_store:
                # The store first hears that this is no crash: a minder would start us again with what it still has.
                store.send("STOPPING=1")
                self.shelf.drop(self.shelf.names())
        except OSError as error:
            log.warning("the fd store does not answer: %s", error)
        self.shelf.close()
        self.protection.close()
        log.info("stopped")


def _read(frame: bytes, fds: list[Fd], truncated: bool) -> wire.AnyRequest:
    """The request of a message. Raises ProtocolError."""
    if truncated:
        raise ProtocolError("a message is too long", why=f"at most {wire.FRAME_LIMIT} bytes", code="oversize")
    if not frame:
        raise ProtocolError("a message is empty", code="empty")
    request = wire.decode_request(frame)
    wanted = wire.descriptors_of(request)
    if len(fds) != wanted:
        raise ProtocolError(f"{len(fds)} descriptors came with a request of {wanted}", code="wrong_fds")
    return request
