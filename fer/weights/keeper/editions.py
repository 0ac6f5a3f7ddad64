"""Editions: who uses them, what goes when. Pure data, no sockets and no descriptors."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

from fer.errors import LeasesStand, Refused
from fer.weights.keeper.process import born
from fer.weights.keeper.records import Edition, Peer, State
from fer.weights.wire import EditionInfo, Event, Holder, Key

log = logging.getLogger("fer.keeper")

EVENTS = 256
"""How many events are remembered."""
EVENT_CHARACTERS = 500
ENDED = "has ended, a child of it holds the connection"
"""Said beside the pid of a process that connected, forked, and died."""


class Store:
    """The state and the changes that keep it whole.

    Attributes:
        state: what the journal saves.
        condemned: shelf names of descriptors that nothing refers to any more, to be closed after the next save.
        noted: an event was noted since the last save.
    """

    def __init__(self, state: State) -> None:
        self.state = state
        self.condemned: list[str] = []
        self.noted = False

    def note(self, kind: str, text: str) -> None:
        """Remember and log an event. Peers have a say in the text, so it is made one short printable line."""
        text = "".join(c if c.isprintable() else " " for c in text[:EVENT_CHARACTERS])
        log.info("%s: %s", kind, text)
        self.noted = True
        self.state.events.append(Event(at=time.time(), kind=kind, text=text))
        del self.state.events[:-EVENTS]

    # --- looking ---

    def visible(self, key: Key) -> list[Edition]:
        """Editions of a key, newest first: they differ in the identity of their checkpoint."""
        found = [
            edition
            for edition in self.state.editions.values()
            if (edition.key.group, edition.key.rank, edition.key.gpu) == (key.group, key.rank, key.gpu)
        ]
        return sorted(found, key=lambda edition: -edition.published)

    def near(self, key: Key, limit: int) -> list[Edition]:
        """Editions that nearly match: the same group on another GPU, or another group on this one; last used first."""
        found = [
            edition
            for edition in self.state.editions.values()
            if (edition.key.group == key.group) != (edition.key.gpu == key.gpu)
        ]
        return sorted(found, key=lambda edition: -edition.order)[:limit]

    def get(self, edition: str) -> Edition:
        """The visible edition of that id. Raises Refused (``unknown_edition``)."""
        found = self.state.editions.get(edition)
        if found is None:
            raise Refused(
                f"no edition {edition} is kept",
                why="it was evicted, lost or never published",
                fix="Look again.",
                code="unknown_edition",
            )
        return found

    def holder(self, peer: str) -> Holder:
        """Who a peer is, for people."""
        found = self.state.peers.get(peer)
        if found is None:
            return Holder(pid=0, label="gone")
        parts = [found.label]
        if found.born and born(found.pid) != found.born:
            parts.append(ENDED)
        return Holder(pid=found.pid, label="; ".join(filter(None, parts)))

    def exports(self, peer: Peer, edition: Edition) -> bool:
        """Whether a peer is the process whose life the edition's memory depends on, by whichever connection."""
        exporter = self.state.peers.get(edition.exporter)
        return exporter is not None and (exporter.pid, exporter.uid) == (peer.pid, peer.uid)

    def batch(self, name: str) -> list[Edition]:
        """The editions that were published together."""
        return [edition for edition in self.state.editions.values() if edition.batch == name]

    def batches(self, gpu: str | None = None) -> list[list[Edition]]:
        """All batches (with an edition on that GPU), least recently used first."""
        names = {e.batch for e in self.state.editions.values() if gpu is None or e.key.gpu == gpu}
        return sorted((self.batch(name) for name in names), key=lambda batch: max(e.order for e in batch))

    def info(self, edition: Edition, fields: bytes = b"") -> EditionInfo:
        """The edition as others see it."""
        return EditionInfo(
            edition=edition.id,
            group=edition.key.group,
            rank=edition.key.rank,
            gpu=edition.key.gpu,
            launch=edition.key.launch,
            batch=edition.batch,
            bytes=edition.size,
            slabs=len(edition.slabs),
            transport=edition.slabs[0].kind if edition.slabs else "",
            created=edition.created,
            used=edition.used,
            digests="digests" in edition.payloads,
            holders=[self.holder(peer) for peer in edition.leases],
            fields=fields,
        )

    # --- leases ---

    def in_use(self) -> bool:
        """Whether anybody uses an edition, is about to publish one, or answers for a service."""
        return bool(self.state.claims or self.state.transactions or self.state.services) or leased(
            self.state.editions.values()
        )

    def lease(self, peer: Peer, edition: Edition) -> None:
        """Note that a peer uses an edition; twice is once."""
        if peer.id not in edition.leases:
            edition.leases.append(peer.id)
        self._touch(edition)

    def release(self, peer: Peer, edition: Edition) -> None:
        """The opposite; nothing happens where there is no lease."""
        if peer.id in edition.leases:
            edition.leases.remove(peer.id)
            edition.freed = time.monotonic()
            self._touch(edition)

    def release_all(self, peer: Peer) -> None:
        """All leases of a peer."""
        for edition in self.state.editions.values():
            self.release(peer, edition)

    def _touch(self, edition: Edition) -> None:
        edition.used = time.time()
        edition.order = self.state.tick()

    # --- going ---

    def drop(self, batch: Iterable[Edition], kind: str, why: str) -> list[EditionInfo]:
        """Take a batch out of sight and free its memory, which goes on in the processes that have it mapped."""
        gone = []
        for edition in batch:
            gone.append(self.info(edition))
            del self.state.editions[edition.id]
            self.condemned += edition.names()
            users = "".join(f"; still used by {h.pid} {h.label}".rstrip() for h in gone[-1].holders)
            self.note(kind, f"{edition.id}: {edition.size} bytes on {edition.key.gpu}, {why}{users}")
        return gone

    def evict(self, edition: str | None, gpu: str | None) -> list[EditionInfo]:
        """Evict one edition with its batch, or every unleased batch (of a GPU).

        Raises:
            LeasesStand: the named edition's batch is in use.
            Refused: ``unknown_edition``.
        """
        if edition is None:
            free = [batch for batch in self.batches(gpu) if not leased(batch)]
            return [info for batch in free for info in self.drop(batch, "evicted", "as asked")]
        batch = self.batch(self.get(edition).batch)
        if leased(batch):
            holders = [self.info(e).holders for e in batch]
            raise leases_stand(f"edition {edition} is in use", [h for some in holders for h in some])
        return self.drop(batch, "evicted", "as asked")

    def make_room(self, gpu: str, needed: int | None) -> list[EditionInfo]:
        """Evict unleased batches of a GPU, least recently used first, until ``needed`` bytes are freed on it."""
        gone: list[EditionInfo] = []
        freed = 0
        for batch in self.batches(gpu):
            if needed is not None and freed >= needed:
                break
            if not leased(batch):
                freed += sum(edition.size for edition in batch if edition.key.gpu == gpu)
                gone += self.drop(batch, "evicted", "to make room")
        return gone


def leased(batch: Iterable[Edition]) -> bool:
    """True where any rank of a batch is in use: the others are about to be, as after the crash of one rank."""
    return any(edition.leases for edition in batch)


def leases_stand(what: str, holders: list[Holder], loaders: Sequence[Holder] = ()) -> LeasesStand:
    """The refusal that names who uses it, and who is about to."""
    parts = {"used by": holders, "being loaded by": loaders}
    everyone = {holder.pid: holder for holder in [*holders, *loaders]}.values()
    return LeasesStand(
        what,
        why="; ".join(f"{how} {', '.join(map(_named, who))}" for how, who in parts.items() if who),
        fix="Stop those processes first, or force it: they keep what they have mapped.",
        holders=[{"pid": holder.pid, "label": holder.label} for holder in everyone],
    )


def _named(holder: Holder) -> str:
    return f"{holder.pid} ({holder.label})" if holder.label else str(holder.pid)
