"""What ranks say to each other is decoded strictly, and every wait for another rank is bounded."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from fer.errors import OptionError, PeerRankFailed, ProtocolError
from fer.standby import cohort, rank_wire
from fer.standby.cohort import Cohort, Link, join
from fer.standby.process import Command
from fer.standby.rank_commands import of_ranks
from fer.standby.service import Settings
from fer.weights.services import this_process

ORDERS: list[rank_wire.Order] = [
    rank_wire.Begin(1, [3, 5], 7), rank_wire.Advance([4, 9], 4), rank_wire.Move(2, 0), rank_wire.Here(),
    rank_wire.Back(), rank_wire.Prove(), rank_wire.Park(),
]  # fmt: skip
ANSWERS: list[rank_wire.Answer] = [
    rank_wire.Hello(1, 2), rank_wire.Done(), rank_wire.Kept(), rank_wire.Lacking({"kind": "OutOfMemory"}),
]  # fmt: skip


def test_messages_come_back_as_they_were() -> None:
    assert [rank_wire.order(rank_wire.line(each)) for each in ORDERS] == ORDERS
    assert [rank_wire.answer(rank_wire.line(each)) for each in ANSWERS] == ANSWERS


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"type":"shell","command":"rm"}',
        b'{"type":"advance","tokens":[1],"width":0}',
        b'{"type":"advance","tokens":[-1],"width":1}',
        b'{"type":"begin","row":-1,"ids":[1],"limit":1}',
        b'{"type":"move","source":0,"target":1,"more":1}',
        b'{"type":"done"}',
        b"[" * 100_000,
    ],
)
def test_whatever_is_no_order_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        rank_wire.order(line)


def test_lines_arrive_whole_however_they_travel() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = Link(theirs)
        sent = b"".join(map(rank_wire.line, ORDERS))
        for place in range(0, len(sent), 5):
            ours.sendall(sent[place : place + 5])
        assert [rank_wire.order(link.receive(5.0)) for _ in ORDERS] == ORDERS
        with pytest.raises(TimeoutError):
            link.receive(0.01)
        ours.close()
        assert link.receive() == b""


@pytest.fixture
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a rank would be the end of this test's process."""
    monkeypatch.setattr(cohort, "watch", lambda links, names: None)


def gathered(path: Path, rank: int, world: int) -> tuple[Cohort, Link]:
    """Rank 0 of two, and the rank that has come to it from a thread."""
    come: list[Link] = []
    thread = threading.Thread(target=lambda: come.append(join(path, rank, world)), daemon=True)
    thread.start()
    made = Cohort(path, 2)
    made.gather()
    thread.join(10.0)
    return made, come[0]


@pytest.mark.usefixtures("_unwatched")
def test_a_rank_that_comes_is_known_by_its_process(runtime_dir: Path) -> None:
    path = runtime_dir / "engine.sock.ranks"
    found, link = gathered(path, 1, 2)
    assert found.processes == [this_process()] * 2, "the other rank is a thread of this test"
    assert not path.exists(), "nobody else can come"
    found.tell(rank_wire.Here())
    assert rank_wire.order(link.receive(5.0)) == rank_wire.Here()
    with pytest.raises(PeerRankFailed, match=f"rank 1, process {os.getpid()}, does not answer"):
        found.hear(0.05)
    link.send(rank_wire.Done())
    assert found.hear(5.0) == [(1, rank_wire.Done())]


@pytest.mark.parametrize("hello", [(2, 2), (1, 3)])
def test_a_rank_of_another_engine_is_refused(runtime_dir: Path, hello: tuple[int, int]) -> None:
    with pytest.raises(ProtocolError, match="a rank of another engine"):
        gathered(runtime_dir / "engine.sock.ranks", *hello)


def test_ranks_that_do_not_come_are_named(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohort, "GATHER_S", 0.05)
    with pytest.raises(PeerRankFailed, match="ranks 1, 2 have not come"):
        Cohort(runtime_dir / "engine.sock.ranks", 3).gather()
    with pytest.raises(PeerRankFailed, match="rank 0 cannot be reached"):
        join(runtime_dir / "other.sock.ranks", 1, 2)


@pytest.mark.parametrize(("tp", "device"), [(0, "auto"), (2, "cuda:0"), (2, "cuda:1,cuda:1"), (1, "cuda:0,cuda:1")])
def test_settings_that_no_ranks_can_have_are_refused(tmp_path: Path, tp: int, device: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    Settings(model=tmp_path, tp=2, device="cuda:3,cuda:1").check()
    with pytest.raises(OptionError):
        Settings(model=tmp_path, tp=tp, device=device).check()


def test_a_command_a_rank(tmp_path: Path) -> None:
    command = Command(arguments=("python", "-m", "engine"))
    assert of_ranks(command, tmp_path / "engine-0-1.sock", 1) == [command]
    first, second = of_ranks(command, tmp_path / "engine-0-1.sock", 2)
    assert second.arguments == ("python", "-m", "engine", "--rank", "1", "--world", "2") and second.name == "rank 1"
    assert {path.name for path in first.files} == {"engine-0-1.sock.ranks", "engine-0-1.sock.store"}
    again, _ = of_ranks(command, tmp_path / "engine-0-2.sock", 2)
    assert not {*again.files} & {*first.files}, "each start meets elsewhere"
