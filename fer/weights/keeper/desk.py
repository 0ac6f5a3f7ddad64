"""What each request does.

A handler checks everything before it changes anything, may run twice for one request (a keeper that was killed after
the first time reads the request again), and returns its reply, or :class:`Later` where the request has to wait. A
waiting request is tried again after every change, and a last time, with ``late`` set, when its time is over.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import fer
from fer.errors import ProtocolError, Refused
from fer.memory.base import HOST
from fer.memory.fd import Fd
from fer.weights import wire
from fer.weights.keeper import offsets, slabs
from fer.weights.keeper.claims import Claims
from fer.weights.keeper.editions import Store, leases_stand
from fer.weights.keeper.groups import Groups
from fer.weights.keeper.records import PAYLOADS, Edition, Peer, Transaction, Wait, new_id, slab_name
from fer.weights.keeper.shelf import Shelf

NEAR_LIMIT = 16
"""Near misses told to a client."""
DESCRIPTOR_LIMIT = 6000
"""Descriptors of editions and transactions, slabs and payloads: with as many connections as the keeper serves they
stay within its unit's fd store (8192), and their names within one variable of the next keeper's environment, which
the kernel cuts at 128 KiB: a longer one would let no keeper start again."""
_OWN_FILES = 64
"""Descriptors left to the keeper itself."""


@dataclass
class Answer:
    """A reply, and the shelf's descriptors that go with it."""

    reply: wire.Reply
    fds: list[Fd] = field(default_factory=list)
    stop: bool = False


class Later:
    """The request waits."""


Handler = Callable[[Any, Peer, Any, list[Fd], bool], "Answer | Later"]


class Desk:
    """Requests of peers that said hello, against the store."""

    def __init__(
        self, store: Store, groups: Groups, claims: Claims, shelf: Shelf, facts: Callable[[int], wire.Status]
    ) -> None:
        self.store = store
        self.groups = groups
        self.claims = claims
        self.shelf = shelf
        self._facts = facts

    def handle(self, peer: Peer, request: wire.Request, fds: list[Fd], *, late: bool = False) -> Answer | Later:
        """Do what a request asks. Descriptors that are kept are taken out of ``fds``.

        Raises:
            FerError: the refusal; ProtocolError ends the connection.
        """
        return _HANDLERS[type(request)](self, peer, request, fds, late)

    def _wait(self, peer: Peer, request: wire.TakeClaim | wire.Commit | wire.AcquireRole | wire.ClaimService) -> Later:
        """Note until when; a wait that outlives the keeper goes on where it was."""
        if peer.wait is None or peer.wait.seq != request.seq:
            until = time.monotonic() + request.wait_s
            peer.wait = Wait(seq=request.seq, until=until, order=self.store.state.tick())
            if isinstance(request, wire.TakeClaim):
                peer.wait.claim = request.key
            if isinstance(request, wire.ClaimService):
                peer.wait.service = request.service
        return Later()

    # --- looking and attaching ---

    def hello(self, peer: Peer, request: wire.Hello, fds: list[Fd], late: bool) -> Answer | Later:
        return Answer(wire.Welcome(request.seq, pid=os.getpid(), version=fer.__version__))

    def find(self, peer: Peer, request: wire.Find, fds: list[Fd], late: bool) -> Answer | Later:
        candidates = [
            wire.Candidate(
                edition=edition.id,
                checkpoint=self._payload(edition, "checkpoint"),
                created=edition.created,
                digests="digests" in edition.payloads,
            )
            for edition in self.store.visible(request.key)
        ]
        near = [
            wire.Near(edition=e.id, gpu=e.key.gpu, rank=e.key.rank, fields=self._payload(e, "fields"))
            for e in self.store.near(request.key, NEAR_LIMIT)
        ]
        stamp = self.store.state.publications
        return Answer(wire.Found(request.seq, candidates=candidates, near=near, stamp=stamp))

    def claim(self, peer: Peer, request: wire.TakeClaim, fds: list[Fd], late: bool) -> Answer | Later:
        outcome = self.groups.claim(peer, request.key, request.seen)
        if outcome is not None:
            return Answer(wire.Claim(request.seq, outcome=outcome))
        if late:
            return Answer(wire.Claim(request.seq, outcome="timeout", holder=self.groups.blocker(request.key)))
        return self._wait(peer, request)

    def unclaim(self, peer: Peer, request: wire.Unclaim, fds: list[Fd], late: bool) -> Answer | Later:
        self.groups.unclaim(peer)
        return Answer(wire.Done(request.seq))

    def lease(self, peer: Peer, request: wire.TakeLease, fds: list[Fd], late: bool) -> Answer | Later:
        edition = self.store.get(request.edition)
        self.store.lease(peer, edition)
        payloads = [name for name in PAYLOADS if name in edition.payloads and name != "fields"]
        out = [self.shelf[edition.payloads[name]] for name in payloads]
        reply = wire.LeaseGranted(request.seq, payloads=payloads, slabs=edition.slabs)
        return Answer(reply, out + self._slabs(edition, 0))

    def slabs(self, peer: Peer, request: wire.GetSlabs, fds: list[Fd], late: bool) -> Answer | Later:
        edition = self._leased(peer, request.edition)
        return Answer(wire.Slabs(request.seq), self._slabs(edition, request.first))

    def release(self, peer: Peer, request: wire.Release, fds: list[Fd], late: bool) -> Answer | Later:
        if request.edition in self.store.state.editions:
            self.store.release(peer, self.store.get(request.edition))
        return Answer(wire.Done(request.seq))

    def _leased(self, peer: Peer, name: str) -> Edition:
        """An edition that this connection has leased. Raises Refused (``not_leased``, ``unknown_edition``)."""
        edition = self.store.get(name)
        if peer.id not in edition.leases:
            raise Refused(f"edition {name} is not leased by this connection", fix="Lease it first.", code="not_leased")
        return edition

    def _slabs(self, edition: Edition, first: int) -> list[Fd]:
        last = min(first + wire.SLABS_A_FRAME, len(edition.slabs))
        return [self.shelf[slab_name(edition.id, number)] for number in range(first, last)]

    def _payload(self, edition: Edition, name: str) -> bytes:
        return slabs.checked_payload(name, self.shelf[edition.payloads[name]])

    # --- publishing ---

    def begin(self, peer: Peer, request: wire.Begin, fds: list[Fd], late: bool) -> Answer | Later:
        slabs.checked_payload("fields", fds[0])
        checkpoint = slabs.checksum(slabs.checked_payload("checkpoint", fds[1]))
        self._refuse_overfull(len(PAYLOADS))
        transaction = self.groups.begin(peer, request.key, checkpoint=checkpoint, total=request.total)
        self._keep(transaction, "fields", fds.pop(0))
        self._keep(transaction, "checkpoint", fds.pop(0))
        return Answer(wire.Begun(request.seq, transaction=transaction.id, offset=transaction.offset))

    def add_slabs(self, peer: Peer, request: wire.AddSlabs, fds: list[Fd], late: bool) -> Answer | Later:
        transaction = self.groups.get(peer, request.transaction)
        for info, fd in zip(request.slabs, fds, strict=True):
            slabs.check_slab(info, fd, transaction.key.gpu)
        size = sum(info.size for info in [*transaction.slabs, *request.slabs] if info.kind == "cuda")
        if transaction.key.gpu != HOST and size > offsets.rounded(transaction.total):
            raise Refused(f"{size} bytes of slabs", why=f"{transaction.total} were announced", code="too_big")
        if transaction.committed:
            raise Refused(f"transaction {transaction.id} takes no slabs", why="it is committed", code="committed")
        self._refuse_overfull(len(fds))
        for info in request.slabs:
            self.shelf.put(slab_name(transaction.id, len(transaction.slabs)), fds.pop(0))
            transaction.slabs.append(info)
        return Answer(wire.Done(request.seq))

    def _refuse_overfull(self, more: int) -> None:
        """Raise Refused (``too_many_descriptors``) where ``more`` descriptors would be too many.

        Every edition counts with all payloads it may ever have, so that nothing that follows its begin is refused.
        """
        state = self.store.state
        kept = [e.slabs for e in state.editions.values()] + [t.slabs for t in state.transactions.values()]
        held = sum(len(PAYLOADS) + len(infos) for infos in kept)
        held += sum(len(service.bequeathed()) for service in state.services.values())
        # A keeper that is started again needs twice the numbers for a moment: it gets them and puts them in order.
        files = (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OWN_FILES) // 2 - len(state.peers)
        limit = min(DESCRIPTOR_LIMIT, files)
        if held + more > limit:
            raise Refused(
                f"{more} more descriptors",
                why=f"the keeper holds {held} and takes {limit}",
                fix="Use bigger slabs (slab_bytes), evict editions, or raise the keeper's limit of open files.",
                code="too_many_descriptors",
            )

    def commit(self, peer: Peer, request: wire.Commit, fds: list[Fd], late: bool) -> Answer | Later:
        published = self.store.state.editions.get(request.transaction)
        if published is not None and peer.id in published.leases:
            # The other ranks completed the group, or a keeper executed this request and died before it answered.
            return Answer(wire.Committed(request.seq, edition=published.id))
        transaction = self.groups.get(peer, request.transaction)
        if not transaction.committed:
            if not fds:
                raise ProtocolError("a commit without a manifest", code="wrong_fds")
            slabs.checked_payload("manifest", fds[0])
            transaction.committed = True
            self._keep(transaction, "manifest", fds.pop(0))
        edition = self.groups.complete(peer, transaction)
        if edition is not None:
            return Answer(wire.Committed(request.seq, edition=edition.id))
        if late:
            self.groups.expire(peer, transaction, request.wait_s)
        return self._wait(peer, request)

    def _keep(self, owner: Edition | Transaction, payload: str, fd: Fd) -> None:
        # A new name each time: the old descriptor has to stay until the journal names the new one.
        owner.payloads[payload] = new_id("p")
        self.shelf.put(owner.payloads[payload], fd)

    def abort(self, peer: Peer, request: wire.Abort, fds: list[Fd], late: bool) -> Answer | Later:
        self.groups.abort(peer, request.transaction)
        return Answer(wire.Done(request.seq))

    # --- an edition's further life ---

    def annotate(self, peer: Peer, request: wire.Annotate, fds: list[Fd], late: bool) -> Answer | Later:
        edition = self._leased(peer, request.edition)
        contents = [slabs.checked_payload(name, fd) for name, fd in zip(request.names, fds, strict=True)]
        for name, content in zip(request.names, contents, strict=True):
            if name in edition.payloads:
                self.store.condemned.append(edition.payloads[name])
            self._keep(edition, name, fds.pop(0))
            if name == "checkpoint":
                edition.checkpoint = slabs.checksum(content)
        return Answer(wire.Done(request.seq))

    def report_lost(self, peer: Peer, request: wire.ReportLost, fds: list[Fd], late: bool) -> Answer | Later:
        if request.edition in self.store.state.editions:
            edition = self.store.get(request.edition)
            if not self.store.exports(peer, edition):
                edition = self._leased(peer, request.edition)
            why = f"rank {edition.key.rank} says: {request.why}"
            self.store.drop(self.store.batch(edition.batch), "lost", why)
        return Answer(wire.Done(request.seq))

    def make_room(self, peer: Peer, request: wire.MakeRoom, fds: list[Fd], late: bool) -> Answer | Later:
        evicted = self.store.make_room(request.gpu, request.needed)
        missing = None if request.needed is None else request.needed - sum(info.bytes for info in evicted)
        self.claims.make_room(request.gpu, missing)
        used = [e for e in self.store.state.editions.values() if e.key.gpu == request.gpu and self._in_use(e)]
        return Answer(wire.Room(request.seq, evicted=evicted, leased=[self.store.info(e) for e in used]))

    def _in_use(self, edition: Edition) -> bool:
        return any(other.leases for other in self.store.batch(edition.batch))

    def evict(self, peer: Peer, request: wire.Evict, fds: list[Fd], late: bool) -> Answer | Later:
        return Answer(wire.Evicted(request.seq, editions=self.store.evict(request.edition, request.gpu)))

    def status(self, peer: Peer, request: wire.AskStatus, fds: list[Fd], late: bool) -> Answer | Later:
        return Answer(self._facts(request.seq))

    # --- roles and the keeper ---

    def acquire_role(self, peer: Peer, request: wire.AcquireRole, fds: list[Fd], late: bool) -> Answer | Later:
        roles = self.store.state.roles
        if roles.setdefault(request.role, peer.id) == peer.id:
            return Answer(wire.RoleAnswer(request.seq, acquired=True))
        return Answer(wire.RoleAnswer(request.seq, acquired=False)) if late else self._wait(peer, request)

    def release_role(self, peer: Peer, request: wire.ReleaseRole, fds: list[Fd], late: bool) -> Answer | Later:
        if self.store.state.roles.get(request.role) == peer.id:
            del self.store.state.roles[request.role]
        return Answer(wire.Done(request.seq))

    def claim_service(self, peer: Peer, request: wire.ClaimService, fds: list[Fd], late: bool) -> Answer | Later:
        held = self.claims.take(peer, request, fds)
        if held is not None:
            reply = wire.ServiceAnswer(request.seq, held=True, fence_s=held.fence_s, estate=held.estate)
            return Answer(reply, [self.shelf[held.lock], *(self.shelf[name] for name in held.bequeathed())])
        if not late:
            return self._wait(peer, request)
        why, holder = self.claims.obstacle(request.service)
        return Answer(wire.ServiceAnswer(request.seq, held=False, why=why, holder=holder))

    def release_service(self, peer: Peer, request: wire.ReleaseService, fds: list[Fd], late: bool) -> Answer | Later:
        self.claims.release(peer, request.service, pass_on=request.pass_on)
        return Answer(wire.Done(request.seq))

    def bequeath(self, peer: Peer, request: wire.Bequeath, fds: list[Fd], late: bool) -> Answer | Later:
        if request.estate is not None:
            for info, fd in zip(request.estate.slabs, fds, strict=True):
                slabs.check_estate(info, fd, request.estate.gpu)
            self._refuse_overfull(len(fds))
        self.claims.bequeath(peer, request, fds)
        return Answer(wire.Done(request.seq))

    def stop(self, peer: Peer, request: wire.Stop, fds: list[Fd], late: bool) -> Answer | Later:
        state = self.store.state
        using = {p for e in state.editions.values() for p in e.leases}
        loading = {c.peer for c in state.claims} | {t.peer for t in state.transactions.values()}
        others = (using | loading) - {peer.id}
        if others and not request.force:
            raise leases_stand(
                "the keeper does not stop while engines use or load weights",
                [self.store.holder(p) for p in sorted(using - {peer.id})],
                [self.store.holder(p) for p in sorted(loading - {peer.id})],
            )
        return Answer(wire.Done(request.seq), stop=True)


_HANDLERS: dict[type[wire.Request], Handler] = {
    wire.Hello: Desk.hello,
    wire.Find: Desk.find,
    wire.TakeClaim: Desk.claim,
    wire.Unclaim: Desk.unclaim,
    wire.TakeLease: Desk.lease,
    wire.GetSlabs: Desk.slabs,
    wire.Release: Desk.release,
    wire.Begin: Desk.begin,
    wire.AddSlabs: Desk.add_slabs,
    wire.Commit: Desk.commit,
    wire.Abort: Desk.abort,
    wire.Annotate: Desk.annotate,
    wire.ReportLost: Desk.report_lost,
    wire.MakeRoom: Desk.make_room,
    wire.Evict: Desk.evict,
    wire.AskStatus: Desk.status,
    wire.AcquireRole: Desk.acquire_role,
    wire.ReleaseRole: Desk.release_role,
    wire.ClaimService: Desk.claim_service,
    wire.ReleaseService: Desk.release_service,
    wire.Bequeath: Desk.bequeath,
    wire.Stop: Desk.stop,
}
