"""Peers that break the rules harm nobody but themselves; and who may be a peer at all."""

from __future__ import annotations

import array
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fer import paths
from fer.errors import KeeperUnavailable, PeerRefused, ProtocolError
from fer.memory import fdpass
from fer.memory.fd import Fd
from fer.memory.seal import sealed_bytes
from fer.weights import wire
from fer.weights.client import KeeperClient
from tests.support.keeper import Keeper, key, publish, read_line, wait_until
from tests.support.processes import ROOT, WAIT_S, Children, kill_all_with, kill_and_wait

NOBODY = 65534


@pytest.fixture
def raw(keeper: Keeper) -> Iterator[socket.socket]:
    """A connection without a client behind it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_S)
        fdpass.connect(sock, keeper.directory / paths.SOCKET)
        yield sock


def greet(sock: socket.socket) -> None:
    sock.send(wire.encode(wire.Hello(1, label="raw")))
    assert isinstance(answer(sock), wire.Welcome)


def answer(sock: socket.socket) -> wire.AnyReply:
    frame, fds, _ = fdpass.receive(sock, wire.FRAME_LIMIT)
    with_body = wire.unpack_reply(frame, fds)
    fdpass.close_all(fds)
    return with_body


def refusal(sock: socket.socket) -> dict[str, Any]:
    """The error the keeper answers with before it closes."""
    reply = answer(sock)
    assert isinstance(reply, wire.Failed)
    assert sock.recv(1) == b"", "and then it hangs up"
    return reply.error


def code(sock: socket.socket) -> str:
    return str(refusal(sock)["fields"]["code"])


BAD = {
    "garbage": b"\x00\xff" * 40,
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "pickle": pickle.dumps(print),
    "pickle in a frame": wire.HEADER + pickle.dumps(print),
    "half": wire.encode(wire.Hello(1, label="somebody"))[:-2],
    "reply": wire.encode(wire.Done(1)),
}


@pytest.mark.parametrize("greeted", [False, True], ids=["at once", "after hello"])
@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_garbage_is_answered_and_ends_the_connection(
    keeper: Keeper, raw: socket.socket, frame: bytes, greeted: bool
) -> None:
    if greeted:
        greet(raw)
    raw.send(frame)
    assert code(raw) == "garbage"
    assert keeper.status().restarts == 0


def test_an_empty_message_ends_the_connection(keeper: Keeper, raw: socket.socket) -> None:
    raw.send(b"")
    assert code(raw) == "empty"


def test_an_oversize_message_ends_the_connection(keeper: Keeper, raw: socket.socket) -> None:
    greet(raw)
    raw.send(wire.encode(wire.AskStatus(2)) + bytes(wire.FRAME_LIMIT))
    assert code(raw) == "oversize"


def test_another_version_is_told_which(keeper: Keeper, raw: socket.socket) -> None:
    raw.send(wire.MAGIC + b"\x63" + wire.encode(wire.Hello(1))[4:])
    error = refusal(raw)
    assert error["fields"]["code"] == "version"
    assert "version 99" in error["what"]


def test_hello_comes_first(keeper: Keeper, raw: socket.socket) -> None:
    raw.send(wire.encode(wire.AskStatus(1)))
    assert code(raw) == "no_hello"


def test_numbers_only_grow(keeper: Keeper, raw: socket.socket) -> None:
    greet(raw)
    raw.send(wire.encode(wire.Unclaim(5)))
    assert answer(raw) == wire.Done(5)
    raw.send(wire.encode(wire.Unclaim(5)))
    assert answer(raw) == wire.Done(5), "the same request again gets the same answer"
    raw.send(wire.encode(wire.Unclaim(4)))
    assert code(raw) == "old_number"


@pytest.mark.parametrize("count", [1, 250])
def test_surplus_descriptors_are_closed_at_once(keeper: Keeper, raw: socket.socket, count: int) -> None:
    with keeper.client() as observer, sealed_bytes("surplus", b"x") as fd:
        greet(raw)
        observer.status()
        before = keeper.descriptors()
        fdpass.send(raw, wire.encode(wire.AskStatus(2)), [fd] * count)
        assert code(raw) == "wrong_fds"
        observer.status()
        after = keeper.descriptors()
        assert set(after) < set(before)
        assert not any("surplus" in what for what in after.values())


def test_a_message_cannot_carry_300_descriptors(keeper: Keeper, raw: socket.socket) -> None:
    greet(raw)
    with sealed_bytes("slab", b"x") as fd:
        many = array.array("i", [fd.fileno()] * 300)
        with pytest.raises(OSError):
            raw.sendmsg([wire.encode(wire.AskStatus(2))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, many)])
    raw.send(wire.encode(wire.AskStatus(2)))
    assert isinstance(answer(raw), wire.Status), "nothing of it has arrived"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_request_with_the_wrong_number_of_descriptors_is_refused(
    keeper: Keeper, raw: socket.socket, count: int
) -> None:
    greet(raw)
    with sealed_bytes("payload", b"x") as fd:
        fdpass.send(raw, wire.encode(wire.Begin(2, key=key(), total=1)), [fd] * count)
        assert code(raw) == "wrong_fds"
    assert keeper.status().pending == []


@pytest.mark.parametrize("what", ["unsealed", "pipe", "too big"])
def test_a_payload_that_is_none_is_refused(keeper: Keeper, raw: socket.socket, what: str) -> None:
    greet(raw)
    if what == "unsealed":
        fd = Fd(os.memfd_create("payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    elif what == "pipe":
        read, write = os.pipe()
        os.close(write)
        fd = Fd(read)
    else:
        fd = sealed_bytes("payload", bytes(wire.PAYLOAD_LIMITS["fields"] + 1))
    with fd:
        fdpass.send(raw, wire.encode(wire.Begin(2, key=key(), total=1)), [fd, fd])
        assert code(raw) == "bad_payload"


def test_a_transaction_ends_with_a_broken_rule(keeper: Keeper, raw: socket.socket) -> None:
    with keeper.client() as client:
        greet(raw)
        with sealed_bytes("payload", b"x") as fd:
            fdpass.send(raw, wire.encode(wire.Begin(2, key=key(), total=1)), [fd, fd])
            assert isinstance(answer(raw), wire.Begun)
        raw.send(b"garbage")
        assert code(raw) == "garbage"
        publish(client, key())


def test_a_silent_peer_delays_nobody_and_is_dropped(keeper: Keeper, raw: socket.socket) -> None:
    with keeper.client() as client:
        publish(client, key())
        assert raw.recv(1) == b"", "dropped, though it never said anything"
        # By now this client has been silent for as long; having said hello it may.
        assert len(client.status().editions) == 1


def test_a_peer_that_stops_reading_delays_nobody_and_is_dropped(keeper: Keeper, raw: socket.socket) -> None:
    greet(raw)
    raw.setblocking(False)
    sent = 1
    with keeper.client() as client:
        publish(client, key())
        try:
            while True:  # until the keeper reads no further requests, since it cannot get its answers out
                sent += 1
                raw.send(wire.encode(wire.AskStatus(sent)))
                client.status()
        except BlockingIOError:
            pass
        assert sent > 2
        wait_until(lambda: len(client.status().connections) == 1, "it is dropped")


def test_concurrent_clients_are_all_served(keeper: Keeper) -> None:
    with keeper.client() as first:
        edition = publish(first, key(), slabs=20)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                with keeper.client() as client:
                    for _ in range(20):
                        client.lease(edition).close()
                        client.release(edition)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert errors == []
        assert len(first.status().editions[0].holders) == 1


def test_close_ends_a_call_of_another_thread(keeper: Keeper, no_fd_leak: None) -> None:
    with keeper.client() as holder:
        assert holder.acquire_role("active", wait_s=0)
        client = keeper.client()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                client.acquire_role("active", wait_s=float("inf"))
            except KeeperUnavailable as error:
                errors.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        wait_until(lambda: len(keeper.status().waiting) == 1, "it waits")
        client.close()
        thread.join(WAIT_S)
        assert len(errors) == 1
        client.close()


def test_labels_and_reasons_are_one_printable_line(keeper: Keeper) -> None:
    with keeper.client("evil\n\x1b[2Jlabel") as client:
        assert client.status().connections[0].label == "evil??[2Jlabel"
        client.report_lost(publish(client, key()), "a\nb" * 1000)
        [lost] = [event.text for event in client.status().events if event.kind == "lost"]
        assert lost.isprintable()
        assert len(lost) <= 500


def test_a_client_is_not_shared_with_a_forked_child(keeper: Keeper) -> None:
    with keeper.client() as client:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                client.status()
            except KeeperUnavailable as error:
                os.write(write, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(write)
        with open(read, "rb") as told:
            assert b"after fork" in told.read()
        client.status()


# --- who may be a peer ---


def test_a_second_keeper_fails_fast_and_the_first_is_untouched(keeper: Keeper) -> None:
    with keeper.client() as client:
        edition = publish(client, key())
        done = subprocess.run(
            [sys.executable, "-m", "fer.weights.keeper", "--runtime-dir", keeper.directory],
            cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 3
        assert f"process {keeper.pid}" in done.stderr
        assert [info.edition for info in client.status().editions] == [edition]
    with keeper.client() as client:
        assert client.status().restarts == 0


def test_the_stale_socket_of_dead_keepers_is_replaced(children: Children, runtime_dir: Path) -> None:
    keeper = Keeper(children, runtime_dir)
    pid = keeper.pid
    children.kill(keeper.minder)
    kill_and_wait(pid)
    kill_all_with("FER_RUNTIME_DIR", str(runtime_dir))  # a minder it may have started in between
    assert (runtime_dir / paths.SOCKET).is_socket()
    with pytest.raises(KeeperUnavailable, match="nobody listens on") as caught:
        KeeperClient.connect()
    assert caught.value.fields["looked_in"] == [str(runtime_dir)]
    with Keeper(children, runtime_dir).client() as client:
        assert client.status().editions == []


def test_no_keeper_names_every_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FER_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(KeeperUnavailable) as caught:
        KeeperClient.connect()
    assert caught.value.fields["looked_in"] == [str(tmp_path / "fer"), "/tmp/fer-4242"]


def test_a_symlinked_socket_is_refused_on_both_sides(children: Children, keeper: Keeper, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    (place / paths.SOCKET).symlink_to(keeper.directory / paths.SOCKET)
    with pytest.raises(PeerRefused, match="symbolic link"):
        KeeperClient.connect(place)
    done = subprocess.run(
        [sys.executable, "-m", "fer.weights.keeper", "--runtime-dir", place],
        cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 3
    assert "symbolic link" in done.stderr
    assert (place / paths.SOCKET).is_symlink()


def test_a_symlinked_directory_is_refused(keeper: Keeper, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(keeper.directory)
    with pytest.raises(PeerRefused, match="symbolic link"):
        KeeperClient.connect(tmp_path / "link")


def test_a_file_in_place_of_the_socket_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    (place / paths.SOCKET).write_text("")
    with pytest.raises(PeerRefused, match="no socket"):
        KeeperClient.connect(place)


def test_a_long_path_is_bound_and_found(children: Children, runtime_dir: Path) -> None:
    place = runtime_dir / ("long" * 30) / "fer"
    assert len(str(place)) > 107
    keeper = Keeper(children, place)
    with keeper.client() as client:
        publish(client, key())


# --- other users; root is let through everywhere, so these need a child with another uid ---

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="NOT TESTED: only root can become another user")

BECOME_NOBODY = """
import hashlib, os, socket, sys
from pathlib import Path
import fer.options
from fer.errors import FerError
from fer.memory import fdpass
from fer.weights import wire
from fer.weights.client import KeeperClient
from fer.weights.keeper.boot import serve
# Only now: the other user may not be able to read this interpreter's files.
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
os.chdir("/")
os.environ["HOME"] = "/nonexistent"
place = Path(sys.argv[1])
"""
AS_CLIENT = """
try:
    with KeeperClient.connect(place) as client:
        print("served", client.status().uid)
except FerError as error:
    print(type(error).__name__, error)
"""
AS_RAW_PEER = """
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.settimeout(20)
fdpass.connect(sock, place / "keeper.sock")
sock.send(wire.encode(wire.Hello(1)))
print(wire.decode_reply(sock.recv(65536)).error["fields"]["code"])
"""
AS_KEEPER = """
sys.exit(serve(place, "minder"))
"""


def as_nobody(code: str, place: Path, **environment: str) -> str:
    """What another user's process says."""
    done = subprocess.run(
        [sys.executable, "-c", BECOME_NOBODY + code, place],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_root
def test_another_user_refuses_our_keeper_and_is_refused_by_it(keeper: Keeper) -> None:
    assert as_nobody(AS_CLIENT, keeper.directory).startswith("PeerRefused")
    keeper.directory.chmod(0o755)
    (keeper.directory / paths.SOCKET).chmod(0o666)  # were the modes wrong, the credentials would still be looked at
    assert as_nobody(AS_RAW_PEER, keeper.directory) == "foreign_user"
    keeper.directory.chmod(0o700)
    assert [holder.label for holder in keeper.status().connections] == ["status"]


@needs_root
def test_a_user_on_the_list_is_served(children: Children, runtime_dir: Path) -> None:
    keeper = Keeper(children, runtime_dir, FER_KEEPER_ALLOW_UIDS=str(NOBODY))
    assert as_nobody(AS_CLIENT, keeper.directory, FER_KEEPER_ALLOW_UIDS="0") == "served 0"


@needs_root
def test_root_does_not_use_the_keeper_of_another_user(children: Children, places: Path) -> None:
    os.chown(places, NOBODY, NOBODY)
    child = children.python(BECOME_NOBODY + AS_KEEPER, str(places), stderr=None)
    assert "listens" in read_line(child.stdout)
    with pytest.raises(PeerRefused, match="belongs to user 65534"):
        KeeperClient.connect(places)
    os.chown(places, 0, 0)
    with pytest.raises(PeerRefused, match="is user 65534"):
        KeeperClient.connect(places)


def test_errors_of_the_protocol_arrive_as_such(keeper: Keeper) -> None:
    with keeper.client() as client, pytest.raises(ProtocolError) as caught:
        client.acquire_role("r" * 600, wait_s=0)
    assert caught.value.fields["code"] == "garbage"
