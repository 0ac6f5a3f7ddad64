"""A real keeper process for tests, and what they do with it again and again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from fer.memory.fd import Fd
from fer.memory.fdpass import close_all
from fer.memory.seal import sealed_bytes
from fer.weights.client import KeeperClient, Key, SlabInfo, Status
from fer.weights.keeper.start import keeper_pid
from tests.support.descriptors import open_descriptors
from tests.support.processes import WAIT_S, Children, kill_and_wait

PAGE = 4096


def key(group: str = "g", rank: str = "tp0/1", gpu: str = "host", launch: str = "launch", local_size: int = 1) -> Key:
    """A key with all fields given."""
    return Key(group, rank, gpu, launch, local_size)


def slab(byte: bytes = b"x", size: int = PAGE) -> Fd:
    """A host slab."""
    return sealed_bytes("slab", byte * size)


def gpu_slab() -> Fd:
    """What the keeper takes for a slab of a GPU: a descriptor of the driver, or where there is none, a likeness."""
    if os.path.exists("/dev/nvidiactl"):
        return Fd(os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC))
    return Fd(os.eventfd(0))


def begin(client: KeeperClient, of: Key, *, checkpoint: bytes = b"checkpoint", slabs: int = 1, size: int = PAGE) -> str:
    """A transaction with all its slabs, not committed."""
    transaction = client.begin(
        of, fields=b"fields of " + of.group.encode(), checkpoint=checkpoint, total=slabs * size
    ).transaction
    on_host = of.gpu == "host"
    # Each slab a file of its own, as real ones are: systemd keeps a file once, whatever names it is given.
    fds = [slab(size=size) if on_host else gpu_slab() for _ in range(slabs)]
    try:
        client.add_slabs(transaction, [(SlabInfo("host" if on_host else "cuda", size), fd) for fd in fds])
    finally:
        close_all(fds)
    return transaction


def publish(
    client: KeeperClient, of: Key, *, checkpoint: bytes = b"checkpoint", slabs: int = 1, size: int = PAGE
) -> str:
    """A whole edition; its id."""
    transaction = begin(client, of, checkpoint=checkpoint, slabs=slabs, size=size)
    return client.commit(transaction, b"manifest", wait_s=WAIT_S).edition


def wait_until(condition: Callable[[], bool], what: str, timeout: float = WAIT_S) -> None:
    """Ask again until it holds; fails after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        time.sleep(0.01)


def read_line(stream: IO[str] | None, timeout: float = WAIT_S) -> str:
    """The next line of a child's pipe, which must come in time; empty at its end."""
    assert stream is not None
    deadline = time.monotonic() + timeout
    line = b""
    # Byte by byte from the descriptor: the stream's own buffer would take lines that select() then does not see.
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([stream], [], [], max(deadline - time.monotonic(), 0))
        assert ready, "the child said nothing in time"
        byte = os.read(stream.fileno(), 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


class Keeper:
    """A keeper under its minder, in a runtime directory."""

    def __init__(self, children: Children, directory: Path, *, fault: str = "", **environment: str) -> None:
        self.directory = directory
        self.log = directory.with_name(directory.name + ".log")
        self._children = children
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.minder = children.spawn(
                [sys.executable, "-m", "fer.weights.keeper", "--runtime-dir", directory],
                stderr=log,
                env={**os.environ, "_FER_FAULT": fault, **environment},
            )
        assert "listens" in read_line(self.minder.stdout), self.log.read_text()

    @property
    def pid(self) -> int:
        """The keeper itself, not its minder."""
        return keeper_pid(self.directory)

    def client(self, label: str = "test") -> KeeperClient:
        """A connection."""
        return KeeperClient.connect(self.directory, label=label, timeout=WAIT_S)

    def status(self) -> Status:
        """What it knows."""
        with self.client("status") as client:
            return client.status()

    def kill(self) -> int:
        """SIGKILL the keeper; the pid it had."""
        pid = self.pid
        kill_and_wait(pid)
        return pid

    def descriptors(self) -> dict[int, str]:
        """What the keeper has open."""
        return open_descriptors(self.pid)

    def stored(self) -> dict[int, str]:
        """What the minder has open."""
        return open_descriptors(self.minder.pid)

    def events(self, kind: str) -> list[str]:
        """Texts of the remembered events of a kind."""
        return [event.text for event in self.status().events if event.kind == kind]

    def faults(self) -> list[str]:
        """Points at which a keeper killed itself as told."""
        return [
            line.removeprefix("fault: ") for line in self.log.read_text().splitlines() if line.startswith("fault: ")
        ]

    def terminate(self) -> int:
        """SIGTERM to the minder; its exit code."""
        self.minder.send_signal(signal.SIGTERM)
        return self.minder.wait(WAIT_S)


ENGINE = """
import sys
from pathlib import Path
from tests.support.keeper import Key, SlabInfo, KeeperClient, slab, PAGE
def reach(step):
    print(step, flush=True)
    if step == sys.argv[2]:
        sys.stdin.read()  # until killed
client = KeeperClient.connect(Path(sys.argv[1]), label="victim")
key = Key(*sys.argv[3].split(","), int(sys.argv[4]))
reach("connect")
found = client.find(key)
reach("find")
if found.candidates:
    leased = client.lease(found.candidates[0].edition)
    reach("lease")
    client.release(found.candidates[0].edition)
    reach("release")
client.claim(key, wait_s=20)
reach("claim")
transaction = client.begin(key, fields=b"f", checkpoint=b"victim", total=2 * PAGE).transaction
reach("begin")
client.add_slabs(transaction, [(SlabInfo("host", PAGE), slab())] * 2)
reach("add")
if int(sys.argv[4]) > 1:
    print("committing", flush=True)
client.commit(transaction, b"manifest", wait_s=20)
reach("commit")
"""
"""An engine that stops at a step: arguments are directory, step, key (comma-separated), local size."""


def engine_at(children: Children, keeper: Keeper, step: str, of: Key) -> subprocess.Popen[str]:
    """A child that has reached a step and waits there."""
    arguments = [str(keeper.directory), step, f"{of.group},{of.rank},{of.gpu},{of.launch}", str(of.local_size)]
    child = children.python(ENGINE, *arguments, stdin=-1)
    while (line := read_line(child.stdout)) != step:
        assert line, "the engine ended before it got there"
    return child
