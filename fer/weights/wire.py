"""What keeper and client say to each other.

A frame is ``b"FER"``, a version byte and one msgpack-encoded message of at most 64 KiB, sent whole over
``SOCK_SEQPACKET``. Requests carry descriptors where their class says so. A reply that does not fit travels as a whole
frame in a sealed memfd, announced by :class:`InMemory`. Decoding is strict: unknown tags, unknown fields, wrong types
and values out of range are refused, and nothing on the wire is code.

Every request has a number, larger than the one before on its connection; its reply repeats it. A keeper that was
killed between answering and forgetting a request answers again after its return: clients drop replies of old numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from fer.errors import ProtocolError
from fer.memory.fd import Fd
from fer.memory.seal import read_sealed, sealed_bytes
from fer.weights.wire_parts import (
    WAIT_LIMIT_S,
    Candidate,
    ClaimInfo,
    EditionInfo,
    Estate,
    Event,
    Holder,
    Key,
    Name,
    Near,
    Number,
    Pending,
    Process,
    RoleInfo,
    Seconds,
    ServiceInfo,
    SlabInfo,
    Text,
)

__all__ = [  # besides what is made here
    "Candidate",
    "ClaimInfo",
    "EditionInfo",
    "Estate",
    "Event",
    "Holder",
    "Key",
    "Near",
    "Pending",
    "Process",
    "RoleInfo",
    "ServiceInfo",
    "SlabInfo",
    "WAIT_LIMIT_S",
]

VERSION = 2
MAGIC = b"FER"
HEADER = MAGIC + bytes([VERSION])
FRAME_LIMIT = 64 * 1024
"""Bytes of one message on the socket."""
REPLY_LIMIT = 256 * 1024 * 1024
"""Bytes of a reply that travels in a memfd."""
PAYLOAD_LIMITS = {"manifest": 256 << 20, "fields": 1 << 20, "checkpoint": 16 << 20, "digests": 64 << 20}
"""Bytes of what engines leave with an edition, by name; each is one sealed memfd."""
SLABS_A_FRAME = 240
"""Descriptors of slabs in one message, which leaves room for payloads beside them."""

# --- requests ---


class Request(Struct, frozen=True, tag_field="op", forbid_unknown_fields=True):
    """Base of all requests."""

    seq: Number


class Hello(Request, frozen=True, tag="hello"):
    label: Text = ""
    pid: Number = 0


class Find(Request, frozen=True, tag="find", kw_only=True):
    key: Key


class TakeClaim(Request, frozen=True, tag="claim", kw_only=True):
    """``seen`` is the stamp of the last :class:`Found`: what became visible later answers ``look_again``."""

    key: Key
    seen: Number
    wait_s: Seconds


class Unclaim(Request, frozen=True, tag="unclaim"):
    pass


class TakeLease(Request, frozen=True, tag="lease", kw_only=True):
    edition: Name


class GetSlabs(Request, frozen=True, tag="slabs", kw_only=True):
    """Descriptors of a leased edition from slab ``first`` on."""

    edition: Name
    first: Number


class Release(Request, frozen=True, tag="release", kw_only=True):
    edition: Name


class Begin(Request, frozen=True, tag="begin", kw_only=True):
    """Two descriptors: fields and checkpoint."""

    key: Key
    total: Number


class AddSlabs(Request, frozen=True, tag="add_slabs", kw_only=True):
    """One descriptor a slab."""

    transaction: Name
    slabs: Annotated[list[SlabInfo], Meta(min_length=1, max_length=SLABS_A_FRAME)]


class Commit(Request, frozen=True, tag="commit", kw_only=True):
    """One descriptor: the manifest."""

    transaction: Name
    wait_s: Seconds


class Abort(Request, frozen=True, tag="abort", kw_only=True):
    transaction: Name


class Annotate(Request, frozen=True, tag="annotate", kw_only=True):
    """One descriptor for each name, in order."""

    edition: Name
    names: Annotated[list[Literal["checkpoint", "digests"]], Meta(min_length=1, max_length=2)]


class ReportLost(Request, frozen=True, tag="report_lost", kw_only=True):
    edition: Name
    why: Text


class MakeRoom(Request, frozen=True, tag="make_room", kw_only=True):
    gpu: Name
    needed: Number | None


class Evict(Request, frozen=True, tag="evict", kw_only=True):
    edition: Name | None
    gpu: Name | None


class AskStatus(Request, frozen=True, tag="status"):
    pass


class AcquireRole(Request, frozen=True, tag="acquire_role", kw_only=True):
    role: Name
    wait_s: Seconds


class ReleaseRole(Request, frozen=True, tag="release_role", kw_only=True):
    role: Name


class ClaimService(Request, frozen=True, tag="claim_service", kw_only=True):
    """One descriptor with ``again``: the lock of a service that this process holds, by an earlier connection."""

    service: Name
    processes: Annotated[list[Process], Meta(min_length=1, max_length=256)]
    wait_s: Seconds
    again: bool = False


class ReleaseService(Request, frozen=True, tag="release_service", kw_only=True):
    """Give a service back; with ``pass_on`` its estate waits for the next holder, else it goes."""

    service: Name
    pass_on: bool = False


class Bequeath(Request, frozen=True, tag="bequeath", kw_only=True):
    """Leave an estate to the next holder of a service that this connection holds, in place of an earlier one; or none.

    One descriptor for each slab; host slabs are memfds that can change neither in size nor in their seals.
    """

    service: Name
    estate: Estate | None


class Stop(Request, frozen=True, tag="stop", kw_only=True):
    force: bool


AnyRequest = (
    Hello
    | Find
    | TakeClaim
    | Unclaim
    | TakeLease
    | GetSlabs
    | Release
    | Begin
    | AddSlabs
    | Commit
    | Abort
    | Annotate
    | ReportLost
    | MakeRoom
    | Evict
    | AskStatus
    | AcquireRole
    | ReleaseRole
    | ClaimService
    | ReleaseService
    | Bequeath
    | Stop
)


def descriptors_of(request: Request) -> int:
    """How many descriptors a request must carry."""
    if isinstance(request, Begin):
        return 2
    if isinstance(request, AddSlabs):
        return len(request.slabs)
    if isinstance(request, Annotate):
        return len(request.names)
    if isinstance(request, ClaimService):
        return int(request.again)
    if isinstance(request, Bequeath):
        return len(request.estate.slabs) if request.estate is not None else 0
    return 1 if isinstance(request, Commit) else 0


# --- replies ---


class Reply(Struct, frozen=True, tag_field="re", forbid_unknown_fields=True):
    """Base of all replies. ``seq`` is 0 where the request could not be read."""

    seq: Number


class Done(Reply, frozen=True, tag="done"):
    pass


class Failed(Reply, frozen=True, tag="failed", kw_only=True):
    """An error as :meth:`fer.errors.FerError.to_dict` gives it; after a ProtocolError the keeper closes."""

    error: dict[str, Any]


class InMemory(Reply, frozen=True, tag="in_memory"):
    """The reply is the frame in the first descriptor; the other descriptors are the reply's own."""


class Welcome(Reply, frozen=True, tag="welcome", kw_only=True):
    pid: int
    version: str


class Found(Reply, frozen=True, tag="found", kw_only=True):
    candidates: list[Candidate]
    near: list[Near]
    stamp: int


class Claim(Reply, frozen=True, tag="claim", kw_only=True):
    outcome: Literal["claimed", "look_again", "timeout"]
    holder: Holder | None = None


class LeaseGranted(Reply, frozen=True, tag="lease", kw_only=True):
    """Descriptors: the payloads in the order named, then the first of the slabs."""

    payloads: list[str]
    slabs: list[SlabInfo]


class Slabs(Reply, frozen=True, tag="slabs"):
    """Descriptors of further slabs."""


class Begun(Reply, frozen=True, tag="begun", kw_only=True):
    transaction: str
    offset: int


class Committed(Reply, frozen=True, tag="committed", kw_only=True):
    edition: str


class Room(Reply, frozen=True, tag="room", kw_only=True):
    evicted: list[EditionInfo]
    leased: list[EditionInfo]


class Evicted(Reply, frozen=True, tag="evicted", kw_only=True):
    editions: list[EditionInfo]


class Status(Reply, frozen=True, tag="status", kw_only=True):
    """Everything the keeper knows.

    ``protection`` says who keeps its descriptors when it dies: systemd, minder or none. ``restarts`` counts the deaths
    it survived. ``waiting`` are the ``connections`` whose request waits (for a loader, a group or a role), in order.
    """

    pid: int
    version: str
    uid: int
    protection: str
    started: float
    restarts: int
    descriptors: int
    connections: list[Holder]
    waiting: list[Holder]
    editions: list[EditionInfo]
    pending: list[Pending]
    claims: list[ClaimInfo]
    roles: list[RoleInfo]
    services: list[ServiceInfo]
    events: list[Event]


class RoleAnswer(Reply, frozen=True, tag="role", kw_only=True):
    acquired: bool


class ServiceAnswer(Reply, frozen=True, tag="service", kw_only=True):
    """Where ``held``, its descriptors: the service's lock, and the slabs of the ``estate`` that the holder before left.
    Else ``why`` not, and who holds it.

    ``fence_s`` is how long the processes before took to end, from the first death seen to the last.
    """

    held: bool
    why: str = ""
    holder: Holder | None = None
    fence_s: float = 0.0
    estate: Estate | None = None


AnyReply = (
    Done
    | Failed
    | InMemory
    | Welcome
    | Found
    | Claim
    | LeaseGranted
    | Slabs
    | Begun
    | Committed
    | Room
    | Evicted
    | Status
    | RoleAnswer
    | ServiceAnswer
)

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[AnyRequest] = msgspec.msgpack.Decoder(AnyRequest)
_replies: msgspec.msgpack.Decoder[AnyReply] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: Request | Reply) -> bytes:
    """A message as a frame, of whatever length."""
    return HEADER + _encoder.encode(message)


def decode_request(frame: bytes) -> AnyRequest:
    """The request in a frame. Raises ProtocolError."""
    _check(frame, FRAME_LIMIT)
    try:
        return _requests.decode(memoryview(frame)[len(HEADER) :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("a request cannot be read", why=str(error), code="garbage") from None


def decode_reply(frame: bytes, *, limit: int = FRAME_LIMIT) -> AnyReply:
    """The reply in a frame. Raises ProtocolError."""
    _check(frame, limit)
    try:
        return _replies.decode(memoryview(frame)[len(HEADER) :])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError("the keeper's reply cannot be read", why=str(error), code="garbage") from None


def _check(frame: bytes, limit: int) -> None:
    if len(frame) > limit:
        raise ProtocolError(f"a frame of {len(frame)} bytes", why=f"at most {limit} are accepted", code="oversize")
    if frame[: len(MAGIC)] != MAGIC or len(frame) <= len(MAGIC):
        raise ProtocolError("a message is no frame of FER's", why="its first bytes are wrong", code="garbage")
    if frame[len(MAGIC)] != VERSION:
        raise ProtocolError(
            f"the other side speaks version {frame[len(MAGIC)]} of the protocol",
            why=f"this side speaks version {VERSION}",
            fix="Stop the keeper (fer keeper stop) and start it from the same installation as the engine.",
            code="version",
        )


def pack_reply(reply: Reply, fds: Sequence[Fd]) -> tuple[bytes, list[Fd], Fd | None]:
    """A reply as it goes out: frame, descriptors in order, and the memfd to close afterwards where one was needed."""
    frame = encode(reply)
    if len(frame) <= FRAME_LIMIT:
        return frame, list(fds), None
    body = sealed_bytes("fer-reply", frame)
    return encode(InMemory(reply.seq)), [body, *fds], body


def unpack_reply(frame: bytes, fds: list[Fd]) -> AnyReply:
    """The reply of a received message; takes the memfd out of ``fds`` where the reply is in one.

    Raises:
        ProtocolError: the reply cannot be read.
    """
    reply = decode_reply(frame)
    if not isinstance(reply, InMemory):
        return reply
    if not fds:
        raise ProtocolError("a reply in memory came without its descriptor", code="wrong_fds")
    with fds.pop(0) as body:
        inner = decode_reply(read_sealed(body, REPLY_LIMIT), limit=REPLY_LIMIT)
    if inner.seq != reply.seq or isinstance(inner, InMemory):
        raise ProtocolError("a reply in memory does not belong to its frame", code="garbage")
    return inner
