"""How long a GPU takes to be free again after SIGKILL, and how long the next process takes to fill it.

A victim holds a context and memory, busy or idle, and is killed. A successor that has its context waits to get as much
memory, as a standby does that is promoted; beside it one that needs none of its own, since a process without CUDA has
kept the victim's memory open. Times count from the kill.

python -m bench.death_gpu [--gib 60] [--runs 10]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.harness import Results, spread

CHUNK = 1 << 30
LIMIT_S = 60.0
SLACK = 64 << 20
"""Bytes that the driver keeps for itself now and then."""


BESIDE = 30
"""GiB that a victim holds beside, as weights and graphs are: so much that its successor has to wait for its end."""

HIGH = "its pipe under a high number closes"
PIPES = ("its pipe under a low number closes", HIGH)
"""A process that dies closes its descriptors one after another, and those of the GPU among them."""

KINDS: dict[str, dict[str, Any]] = {
    "context alone": {"alone": True},
    "idle, nobody waits": {"alone": True, "held": True},
    "busy, nobody waits": {"alone": True, "held": True, "busy": True},
    "idle": {"held": True},
    "busy": {"held": True, "busy": True},
    "by cudaMalloc, busy": {"held": True, "malloc": True, "busy": True},
    "kept open by another, busy": {"held": True, "kept": True, "busy": True},
}


class Memory:
    """Chunks of device memory at addresses of their own."""

    def __init__(self) -> None:
        from fer.memory.device import CudaDevice
        from fer.memory.vmm import Vmm

        self.device, self.vmm = CudaDevice(0), Vmm()

    def create(self, count: int) -> list[Any]:
        """As many chunks, or none: then DriverError."""
        from fer.errors import DriverError
        from fer.memory import driver

        made: list[Any] = []
        try:
            for _ in range(count):
                made.append(driver.call("cuMemCreate", CHUNK, self.vmm.properties(0), 0))
        except DriverError:
            for handle in made:
                driver.quietly("cuMemRelease", handle)
            raise
        return made

    def map(self, handles: list[Any]) -> int:
        from fer.memory import driver

        size = CHUNK * len(handles)
        address = int(driver.call("cuMemAddressReserve", size, 0, 0, 0))
        for number, handle in enumerate(handles):
            driver.call("cuMemMap", address + number * CHUNK, CHUNK, 0, handle, 0)
        driver.call("cuMemSetAccess", address, size, [self.vmm.access(0, self.vmm.read_write)], 1)
        return address

    def clear(self, address: int, count: int) -> None:
        from fer.memory import driver

        for number in range(count):
            driver.call("cuMemsetD8", address + number * CHUNK, 0, CHUNK)
        self.device.synchronize()


def victim(asked: dict[str, Any]) -> None:
    """Hold memory, keep the GPU at work if asked, and wait to be killed."""
    from fer.memory import driver

    os.dup2(int(asked["high"]), 900, inheritable=False)
    os.close(int(asked["high"]))
    memory, count = Memory(), int(asked["gib"]) if asked.get("held") else 0
    with memory.device.current():
        address = 0
        if count and not asked.get("kept"):
            memory.create(BESIDE)
        if count and asked.get("malloc"):
            address = int(driver.call("cuMemAlloc", count * CHUNK))
        elif count:
            handles = memory.create(count)
            address = memory.map(handles)
            if asked.get("kept"):
                export(memory, handles, int(asked["socket"]))
        if count:
            memory.clear(address, count)
        print("ready", flush=True)
        while asked.get("busy"):
            memory.clear(address, count)
        while True:
            time.sleep(60)


def export(memory: Memory, handles: list[Any], number: int) -> None:
    """Send a descriptor of each chunk."""
    from fer.memory import driver, fdpass

    with socket.socket(fileno=number) as sock:
        for handle in handles:
            fd = int(driver.call("cuMemExportToShareableHandle", handle, memory.vmm.descriptor, 0))
            fdpass.send(sock, b"slab", [fd])
            os.close(fd)


def successor(asked: dict[str, Any]) -> None:
    """Get memory as soon as there is some; print when each step was done."""
    from fer.errors import DriverError
    from fer.memory import driver

    memory, count = Memory(), int(asked["gib"])
    with memory.device.current():
        warm = memory.create(1)
        memory.clear(memory.map(warm), 1)
        print("ready", flush=True)
        sys.stdin.readline()  # the victim is dead, as far as its parent was told
        told = time.monotonic()
        kept = asked.get("descriptors")
        if kept:
            handles = [driver.call("cuMemImportFromShareableHandle", fd, memory.vmm.descriptor) for fd in kept]
        else:
            while True:
                try:
                    handles = memory.create(count)
                    break
                except DriverError as error:
                    if driver.code_of(error) != driver.OUT_OF_MEMORY or time.monotonic() > told + LIMIT_S:
                        raise
        had = time.monotonic()
        address = memory.map(handles)
        mapped = time.monotonic()
        memory.clear(address, count)
        row = {"told": told, "had": had, "mapped": mapped, "cleared": time.monotonic()}
    print(json.dumps(row), flush=True)
    os._exit(0)


def used() -> Callable[[], int]:
    """Bytes of GPU 0 in use, asked without CUDA."""
    from fer.memory.gpus import _Memory, _Nvml

    nvml, handle, memory = _Nvml(), ctypes.c_void_p(), _Memory()
    nvml.call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(handle))

    def ask() -> int:
        nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        return int(memory.used)

    return ask


def start(role: str, asked: dict[str, Any], fds: list[int]) -> subprocess.Popen[str]:
    """A process of this file."""
    command = [sys.executable, "-m", "bench.death_gpu", role, json.dumps(asked)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=fds)


def ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"a process was not ready and ended with {process.wait()}")


def death(asked: dict[str, Any], ask: Callable[[], int]) -> dict[str, float]:
    """One death: seconds from the kill until each thing was so."""
    from fer.memory import fdpass

    base, count = ask(), int(asked["gib"])
    kept: list[Any] = []
    started: list[subprocess.Popen[str]] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pipes = {name: os.pipe() for name in PIPES}
    try:
        with ours, theirs:
            passed = [theirs.fileno(), *(write for _, write in pipes.values())]
            told = {"socket": theirs.fileno(), "high": pipes[HIGH][1]}
            started.append(start("victim", {**asked, **told}, passed))
            for _, write in pipes.values():
                os.close(write)
            while asked.get("kept") and len(kept) < count:
                kept += fdpass.receive(ours, 64)[1]
        ready(started[0])
        if not asked.get("alone"):
            numbers = [fd.fileno() for fd in kept]
            started.append(start("successor", {"gib": count, "descriptors": numbers}, numbers))
            ready(started[1])
        return kill(*started, base=base, ask=ask, pipes={name: read for name, (read, _) in pipes.items()})
    finally:
        for read, _ in pipes.values():
            os.close(read)
        for process in started:
            process.kill()
            process.wait()
        for fd in kept:
            fd.close()
        until(lambda: ask() <= base + SLACK)


def kill(
    one: subprocess.Popen[str],
    other: subprocess.Popen[str] | None = None,
    *,
    base: int,
    ask: Callable[[], int],
    pipes: dict[str, int],
) -> dict[str, float]:
    pidfd = os.pidfd_open(one.pid)
    at = time.monotonic()
    os.kill(one.pid, signal.SIGKILL)
    row: dict[str, float] = {}
    waited = {**pipes, "the pidfd tells": pidfd}
    while waited:
        ready, _, _ = select.select([*waited.values()], [], [], LIMIT_S)
        for name in [name for name, fd in waited.items() if fd in ready]:
            row[name] = time.monotonic() - at
            del waited[name]
    os.close(pidfd)
    if other is None:
        until(lambda: ask() <= base + SLACK)
        row["memory in use has fallen"] = time.monotonic() - at
        return row
    assert other.stdin is not None and other.stdout is not None
    other.stdin.write("\n")
    other.stdin.flush()
    found = json.loads(other.stdout.readline())
    return row | {
        "memory got": found["had"] - at,
        "mapped": found["mapped"] - at,
        "cleared": found["cleared"] - at,
    }


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the memory is still in use after {LIMIT_S:g} s")


def main() -> None:
    roles = {"victim": victim, "successor": successor}
    if sys.argv[1:] and sys.argv[1] in roles:
        roles[sys.argv[1]](json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=int, default=60)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=[*KINDS])
    arguments = parser.parse_args()
    results, ask = Results("death_gpu"), used()
    results.add("memory held and wanted (GiB)", [arguments.gib, "beside it", BESIDE])
    for name in arguments.kinds:
        asked = {"gib": arguments.gib, **KINDS[name]}
        rows = [death(asked, ask) for _ in range(arguments.runs)]
        for part in rows[0]:
            results.add(f"{name}: {part} (ms)", spread([row[part] for row in rows]))
        results.save()


if __name__ == "__main__":
    main()
