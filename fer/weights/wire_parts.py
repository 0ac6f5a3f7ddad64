"""What messages between engine and keeper are made of; :mod:`fer.weights.wire` has the messages."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from fer.memory.base import Kind

WAIT_LIMIT_S = 7 * 24 * 3600.0
ESTATE_SLABS = 250
"""Slabs of an estate at most: they travel in one message, beside the lock of their service."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=1, le=1 << 16)]
Seconds = Annotated[float, Meta(ge=0, le=WAIT_LIMIT_S)]
Name = Annotated[str, Meta(min_length=1, max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Blob = bytes  # for classes with a field called bytes


class _Plain(Struct, frozen=True, forbid_unknown_fields=True):
    """Part of a message."""


class Key(_Plain, frozen=True):
    """Which edition: digest of the fingerprint's group part, the rank in it, and the GPU (a UUID, or ``"host"``).

    ``launch`` names the start that publishes and ``local_size`` is how many of its ranks run on this host.
    """

    group: Name
    rank: Name
    gpu: Name
    launch: Name
    local_size: Count = 1


class SlabInfo(_Plain, frozen=True):
    """One slab: what its descriptor is, its bytes, and the address it was recorded at (0 for host memory)."""

    kind: Kind
    size: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    address: Number = 0


class Holder(_Plain, frozen=True):
    """A connected process. ``pid`` is 0 where the keeper cannot see it (another PID namespace)."""

    pid: int
    label: str


class Candidate(_Plain, frozen=True):
    """A visible edition of the key that was asked for; whether its checkpoint fits is the client's to decide."""

    edition: str
    checkpoint: bytes
    created: float
    digests: bool


class Near(_Plain, frozen=True):
    """A visible edition that did not match: the same group on another GPU, or another group on this one."""

    edition: str
    gpu: str
    rank: str
    fields: bytes


class EditionInfo(_Plain, frozen=True):
    """One edition, for people and programs. Times are seconds since the epoch, ``bytes`` the sum of its slabs."""

    edition: str
    group: str
    rank: str
    gpu: str
    launch: str
    batch: str
    bytes: int
    slabs: int
    transport: str
    created: float
    used: float
    digests: bool
    holders: list[Holder]
    fields: Blob = b""


class Pending(_Plain, frozen=True):
    """A group that is being published: ranks begun and ranks that wait for the others."""

    group: str
    launch: str
    local_size: int
    begun: list[str]
    committed: list[str]
    bytes: int


class ClaimInfo(_Plain, frozen=True):
    """Who loads what."""

    group: str
    rank: str
    gpu: str
    holder: Holder


class RoleInfo(_Plain, frozen=True):
    """An exclusive role and who has it."""

    role: str
    holder: Holder


class Process(_Plain, frozen=True):
    """A process for certain: its pid, and when it was started, in the kernel's ticks since boot."""

    pid: Annotated[int, Meta(ge=1, le=1 << 31)]
    born: Number


class Estate(_Plain, frozen=True):
    """What the holder of a service leaves to the next one: memory, and a word about it that the keeper does not read.

    ``gpu`` is as in :class:`Key`. ``guardian`` is the process that would start a next holder: with its end, and the
    holder's, the estate goes.
    """

    gpu: Name
    slabs: Annotated[list[SlabInfo], Meta(min_length=1, max_length=ESTATE_SLABS)]
    about: Annotated[bytes, Meta(max_length=1 << 15)]
    guardian: Process | None = None

    @property
    def size(self) -> int:
        """Bytes of its slabs."""
        return sum(slab.size for slab in self.slabs)


class ServiceInfo(_Plain, frozen=True):
    """Who answers for a service: the connection (pid 0: it closed, and the processes live) and every process.

    No process: nobody does, and ``estate`` bytes wait for who will.
    """

    service: str
    holder: Holder
    processes: list[Process]
    estate: Number = 0


class Event(_Plain, frozen=True):
    """Something that happened: ``kind`` is published, evicted, lost, dropped, restarted, unprotected, ..."""

    at: float
    kind: str
    text: str
