"""Everything the keeper knows, put into one message."""

from __future__ import annotations

import os

import fer
from fer.weights import wire
from fer.weights.keeper.editions import Store
from fer.weights.keeper.records import Launch
from fer.weights.keeper.shelf import Shelf
from fer.weights.keeper.slabs import checked_payload


def status(seq: int, store: Store, shelf: Shelf, protection: str) -> wire.Status:
    """The answer to ``status``."""
    state = store.state
    waiting = [(peer.wait.order, peer) for peer in state.peers.values() if peer.wait is not None]
    return wire.Status(
        seq,
        pid=os.getpid(),
        version=fer.__version__,
        uid=os.getuid(),
        protection=protection,
        started=state.started,
        restarts=state.restarts,
        descriptors=len(shelf),
        connections=[store.holder(peer) for peer in state.peers],
        waiting=[store.holder(peer.id) for _, peer in sorted(waiting, key=lambda pair: pair[0])],
        editions=[
            store.info(edition, checked_payload("fields", shelf[edition.payloads["fields"]]))
            for edition in sorted(state.editions.values(), key=lambda edition: edition.published)
        ],
        pending=[pending for launch in state.launches if (pending := _pending(store, launch)).begun],
        claims=[
            wire.ClaimInfo(group=c.key.group, rank=c.key.rank, gpu=c.key.gpu, holder=store.holder(c.peer))
            for c in state.claims
        ],
        roles=[wire.RoleInfo(role=role, holder=store.holder(peer)) for role, peer in sorted(state.roles.items())],
        services=[
            wire.ServiceInfo(
                service=s.name,
                holder=store.holder(s.peer),
                processes=s.processes,
                estate=s.estate.size if s.estate is not None else 0,
            )
            for s in state.services.values()
            if s.processes or s.estate is not None
        ],
        events=state.events,
    )


def _pending(store: Store, launch: Launch) -> wire.Pending:
    of_launch = [
        transaction
        for transaction in store.state.transactions.values()
        if (transaction.key.group, transaction.key.launch) == (launch.group, launch.name)
    ]
    return wire.Pending(
        group=launch.group,
        launch=launch.name,
        local_size=launch.local_size,
        begun=sorted(t.key.rank for t in of_launch),
        committed=sorted(t.key.rank for t in of_launch if t.committed),
        bytes=sum(slab.size for t in of_launch for slab in t.slabs),
    )
