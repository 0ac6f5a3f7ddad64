"""What the ranks of one engine say to each other: rank 0 leads, the others follow.

Each rank but the first has one connection to rank 0, over a private Unix socket: :class:`Hello`, then rank 0's orders
in the order in which it does the same itself. Steps (:class:`Begin`, :class:`Advance`, :class:`Move`) are not answered,
since the model's own collectives keep ranks in step; what may fail on one rank alone is. A connection that ends means
that the rank behind it has ended, and with it the engine.

As in :mod:`fer.standby.wire`, decoding is strict and nothing is code. An idle rank sleeps in a read of its socket: one
that waited in a collective would keep its GPU busy, and be ended by the watchdog of its process group.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from fer.errors import ProtocolError
from fer.standby.wire import Count, Ids

Positive = Annotated[int, Meta(ge=1)]


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    """One line."""


class Begin(_Line, frozen=True, tag="begin"):
    """Read a prompt into a row, for at most ``limit`` new tokens."""

    row: Count
    ids: Ids
    limit: int


class Advance(_Line, frozen=True, tag="advance"):
    """One step of the first rows, computed ``width`` wide. ``tokens`` are the last of each row, as rank 0 made them."""

    tokens: Ids
    width: Positive


class Move(_Line, frozen=True, tag="move"):
    """Let row ``target`` be what ``source`` was."""

    source: Count
    target: Count


class Here(_Line, frozen=True, tag="here"):
    """Are you there? Answered with :class:`Done`."""


class Back(_Line, frozen=True, tag="back"):
    """Take memory for the cache. Answered with :class:`Done` or :class:`Lacking`."""


class Prove(_Line, frozen=True, tag="prove"):
    """Make a token together. Answered with :class:`Done`."""


class Park(_Line, frozen=True, tag="park"):
    """Give the cache's memory back. Answered with :class:`Done` or, where the engine cannot, :class:`Kept`."""


Order = Begin | Advance | Move | Here | Back | Prove | Park


class Hello(_Line, frozen=True, tag="hello"):
    """Which rank of how many this is."""

    rank: Positive
    world: Positive


class Done(_Line, frozen=True, tag="done"):
    """It is done."""


class Lacking(_Line, frozen=True, tag="lacking"):
    """There is not enough memory. ``error`` is :meth:`fer.errors.FerError.to_dict`."""

    error: dict[str, Any]


class Kept(_Line, frozen=True, tag="kept"):
    """The cache has its memory still."""


Answer = Hello | Done | Lacking | Kept

_encoder = msgspec.json.Encoder()
_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Begin | Advance | Move | Here | Back | Prove | Park)
_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Hello | Done | Lacking | Kept)


def line(message: Order | Answer) -> bytes:
    """A message as it is sent."""
    return _encoder.encode(message) + b"\n"


def order(data: bytes) -> Order:
    """The order in a line. Raises ProtocolError."""
    try:
        return _orders.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _strange(error) from error


def answer(data: bytes) -> Answer:
    """The answer in a line. Raises ProtocolError."""
    try:
        return _answers.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _strange(error) from error


def _strange(error: Exception) -> ProtocolError:
    fix = "All ranks must be the same version of FER"
    return ProtocolError("a line between ranks is not understood", why=str(error), fix=fix)
