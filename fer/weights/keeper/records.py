"""What the keeper knows, as plain data that one journal entry holds whole.

Descriptors are not in it: they lie on the :class:`~fer.weights.keeper.shelf.Shelf` under the names made here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from msgspec import Struct, field

from fer.weights.wire import Estate, Event, Key, Process, SlabInfo

PAYLOADS = ("manifest", "checkpoint", "fields", "digests")
"""What an edition has beside its slabs, one sealed memfd each; digests may be missing."""


def new_id(kind: str) -> str:
    """A fresh name, ``c...`` for connections, ``e...`` for editions, ``p...`` for payloads, ``b...`` for estates.

    Never used again, so that a descriptor left in the fd store by a keeper that was killed is not taken for another.
    """
    return kind + os.urandom(5).hex()


def slab_name(edition: str, number: int) -> str:
    """The shelf's name of a slab."""
    return f"{edition}.{number}"


class Edition(Struct):
    """A visible edition.

    ``batch`` is shared by the editions of one launch: they came together and go together. ``published`` and ``order``
    count publications and uses; ``leases`` are ids of peers; ``payloads`` are shelf names by payload. ``exporter`` is
    the peer whose process has to live for the memory to stay (legacy CUDA IPC), empty where the descriptors suffice.
    ``freed`` is when it lost its last lease, in monotonic seconds, which are alike in every process.
    """

    id: str
    key: Key
    slabs: list[SlabInfo]
    payloads: dict[str, str]
    offset: int
    total: int
    checkpoint: bytes  # digest of the payload of that name
    batch: str
    created: float
    published: int
    used: float
    order: int
    exporter: str = ""
    leases: list[str] = field(default_factory=list)
    freed: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of its slabs."""
        return sum(slab.size for slab in self.slabs)

    def names(self) -> Iterator[str]:
        """Shelf names of all its descriptors."""
        yield from names_of(self.id, self.payloads, len(self.slabs))


class Transaction(Struct):
    """An edition in the making; its id becomes the edition's."""

    id: str
    peer: str
    key: Key
    total: int
    offset: int
    checkpoint: bytes
    slabs: list[SlabInfo] = field(default_factory=list)
    payloads: dict[str, str] = field(default_factory=dict)
    committed: bool = False

    def names(self) -> Iterator[str]:
        """Shelf names of all its descriptors."""
        yield from names_of(self.id, self.payloads, len(self.slabs))


def names_of(edition: str, payloads: dict[str, str], slabs: int) -> Iterator[str]:
    """Shelf names of an edition's descriptors."""
    yield from payloads.values()
    for number in range(slabs):
        yield slab_name(edition, number)


class Failure(Struct):
    """Why a transaction came to nothing: the code and words of the refusal its owner still has to hear."""

    code: str
    why: str


class Wait(Struct):
    """A request that waits: its number, until when (monotonic seconds, alike in every process), in which order."""

    seq: int
    until: float
    order: int
    claim: Key | None = None
    service: str = ""


class Peer(Struct):
    """A connected process that said hello. ``done`` is the answer to its last request, in case it is asked again.

    ``born`` is when the process was started, in the kernel's ticks; 0 where the keeper cannot see it.
    """

    id: str
    pid: int
    uid: int
    label: str
    done_seq: int = 0
    done: bytes = b""
    wait: Wait | None = None
    failed: dict[str, Failure] = field(default_factory=dict)
    born: int = 0


class Claimed(Struct):
    """Who loads what."""

    key: Key
    peer: str


class Launch(Struct):
    """A launch that claimed or published in a group. ``order`` is its age; ``doom`` ends its publishing for good."""

    group: str
    name: str
    local_size: int
    order: int
    peers: list[str] = field(default_factory=list)
    doom: Failure | None = None


class Service(Struct):
    """A name that one cohort of processes answers for at a time.

    ``processes`` are empty where nobody holds it: somebody waits, or its estate does. ``peer`` is the holder's
    connection, empty once that closed: the processes may live on. ``lock`` is the shelf's name of the lock, empty where
    it was lost. ``dying`` is when the first of the processes was seen dead, in monotonic seconds; ``fence_s`` how long
    the cohort before this one took from there. ``estate`` is what its next holder gets, under ``bequest`` and a number
    on the shelf; ``left`` is when the last holder left it, in monotonic seconds.
    """

    name: str
    processes: list[Process] = field(default_factory=list)
    peer: str = ""
    label: str = ""
    lock: str = ""
    dying: float = 0.0
    stuck: bool = False
    fence_s: float = 0.0
    estate: Estate | None = None
    bequest: str = ""
    left: float = 0.0

    def bequeathed(self) -> list[str]:
        """Shelf names of its estate's descriptors."""
        slabs = self.estate.slabs if self.estate is not None else []
        return [slab_name(self.bequest, number) for number in range(len(slabs))]


class State(Struct):
    """Everything."""

    started: float
    restarts: int = 0
    counter: int = 0
    publications: int = 0
    peers: dict[str, Peer] = field(default_factory=dict)
    editions: dict[str, Edition] = field(default_factory=dict)
    transactions: dict[str, Transaction] = field(default_factory=dict)
    claims: list[Claimed] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    roles: dict[str, str] = field(default_factory=dict)
    services: dict[str, Service] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def tick(self) -> int:
        """The next number of the keeper's own order of things."""
        self.counter += 1
        return self.counter
