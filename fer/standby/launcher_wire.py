"""What a launcher and those who ask it say to each other: typed messages over ``SOCK_SEQPACKET``.

One connection is one engine. The requester sends :class:`Run`; the long part (arguments, environment) lies in a sealed
memfd. The template answers :class:`Refused`, or forks, and then the child answers on the same connection:
:class:`Failed`, or :class:`Ready` with its pidfd. Nothing of the program runs before the requester's :class:`Go`:
whoever gives up before that can start it plainly without its running twice. When the engine has ended the template
sends :class:`Ended`.
"""

from __future__ import annotations

import msgspec

from fer.errors import ProtocolError
from fer.memory import fdpass
from fer.memory.fd import Fd

VERSION = 1
LIMIT = 64 << 10
"""Bytes of a message."""
BODY_LIMIT = 64 << 20
"""Bytes of arguments and environment; the kernel takes less than that for a program."""
MOST_PASSED = fdpass.MAX_FDS - 6
"""Descriptors a program can get beside its standard streams."""


class Message(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Base of all messages."""


class Handed(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What a program inherits and a forked child can be given.

    Attributes:
        umask: file mode creation mask.
        limits: soft and hard value of each resource limit by its number; -1 for none.
        nice: of setpriority.
        policy, priority: of the scheduler.
        affinity: numbers of its processors.
        oom: ``oom_score_adj``.
        cgroup: lines of ``/proc/self/cgroup``.
        ignored, blocked: signals.
    """

    umask: int
    limits: dict[int, tuple[int, int]]
    nice: int
    policy: int
    priority: int
    affinity: list[int]
    oom: int
    cgroup: list[str]
    ignored: list[int] = []
    blocked: list[int] = []


class Run(Message, tag="run", frozen=True):
    """Fork an engine. Descriptors: body, working directory, tie, the standard streams, then those of ``numbers``.

    Attributes:
        fixed: what the requester is, as :func:`fer.standby.inheritance.fixed` tells it.
        pid: the requester, as it sees itself.
        program: absolute path of ``argv[0]``.
        numbers: what the further descriptors are called in the program.
    """

    version: int
    fixed: dict[str, str]
    handed: Handed
    pid: int
    program: bytes
    numbers: list[int] = []


class Body(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The long part of :class:`Run`."""

    argv: list[bytes]
    env: dict[bytes, bytes]


class Go(Message, tag="go", frozen=True):
    """The requester has its engine; the program may run."""


class Ask(Message, tag="ask", frozen=True):
    """Tell your :class:`Status`."""


class Stop(Message, tag="stop", frozen=True):
    """End; engines go on. Answered with a :class:`Status`, the last one."""


class Refused(Message, tag="refused", frozen=True):
    """No fork. ``why`` is a clause for people."""

    why: str


class Failed(Message, tag="failed", frozen=True):
    """The child could not become what was asked for, and has ended."""

    why: str


class Ready(Message, tag="ready", frozen=True):
    """The child waits for :class:`Go`. Descriptor: its pidfd."""

    pid: int


class Ended(Message, tag="ended", frozen=True):
    """The engine's exit status, negative for a signal."""

    status: int


class Engine(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """An engine that a launcher forked and that runs."""

    pid: int
    command: str
    since: float


class Status(Message, tag="status", frozen=True):
    """What a launcher is.

    Attributes:
        state: ``ready``, or ``spoiled`` if it cannot fork any more.
        why: what spoiled it.
        since: when this template was ready, seconds since the epoch.
        imported: what it was told to import.
        warm: folders whose tokenizer and configuration it holds.
        modules: how many it has imported.
        forked, refused: since then.
        last_refusal: for people.
        generation: how many templates this process has been, from 1 on.
        fresh_why: why the template before this one was given up.
    """

    name: str
    pid: int
    state: str
    why: str
    since: float
    imported: list[str]
    warm: list[str]
    modules: int
    forked: int
    refused: int
    last_refusal: str
    generation: int
    fresh_why: str
    engines: list[Engine]


Request = Run | Ask | Stop
Answer = Refused | Failed | Ready | Ended | Status
_encode = msgspec.msgpack.Encoder().encode
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)
_go = msgspec.msgpack.Decoder(Go)
_bodies = msgspec.msgpack.Decoder(Body)


def pack(message: Message | Body) -> bytes:
    """The message as bytes."""
    return _encode(message)


def unpack_request(payload: bytes) -> Request:
    """A requester's first message. Raises ProtocolError."""
    try:
        return _requests.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError("a launcher was sent something it does not know", why=str(error)) from error


def unpack_answer(payload: bytes) -> Answer:
    """An answer. Raises ProtocolError."""
    try:
        return _answers.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError("a launcher answered something unknown", why=str(error)) from error


def unpack_body(payload: bytes) -> Body:
    """The long part of a :class:`Run`. Raises ProtocolError."""
    try:
        return _bodies.decode(payload)
    except msgspec.MsgspecError as error:
        raise ProtocolError("the arguments and environment cannot be read", why=str(error)) from error


def is_go(payload: bytes) -> bool:
    """Whether this is a :class:`Go`; the end of the connection is none."""
    try:
        return bool(payload) and _go.decode(payload) is not None
    except msgspec.MsgspecError:
        return False


def expect(descriptors: list[Fd], count: int) -> None:
    """Refuse a message with another number of descriptors. Raises ProtocolError."""
    if len(descriptors) != count:
        fdpass.close_all(descriptors)
        raise ProtocolError(f"a message came with {len(descriptors)} descriptors", why=f"{count} belong to it")
