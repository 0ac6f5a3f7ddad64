"""Descriptors over sockets: whole messages, no leaks, long paths."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from fer.errors import OptionError
from fer.memory import fdpass
from fer.memory.fd import Fd
from tests.support.processes import WAIT_S, Children

pytestmark = pytest.mark.usefixtures("no_fd_leak")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with left, right:
        left.settimeout(WAIT_S)
        right.settimeout(WAIT_S)
        yield left, right


def _null() -> Fd:
    return Fd(os.open("/dev/null", os.O_RDONLY))


def test_a_message_arrives_with_its_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with _null() as fd:
        fdpass.send(left, b"two", [fd, fd.fileno()])
        assert not fd.closed, "the sender keeps what it sent"
    payload, fds, truncated = fdpass.receive(right, 100)
    assert (payload, len(fds), truncated) == (b"two", 2, False)
    for got in fds:
        assert os.fstat(got.fileno()).st_rdev == os.stat("/dev/null").st_rdev
        assert not os.get_inheritable(got.fileno())
    fdpass.close_all(fds)


def test_the_most_descriptors_in_one_message(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with _null() as fd:
        fdpass.send(left, b"many", [fd] * fdpass.MAX_FDS)
        with pytest.raises(ValueError, match="254"):
            fdpass.send(left, b"more", [fd] * (fdpass.MAX_FDS + 1))
    _, fds, truncated = fdpass.receive(right, 100)
    assert len(fds) == 253 and not truncated
    fdpass.close_all(fds)


def test_a_cut_payload_loses_its_descriptors(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with _null() as fd:
        fdpass.send(left, b"x" * 101, [fd])
        fdpass.send(left, b"next")
    assert fdpass.receive(right, 100) == (b"x" * 100, [], True)
    assert fdpass.receive(right, 100) == (b"next", [], False)


_CRAMPED = """
import os, resource, socket
from fer.memory import fdpass
from fer.memory.fd import Fd
left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
null = Fd(os.open("/dev/null", os.O_RDONLY))
fdpass.send(left, b"too many", [null] * 100)
before = sorted(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (null.fileno() + 20, null.fileno() + 20))
print(fdpass.receive(right, 100), sorted(os.listdir("/proc/self/fd")) == before)
"""


def test_descriptors_that_do_not_fit_into_the_process_are_not_leaked(children: Children) -> None:
    out, err = children.python(_CRAMPED).communicate(timeout=WAIT_S)
    assert out == "(b'too many', [], True) True\n", err
    children.end()  # before the descriptors are counted


def test_the_end_of_a_connection_is_an_empty_payload(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with pytest.raises(ValueError):
        fdpass.send(left, b"")
    left.close()
    assert fdpass.receive(right, 100) == (b"", [], False)


def test_an_empty_message_with_descriptors_leaks_none(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    with _null() as fd:
        left.sendmsg([b""], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.fileno()]))])
    assert fdpass.receive(right, 100) == (b"", [], False)


def test_credentials_beside_descriptors_do_no_harm(pair: tuple[socket.socket, socket.socket]) -> None:
    left, right = pair
    right.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    with _null() as fd:
        fdpass.send(left, b"one", [fd])
    payload, fds, truncated = fdpass.receive(right, 100)
    assert (payload, len(fds), truncated) == (b"one", 1, False)
    fdpass.close_all(fds)


def test_nothing_to_read_says_so(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].settimeout(None)
    with pytest.raises(BlockingIOError):
        fdpass.receive(pair[1], 100, flags=socket.MSG_DONTWAIT)


@pytest.mark.parametrize("depth", [0, 3])
def test_sockets_on_short_and_long_paths(tmp_path: Path, runtime_dir: Path, depth: int) -> None:
    folder = runtime_dir.joinpath(*["d" * 60] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "keeper.sock"
    assert (len(os.fsencode(path)) > 107) is bool(depth)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        fdpass.bind(server, path)
        server.listen()
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.settimeout(WAIT_S)
            fdpass.connect(client, path)
            served, _ = server.accept()
            with served:
                fdpass.send(served, b"hello")
            assert fdpass.receive(client, 100)[0] == b"hello"


def test_paths_that_cannot_be_shortened(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        with pytest.raises(OptionError, match="FER_RUNTIME_DIR"):
            fdpass.bind(sock, runtime_dir / ("n" * 120))
        with pytest.raises(FileNotFoundError):
            fdpass.connect(sock, runtime_dir / ("d" * 120) / "keeper.sock")
