"""What the front and a worker say to each other.

Requests travel over the worker's private Unix socket, one connection each: a line of JSON with a :class:`Generate`,
then one line an event, the last of which is :class:`Ended` or :class:`Failed`. A connection that ends before that means
that the worker has gone; a front that closes its side ends the generation.

What concerns the worker as a whole it writes to its control socket, file descriptor 0: :class:`Begun`, then
:class:`Ready` or :class:`Broken`. Its end of file tells the worker that its supervisor has gone. A worker that said it
takes orders is sent :class:`Stand` at once, and later :class:`Promote` and :class:`Park`, each answered once:
:class:`Promoted` or :class:`Unpromoted`, and :class:`Parked`.

Decoding is strict: unknown tags, unknown fields and wrong types are refused, and nothing on the wire is code.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from fer.errors import ProtocolError
from fer.weights.wire_parts import Process

LINE_LIMIT = 64 << 20
"""Bytes of one line. A request is bounded by the front long before that."""

Count = Annotated[int, Meta(ge=0)]
Ids = list[Count]


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    """One line."""


class Generate(_Line, frozen=True, tag="generate", kw_only=True):
    """Continue a prompt greedily.

    Attributes:
        prompt: a text or token ids; None where ``messages`` are given.
        messages: a conversation for the model's chat template.
        max_tokens: most tokens of the whole answer, None: what is left of the context.
        stop: texts that end the answer, and are no part of it.
        known: tokens of the answer that an earlier worker made; the events begin after them.
        replay: make the known tokens again, step by step as they were made, rather than read them with the prompt.
            What is then in the cache has the same bits, and the answer goes on as it would have.
    """

    prompt: str | Ids | None = None
    messages: list[Message] = []
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    known: Ids = []
    replay: bool = False


class Began(_Line, frozen=True, tag="began"):
    """The request fits; it waits for its turn."""

    prompt_tokens: int


class Piece(_Line, frozen=True, tag="piece"):
    """More of the answer. ``text`` may lag behind ``ids`` by what may still become a stop or half a character."""

    ids: Ids
    text: str


class Differed(_Line, frozen=True, tag="differed"):
    """The known tokens came out otherwise when they were made again, ``place`` tokens into the answer.

    So it may be where other answers share the steps. The known ones stand, and were read with the prompt instead.
    """

    place: int


class Ended(_Line, frozen=True, tag="ended"):
    """The answer is complete: at its natural end or a stop text, or at ``max_tokens``."""

    reason: Literal["stop", "length"]


class Failed(_Line, frozen=True, tag="failed"):
    """This request cannot be answered, and the worker goes on. ``status`` is HTTP's."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


Event = Began | Piece | Differed | Ended | Failed


class Begun(_Line, frozen=True, tag="begun"):
    """The interpreter runs. ``at`` is the clock of :func:`time.monotonic_ns`, which is one for the machine.

    ``orders``: it answers nothing before it is promoted.
    """

    at: int
    orders: bool = False


class Told(_Line, frozen=True, tag="told"):
    """The worker has heard how to start, and does: a spare that hangs would be waited for otherwise."""


class Ready(_Line, frozen=True, tag="ready"):
    """The worker has recovered and listens; its first token may be that of its promotion.

    Attributes:
        report: :meth:`fer.report.Report.to_json`.
    """

    at: int
    context: int
    rows: int
    report: dict[str, Any]


class Broken(_Line, frozen=True, tag="broken"):
    """The worker cannot start and ends. ``error`` is :meth:`fer.errors.FerError.to_dict`."""

    error: dict[str, Any]


class Promoted(_Line, frozen=True, tag="promoted", kw_only=True):
    """The worker answers. Seconds of what that took, one after another; ``fence_s`` is part of ``claim_s``.

    Attributes:
        claim_s: until the service was its own, ``fence_s`` of it until the processes before had ended.
        backing_s: memory for the cache; ``self_test_s``: one token.
        by: who granted the service: ``keeper``, ``lock``, or ``""`` where it has no name to be claimed by.
        kept_rows: rows of the cache that hold what the engine before left.
        keeps: the cache outlives this process.
    """

    at: int
    claim_s: float = 0.0
    fence_s: float = 0.0
    backing_s: float = 0.0
    self_test_s: float = 0.0
    by: str = ""
    kept_rows: int = 0
    keeps: bool = False


class Unpromoted(_Line, frozen=True, tag="unpromoted"):
    """It stands by as before, and may be asked again. ``error`` is :meth:`fer.errors.FerError.to_dict`."""

    error: dict[str, Any]


class Parked(_Line, frozen=True, tag="parked"):
    """It answers no more and stands by; ``freed``: without memory for answers."""

    at: int
    freed: bool


Control = Begun | Told | Ready | Broken | Promoted | Unpromoted | Parked


class Stand(_Line, frozen=True, tag="stand", kw_only=True):
    """How to start: ``parked``, without memory for answers, or ready to serve; and which service to claim for that.

    Attributes:
        beside: another engine answers meanwhile, and needs the processors more.
        guardian: the process that starts the engines of this service.
        keep: leave the cache to the engine that serves next.
    """

    parked: bool
    service: str = ""
    beside: bool = False
    guardian: Process | None = None
    keep: bool = False


SERVE = Stand(parked=False)
"""How an engine starts of which nothing else is said."""


class Promote(_Line, frozen=True, tag="promote"):
    """Answer from now on, if the service can be had within ``wait_s`` seconds.

    Attributes:
        trust: what the engine before wrote into its cache may be gone on with, as it did not end by an error.
    """

    wait_s: float
    trust: bool = False


class Park(_Line, frozen=True, tag="park"):
    """Let the service go; answers that are under way are cut off."""


Order = Stand | Promote | Park
_T = TypeVar("_T")

_encoder = msgspec.json.Encoder()
_requests: msgspec.json.Decoder[Generate] = msgspec.json.Decoder(Generate)
_events: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Began | Piece | Differed | Ended | Failed)
_controls: msgspec.json.Decoder[Control] = msgspec.json.Decoder(
    Begun | Told | Ready | Broken | Promoted | Unpromoted | Parked
)
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Stand | Promote | Park)


def line(message: Generate | Event | Control | Order) -> bytes:
    """A message as it is sent."""
    return _encoder.encode(message) + b"\n"


def request(data: bytes) -> Generate:
    """The request in a line. Raises ProtocolError."""
    return _decode(_requests, data)


def event(data: bytes) -> Event:
    """The event in a line. Raises ProtocolError."""
    return _decode(_events, data)


def control(data: bytes) -> Control:
    """The message in a line of the control socket. Raises ProtocolError."""
    return _decode(_controls, data)


def order(data: bytes) -> Order:
    """The order in a line of the control socket. Raises ProtocolError."""
    return _decode(_orders, data)


def _decode(decoder: msgspec.json.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(
            "a line between front and worker is not understood",
            why=str(error),
            fix="Both sides must be the same version of FER",
        ) from error
