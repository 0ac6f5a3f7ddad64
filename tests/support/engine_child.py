"""An engine in a process of its own: recovers, prints one JSON line, and stays until its standard input ends.

    python -m tests.support.engine_child '{"folder": "...", "options": {...}, "fault": {...}}'

``store`` is a file in which the ranks of a launch meet, and vote from then on. ``fault`` names a place and what happens
there, once or ``times``: ``{"at": "move", "when": "before"|"after", "do": "kill-self"}``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fer
from fer.engines import ranks
from fer.engines.base import Ranks
from fer.engines.module import ModuleEngine
from fer.errors import DriverError, FerError, OutOfMemory, SlabLost, StructureDiffers
from fer.memory import host
from fer.memory import open as opening
from fer.memory.base import Room
from fer.memory.host import HostBackend
from fer.weights import attach, edition, lookup, publish, stage
from fer.weights.client import KeeperClient
from tests.support import recovery_model

PLACES: dict[str, tuple[Any, str]] = {
    "open": (edition, "open_backend"),
    "find": (KeeperClient, "find"),
    "claim": (KeeperClient, "claim"),
    "lease": (KeeperClient, "lease"),
    "begin": (KeeperClient, "begin"),
    "add_slabs": (KeeperClient, "add_slabs"),
    "commit": (KeeperClient, "commit"),
    "make_room": (KeeperClient, "make_room"),
    "annotate": (KeeperClient, "annotate"),
    "load": (ModuleEngine, "load"),
    "prepare": (publish, "prepare"),
    "move": (publish, "move"),
    "seal": (publish, "seal"),
    "copies": (publish, "private_copies"),
    "map": (attach, "map_slabs"),
    "check": (attach.Check, "finish"),
    "bind": (attach, "bind"),
    "create": (HostBackend, "create"),
    "map-one": (HostBackend, "attach"),
    "digests": (stage.Digests, "run"),
}


def keeper_pid() -> int:
    with KeeperClient.connect() as client:
        return client.keeper_pid


def kill_keeper() -> None:
    os.kill(keeper_pid(), signal.SIGKILL)


def _raise(error: FerError) -> None:
    raise error


DEEDS: dict[str, Callable[[dict[str, Any]], None]] = {
    "kill-self": lambda fault: os.kill(os.getpid(), signal.SIGKILL),
    "kill-keeper": lambda fault: kill_keeper(),
    "slab-lost": lambda fault: _raise(SlabLost("a kept descriptor does not import", why="injected")),
    "no-driver": lambda fault: _raise(DriverError("the bindings of the driver are missing", why="injected")),
    "structure": lambda fault: _raise(StructureDiffers("the attached module is another", why="injected")),
    "stop-keeper": lambda fault: _stop_keeper(),
    "no-room": lambda fault: _raise(OutOfMemory("injected: no room", needed=2, free=1)),
    "no-room-for-torch": lambda fault: _lack(),
    "no-room-for-a-kernel": lambda fault: _lack_for_a_kernel(),
    "hang": lambda fault: time.sleep(600),
    "fill-gpu": lambda fault: _fill_gpu(),
    "append": lambda fault: _append(fault["file"]),
    "bug": lambda fault: 1 / 0 and None,  # type: ignore[func-returns-value]
}


def _lack() -> None:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nInjected.")


def _lack_for_a_kernel() -> None:
    """Torch's word where a module of kernels cannot be loaded."""
    raise RuntimeError("CUDA error: out of memory")


def _stop_keeper() -> None:
    with KeeperClient.connect() as client:
        client.stop(force=True)


_filling: list[Any] = []


def _fill_gpu() -> None:
    """Take the rest of the GPU's memory, as another process might."""
    import torch

    size = torch.cuda.mem_get_info()[0]
    while size >= 1 << 20:
        try:
            _filling.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2


def _give_back() -> None:
    if _filling:
        import torch

        _filling.clear()
        torch.cuda.empty_cache()


def _append(file: str) -> None:
    with open(file, "ab") as opened:
        opened.write(b"\0")


class Fault:
    """One fault, injected at a place; ``fired`` says whether it happened."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self.fault, self.fired, self.calls, self.times = fault, False, 0, int(fault.get("times", 1))
        owner, name = PLACES[fault["at"]]
        self.original = getattr(owner, name)
        outer = self

        def stand_in(*arguments: Any, **keywords: Any) -> Any:
            outer.calls += 1
            due = outer.times > 0 and outer.calls > fault.get("skip", 0)
            if due and fault["when"] == "before":
                outer.fire()
            result = outer.original(*arguments, **keywords)
            if due and fault["when"] == "after":
                outer.fire()
            return result

        setattr(owner, name, stand_in)

    def fire(self) -> None:
        if not self.fired:
            print(json.dumps({"fired": self.fault["at"]}), flush=True)
        self.fired = True
        self.times -= 1
        DEEDS[self.fault["do"]](self.fault)


def small_room(free: int) -> None:
    """Give host memory ``free`` bytes for slabs, less what kept slabs hold: a small device."""

    def room() -> Room:
        try:
            with KeeperClient.connect() as client:
                used = sum(info.bytes for info in client.status().editions)
        except FerError:
            used = 0
        return Room(free=max(0, free - used), total=free)

    opening._host = HostBackend(room)
    host.spare = lambda total: 0  # what otherwise stays free for everything else is more than these models


def main() -> None:
    asked = json.loads(sys.argv[1])
    os.environ.update(asked.get("environ", {}))
    fault = Fault(asked["fault"]) if asked.get("fault") else None
    if asked.get("room"):
        small_room(asked["room"])
    if asked.get("environment"):
        plain = lookup.environment
        lookup.environment = lambda device: {**plain(device), **asked["environment"]}  # type: ignore[assignment]
    engine = recovery_model.engine(Path(asked["folder"]), **asked.get("engine", {}))
    if asked.get("ranks"):
        engine._ranks = Ranks(**asked["ranks"])
    if asked.get("store"):
        launch = ranks.Launch(rank=engine._ranks.tp_rank, world=engine._ranks.tp_size, store=Path(asked["store"]))
        os.environ.update(launch.variables("cpu"))
        ranks.start("cpu", launch)
        engine.agree = lambda ok: ranks.agree(ok, "cpu")  # type: ignore[method-assign]
    row: dict[str, Any] = {"pid": os.getpid()}
    try:
        report = fer.recover(engine, **asked.get("options", {}))
        _give_back()
        told = report.stages["weights"]
        row |= {"path": told.path, "why": told.why, "details": told.details}
        row |= {"answer": recovery_model.answer(engine.module), "compiler": "torch._dynamo" in sys.modules}
    except FerError as error:
        row["error"] = error.to_dict()
    if fault is not None:
        row["fired"] = fault.fired
    print(json.dumps(row, default=str), flush=True)
    for line in sys.stdin:
        if line.strip() == "answer":
            print(json.dumps({"answer": recovery_model.answer(engine.module)}), flush=True)
        if line.strip() == "write":
            next(engine.module.parameters()).data.add_(1)
            print(json.dumps({"wrote": True}), flush=True)


if __name__ == "__main__":
    main()
