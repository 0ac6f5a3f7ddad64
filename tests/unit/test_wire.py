"""Frames: strict, bounded, and deaf to whatever is no frame."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fer.errors import FerError, ProtocolError, Refused, from_dict
from fer.memory.seal import sealed_bytes
from fer.weights import wire

KEY = wire.Key("g", "r", "host", "l", 2)
SLAB = wire.SlabInfo("host", 4096)
HOLDER = wire.Holder(pid=1, label="x")
INFO = wire.EditionInfo(
    edition="e", group="g", rank="r", gpu="host", launch="l", batch="b", bytes=1, slabs=1, transport="host",
    created=1.0, used=2.0, digests=False, holders=[HOLDER], fields=b"f",
)  # fmt: skip
REQUESTS: list[wire.Request] = [
    wire.Hello(1, label="x", pid=2),
    wire.Find(2, key=KEY),
    wire.TakeClaim(3, key=KEY, seen=4, wait_s=1.5),
    wire.Unclaim(4),
    wire.TakeLease(5, edition="e"),
    wire.GetSlabs(6, edition="e", first=240),
    wire.Release(7, edition="e"),
    wire.Begin(8, key=KEY, total=9),
    wire.AddSlabs(9, transaction="e", slabs=[SLAB] * wire.SLABS_A_FRAME),
    wire.Commit(10, transaction="e", wait_s=0.0),
    wire.Abort(11, transaction="e"),
    wire.Annotate(12, edition="e", names=["checkpoint", "digests"]),
    wire.ReportLost(13, edition="e", why="gone"),
    wire.MakeRoom(14, gpu="host", needed=None),
    wire.Evict(15, edition=None, gpu="host"),
    wire.AskStatus(16),
    wire.AcquireRole(17, role="active", wait_s=3.0),
    wire.ReleaseRole(18, role="active"),
    wire.Stop(19, force=True),
    wire.ClaimService(20, service="s", processes=[wire.Process(1, 2)], wait_s=1.0, again=True),
    wire.ReleaseService(21, service="s"),
    wire.Bequeath(22, service="s", estate=wire.Estate("GPU-1", [SLAB] * 250, b"a" * (1 << 15), wire.Process(1, 2))),
]
REPLIES: list[wire.Reply] = [
    wire.Done(1),
    wire.Failed(2, error=Refused("no", code="exists").to_dict()),
    wire.InMemory(3),
    wire.Welcome(4, pid=5, version="1"),
    wire.Found(5, candidates=[wire.Candidate("e", b"c", 1.0, True)], near=[wire.Near("e", "g", "r", b"f")], stamp=3),
    wire.Claim(6, outcome="timeout", holder=HOLDER),
    wire.LeaseGranted(7, payloads=["manifest"], slabs=[SLAB]),
    wire.Slabs(8),
    wire.Begun(9, transaction="e", offset=1 << 40),
    wire.Committed(10, edition="e"),
    wire.Room(11, evicted=[INFO], leased=[]),
    wire.Evicted(12, editions=[INFO]),
    wire.RoleAnswer(13, acquired=True),
    wire.ServiceAnswer(14, held=False, why="another has it", holder=HOLDER, fence_s=0.1),
    wire.ServiceAnswer(15, held=True, estate=wire.Estate("host", [SLAB], b"about")),
]


def test_every_message_is_tried_here() -> None:
    assert {type(request) for request in REQUESTS} == set(wire.AnyRequest.__args__)
    assert {type(reply) for reply in REPLIES} | {wire.Status} == set(wire.AnyReply.__args__)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_come_back_equal_and_fit_into_a_frame(request_: wire.Request) -> None:
    frame = wire.encode(request_)
    assert len(frame) <= wire.FRAME_LIMIT
    assert wire.decode_request(frame) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies_come_back_equal(reply: wire.Reply) -> None:
    assert wire.decode_reply(wire.encode(reply)) == reply


def test_an_error_crosses_the_wire_whole() -> None:
    reply = wire.decode_reply(wire.encode(REPLIES[1]))
    assert isinstance(reply, wire.Failed)
    error = from_dict(reply.error)
    assert isinstance(error, Refused)
    assert error.fields["code"] == "exists"


GARBAGE = {
    "empty": b"",
    "short": b"FE",
    "header only": b"FER",
    "other magic": b"ABC\x01\x80",
    "no body": wire.HEADER,
    "pickle": pickle.dumps({"op": "hello"}),
    "pickle in a frame": wire.HEADER + pickle.dumps({"op": "hello"}),
    "json": wire.HEADER + b'{"op": "hello"}',
    "no map": wire.HEADER + msgspec.msgpack.encode([1, 2]),
    "unknown request": wire.HEADER + msgspec.msgpack.encode({"op": "exec", "seq": 1}),
    "unknown field": wire.HEADER + msgspec.msgpack.encode({"op": "hello", "seq": 1, "more": 1}),
    "wrong type": wire.HEADER + msgspec.msgpack.encode({"op": "hello", "seq": "1"}),
    "negative number": wire.HEADER + msgspec.msgpack.encode({"op": "hello", "seq": -1}),
    "huge number": wire.HEADER + msgspec.msgpack.encode({"op": "hello", "seq": 1 << 63}),
    "endless wait": wire.HEADER
    + msgspec.msgpack.encode({"op": "acquire_role", "seq": 1, "role": "r", "wait_s": float("inf")}),
    "no number": wire.HEADER
    + msgspec.msgpack.encode({"op": "acquire_role", "seq": 1, "role": "r", "wait_s": float("nan")}),
    "long name": wire.HEADER + msgspec.msgpack.encode({"op": "lease", "seq": 1, "edition": "e" * 513}),
    "unknown slab": wire.HEADER
    + msgspec.msgpack.encode(
        {"op": "add_slabs", "seq": 1, "transaction": "e", "slabs": [{"kind": "disk", "size": 1, "address": 0}]}
    ),
    "nothing in it": wire.HEADER
    + msgspec.msgpack.encode({"op": "add_slabs", "seq": 1, "transaction": "e", "slabs": []}),
    "trailing bytes": wire.encode(wire.AskStatus(1)) + b"\x00",
    "half a frame": wire.encode(wire.Hello(1, label="somebody"))[:-3],
    "deep": wire.HEADER + b"\x91" * 20000,
    "oversize": wire.HEADER + b"\xc0" * wire.FRAME_LIMIT,
    "a reply": wire.encode(wire.Done(1)),
}


@pytest.mark.parametrize("frame", GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_request_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_request(frame)


def test_another_version_is_named() -> None:
    with pytest.raises(ProtocolError, match="version 9") as caught:
        wire.decode_request(wire.MAGIC + b"\x09" + wire.encode(wire.AskStatus(1))[4:])
    assert caught.value.fields["code"] == "version"


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_pass_and_never_raise_anything_else(data: bytes) -> None:
    for frame in (data, wire.HEADER + data):
        for decode in (wire.decode_request, wire.decode_reply):
            try:
                decode(frame)
            except ProtocolError:
                continue


_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(REQUESTS), st.data())
def test_a_request_with_one_field_exchanged_is_refused_or_well_typed(
    request_: wire.Request, data: st.DataObject
) -> None:
    fields = msgspec.to_builtins(request_, builtin_types=(bytes,))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(_plain)
    try:
        decoded = wire.decode_request(wire.HEADER + msgspec.msgpack.encode(fields))
    except ProtocolError:
        return
    # What passed means the same on both sides: it is one of ours, and encodes to something that passes again.
    assert wire.decode_request(wire.encode(decoded)) == decoded or decoded != decoded


@given(st.sampled_from(REQUESTS), st.integers(0, 400), st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_still_a_request(request_: wire.Request, place: int, bit: int) -> None:
    frame = bytearray(wire.encode(request_))
    frame[place % len(frame)] ^= 1 << bit
    try:
        wire.descriptors_of(wire.decode_request(bytes(frame)))
    except ProtocolError:
        pass


def test_a_long_reply_goes_by_memfd_and_comes_back(no_fd_leak: None) -> None:
    long = wire.Evicted(7, editions=[INFO] * 2000)
    frame, fds, body = wire.pack_reply(long, [])
    assert len(frame) < 100
    assert body is not None
    assert fds == [body]
    received = [body.dup()]
    assert wire.unpack_reply(frame, received) == long
    assert received == []
    body.close()


def test_a_short_reply_takes_no_memfd() -> None:
    frame, fds, body = wire.pack_reply(wire.Done(1), [])
    assert (fds, body) == ([], None)
    assert wire.unpack_reply(frame, []) == wire.Done(1)


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", wire.encode(wire.Done(8)), wire.encode(wire.InMemory(7)), wire.encode(wire.AskStatus(7))],
    ids=["empty", "garbage", "another number", "another memfd", "a request"],
)
def test_a_reply_in_memory_must_be_the_announced_one(content: bytes, no_fd_leak: None) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack_reply(wire.encode(wire.InMemory(7)), [sealed_bytes("reply", content)])


def test_a_reply_in_memory_without_its_descriptor_is_refused() -> None:
    with pytest.raises(FerError, match="without its descriptor"):
        wire.unpack_reply(wire.encode(wire.InMemory(7)), [])
