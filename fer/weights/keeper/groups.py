"""Who may load what, and groups that become visible at once or not at all.

A *claim* makes one connection the loader of a (group, rank, gpu); everyone else waits for what it publishes. The ranks
of one launch publish together. Where ranks of two launches each hold what the other waits for, the younger launch is
*doomed*: it loads for itself and publishes nothing, so that no group is ever a mix and nobody waits in a circle. A
launch of several ranks that loses one of them before its group is visible is doomed likewise.
"""

from __future__ import annotations

import time
from typing import Literal

from fer.errors import Refused
from fer.weights.keeper import offsets
from fer.weights.keeper.editions import Store
from fer.weights.keeper.records import Claimed, Edition, Failure, Launch, Peer, Transaction, new_id
from fer.weights.wire import Holder, Key

_HEADINGS = {
    "group_failed": "the group of this launch came to nothing",
    "launches_met": "two launches load the same group",
    "exists": "the same edition is kept already",
}


class Groups:
    """Claims, launches and transactions of a store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.state = store.state

    # --- claims ---

    def claim(self, peer: Peer, key: Key, seen: int) -> Literal["claimed", "look_again"] | None:
        """Make ``peer`` the loader of ``key``; None where it has to wait. ``seen`` counts publications it knows.

        Raises:
            Refused: its launch is doomed.
        """
        self._join(peer, key)
        if any(edition.published > seen for edition in self.store.visible(key)):
            return "look_again"
        owner = self.owner(key)
        if owner is not None and owner.peer != peer.id and self._meet(key, owner):
            self._refuse_doomed(self._launch(key))
            owner = self.owner(key)
        if owner is None and self.blocker(key) is None:
            self.state.claims.append(Claimed(key=key, peer=peer.id))
            return "claimed"
        return "claimed" if owner is not None and owner.peer == peer.id else None

    def owner(self, key: Key) -> Claimed | None:
        """The claim on a key, whoever's launch holds it."""
        wanted = (key.group, key.rank, key.gpu)
        return next((c for c in self.state.claims if (c.key.group, c.key.rank, c.key.gpu) == wanted), None)

    def blocker(self, key: Key) -> Holder | None:
        """Who holds what this launch needs: the key itself, or that of another of its ranks, which waits already.

        A launch that waits anywhere takes no further claims: it would only hold up the one it waits for.
        """
        waiting = [p.wait.claim for p in self.state.peers.values() if p.wait is not None and p.wait.claim is not None]
        for wanted in [key, *(k for k in waiting if (k.group, k.launch) == (key.group, key.launch))]:
            owner = self.owner(wanted)
            if owner is not None and (wanted is key or owner.key.launch != key.launch):
                return self.store.holder(owner.peer)
        return None

    def unclaim(self, peer: Peer) -> None:
        """Give back what a peer has claimed; a group it has a part in cannot become whole any more."""
        for claim in [c for c in self.state.claims if c.peer == peer.id]:
            launch = self._launch(claim.key)
            if launch is not None and any(_of(t.key, launch) for t in self.state.transactions.values()):
                self._fail(launch, "group_failed", f"rank {claim.key.rank} gave up its claim")
            self.state.claims = [c for c in self.state.claims if c.peer != peer.id]

    def _meet(self, key: Key, owner: Claimed) -> bool:
        """Two launches want one key. Where they have crossed, doom the younger; True where that was decided."""
        ours, theirs = self._launch(key), self._launch(owner.key)
        if ours is None or theirs is None or ours is theirs:
            return False
        if not any(_of(claim.key, ours) for claim in self.state.claims):
            return False  # we hold nothing, so waiting harms nobody
        younger = max(ours, theirs, key=lambda launch: launch.order)
        self._fail(younger, "launches_met", f"launches {ours.name} and {theirs.name} each hold what the other needs")
        return True

    # --- launches ---

    def _launch(self, key: Key) -> Launch | None:
        return next((launch for launch in self.state.launches if _of(key, launch)), None)

    def _join(self, peer: Peer, key: Key) -> None:
        launch = self._launch(key)
        if launch is None:
            launch = Launch(group=key.group, name=key.launch, local_size=key.local_size, order=self.state.tick())
            self.state.launches.append(launch)
        if launch.local_size != key.local_size:
            raise Refused(
                f"launch {key.launch} has {launch.local_size} ranks on this host",
                why=f"rank {key.rank} says {key.local_size}",
                code="group_mismatch",
            )
        if peer.id not in launch.peers:
            launch.peers.append(peer.id)
        self._refuse_doomed(launch)

    def _refuse_doomed(self, launch: Launch | None) -> None:
        if launch is not None and launch.doom is not None:
            raise refusal(launch.doom)

    def _fail(self, launch: Launch, code: str, why: str) -> None:
        """Drop a launch's claims and transactions, and let none of its ranks publish again."""
        for transaction in [t for t in self.state.transactions.values() if _of(t.key, launch)]:
            self._forget(transaction)
            if transaction.peer in self.state.peers:
                self.state.peers[transaction.peer].failed[transaction.id] = Failure(code=code, why=why)
        self.state.claims = [claim for claim in self.state.claims if not _of(claim.key, launch)]
        launch.doom = Failure(code=code, why=why)
        self.store.note("dropped", f"launch {launch.name}: {why}")

    def _forget(self, transaction: Transaction) -> None:
        del self.state.transactions[transaction.id]
        self.store.condemned += transaction.names()

    # --- transactions ---

    def begin(self, peer: Peer, key: Key, *, checkpoint: bytes, total: int) -> Transaction:
        """Open a transaction; takes the claim where nobody has it.

        Raises:
            Refused: ``exists``, ``claimed``, ``launches_met``, ``group_failed``, ``group_mismatch``, ``no_range``.
        """
        self._join(peer, key)
        self._refuse_equal(key, checkpoint)
        owner = self.owner(key)
        if owner is not None and owner.peer != peer.id and self._meet(key, owner):
            self._refuse_doomed(self._launch(key))
            owner = self.owner(key)
        if owner is not None and owner.peer != peer.id:
            who = self.store.holder(owner.peer)
            raise Refused(
                f"rank {key.rank} of this group is being loaded by {who.pid} {who.label}".rstrip(),
                why="only one publishes",
                code="launches_met" if owner.key.launch != key.launch else "claimed",
            )
        for other in self.state.transactions.values():
            if (other.key.group, other.key.launch, other.key.rank) == (key.group, key.launch, key.rank):
                raise Refused(f"rank {key.rank} of launch {key.launch} is being published already", code="claimed")
        offset = offsets.place(self.state, key.gpu, total)
        if owner is None:
            self.state.claims.append(Claimed(key=key, peer=peer.id))
        transaction = Transaction(
            id=new_id("e"), peer=peer.id, key=key, total=total, offset=offset, checkpoint=checkpoint
        )
        self.state.transactions[transaction.id] = transaction
        return transaction

    def get(self, peer: Peer, name: str) -> Transaction:
        """A peer's open transaction.

        Raises:
            Refused: ``unknown_transaction``, or the code it failed with.
        """
        if name in peer.failed:
            raise refusal(peer.failed[name])
        transaction = self.state.transactions.get(name)
        if transaction is None or transaction.peer != peer.id:
            raise Refused(
                f"no transaction {name} is open on this connection",
                code="unknown_transaction",
                why="it ended or is another's",
            )
        return transaction

    def abort(self, peer: Peer, name: str) -> None:
        """Drop a transaction; nothing happens where it is over already."""
        if name in peer.failed or name in self.state.editions:
            return
        transaction = self.get(peer, name)
        self._lose(transaction.key, peer, f"rank {transaction.key.rank} gave up")

    def complete(self, peer: Peer, transaction: Transaction) -> Edition | None:
        """Publish the group if all of its ranks have committed; this rank's edition, None as long as some have not."""
        launch = self._launch(transaction.key)
        members = [t for t in self.state.transactions.values() if launch is not None and _of(t.key, launch)]
        if launch is None or sum(t.committed for t in members) < launch.local_size:
            return None
        for member in members:
            if self._equal(member.key, member.checkpoint):
                self._fail(launch, "exists", f"rank {member.key.rank} is kept already")
                raise refusal(peer.failed[transaction.id])
        self._publish(members)
        self.state.claims = [claim for claim in self.state.claims if not _of(claim.key, launch)]
        return self.state.editions[transaction.id]

    def expire(self, peer: Peer, transaction: Transaction, seconds: float) -> None:
        """The other ranks did not commit in time: the group comes to nothing. Raises Refused (``group_failed``)."""
        launch = self._launch(transaction.key)
        if launch is not None:
            done = sorted(t.key.rank for t in self.state.transactions.values() if _of(t.key, launch) and t.committed)
            why = f"only ranks {', '.join(done)} of {launch.local_size} had committed after {seconds:g} s"
            self._fail(launch, "group_failed", why)
        raise refusal(peer.failed[transaction.id])

    def _publish(self, members: list[Transaction]) -> None:
        batch = new_id("b")
        now = time.time()
        for member in members:
            self.state.publications += 1
            edition = Edition(
                id=member.id,
                key=member.key,
                slabs=member.slabs,
                payloads=member.payloads,
                offset=member.offset,
                total=member.total,
                checkpoint=member.checkpoint,
                batch=batch,
                created=now,
                published=self.state.publications,
                used=now,
                order=self.state.tick(),
                exporter=member.peer if any(slab.kind == "cuda-ipc" for slab in member.slabs) else "",
                leases=[member.peer],
            )
            del self.state.transactions[member.id]
            self.state.editions[edition.id] = edition
            self.store.note(
                "published", f"{edition.id}: {edition.size} bytes on {member.key.gpu}, rank {member.key.rank}"
            )

    def _equal(self, key: Key, checkpoint: bytes) -> bool:
        return any(edition.checkpoint == checkpoint for edition in self.store.visible(key))

    def _refuse_equal(self, key: Key, checkpoint: bytes) -> None:
        if self._equal(key, checkpoint):
            raise refusal(Failure(code="exists", why=f"rank {key.rank} on {key.gpu} with this checkpoint"))

    # --- the end of a connection ---

    def leave(self, peer: Peer) -> None:
        """A connection closed: nothing it had not finished stays."""
        for claim in [c for c in self.state.claims if c.peer == peer.id]:
            self._lose(claim.key, peer, f"rank {claim.key.rank} ({peer.pid} {peer.label}".rstrip() + ") went away")
        for edition in [e for e in self.state.editions.values() if e.exporter == peer.id]:
            if edition.id in self.state.editions:  # another of its batch may have taken it along
                why = f"its exporter ({peer.pid} {peer.label}".rstrip() + ") went away"
                self.store.drop(self.store.batch(edition.batch), "lost", why)
        for launch in self.state.launches:
            if peer.id in launch.peers:
                launch.peers.remove(peer.id)
        self.state.launches = [launch for launch in self.state.launches if launch.peers]

    def _lose(self, key: Key, peer: Peer, why: str) -> None:
        """One rank is out: with others on this host the whole launch is, alone only what the peer began."""
        launch = self._launch(key)
        if launch is not None and launch.local_size > 1:
            if launch.doom is None:
                self._fail(launch, "group_failed", why)
            return
        for transaction in [t for t in self.state.transactions.values() if t.peer == peer.id and t.key == key]:
            self._forget(transaction)
            self.store.note("dropped", f"{transaction.id}: {why}")
        self.state.claims = [claim for claim in self.state.claims if not (claim.peer == peer.id and claim.key == key)]


def refusal(failure: Failure) -> Refused:
    """A failure as the error its owner hears."""
    what = _HEADINGS.get(failure.code, "the keeper refuses")
    fix = "" if failure.code == "exists" else "The engine goes on with what it loaded; nothing of it is kept."
    return Refused(what, why=failure.why, fix=fix, code=failure.code)


def _of(key: Key, launch: Launch) -> bool:
    return (key.group, key.launch) == (launch.group, launch.name)
