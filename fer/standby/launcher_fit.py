"""Whether a process may be forked into engines, and if not, what has spoiled it.

A fork copies one thread. What other threads held or did is left as it was, locks included, and a CUDA context does not
survive a fork at all. Both show in ``/proc``. What does not show, such as the state of a thread pool whose threads have
ended, is found by a trial child that does what engines do.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fer.memory.fd import Fd

STALL_S = 2.0
"""Seconds in which a step of the trial neither ends nor uses a processor: it hangs. A busy machine only slows it."""
CONTEXT_S = 10.0
"""The same for a CUDA context, which a driver that was not in use has to wake the GPU for."""
STEP_S = 60.0
"""Seconds a step may take at all."""
_NAMED = 4
DEVICES = re.compile(r"/dev/(nvidia(?!-caps)|nvidiactl|nvidia-uvm)")
"""What a process that has asked CUDA anything has open."""

Step = tuple[str, float, Callable[[], object]]


def threads() -> list[str]:
    """Every thread beside the main one, by its number and name."""
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = []
    for entry in Path("/proc/self/task").iterdir():
        number = int(entry.name)
        if number == os.getpid():
            continue
        try:
            name = known.get(number) or (entry / "comm").read_text("utf-8", "replace").strip()
        except OSError:
            continue  # it has just ended
        found.append(f"thread {number} ({name})")
    return found


def devices(table: dict[int, str] | None = None) -> list[str]:
    """Open descriptors of GPUs.

    Args:
        table: path by descriptor; this process's own if None.
    """
    return [f"descriptor {number} ({path})" for number, path in (table or _open()).items() if DEVICES.match(path)]


def _open() -> dict[int, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue
    return found


def faults() -> str:
    """What stands in the way of a fork, ``""`` for nothing."""
    wrong = devices()
    if wrong:
        return f"it has a GPU open: {_some(wrong)}"
    running = threads()
    return f"it has threads: {_some(running)}" if running else ""


def _some(named: list[str]) -> str:
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more


def settle() -> None:
    """Fork once for nothing: pools that are made for forks, as OpenBLAS's, end their threads now and not later."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


# --- the trial ---


def steps() -> list[Step]:
    """What a trial child does, as far as its libraries are imported: name, seconds it may stall, and how."""
    wanted: list[Step] = [("fork", STALL_S, lambda: None)]
    if "torch" in sys.modules:
        wanted.append(("parallel operation of torch", STALL_S, _multiply))
    if "tokenizers" in sys.modules:
        wanted.append(("encode_batch of tokenizers", STALL_S, _encode))
    if "torch" in sys.modules:
        wanted.append(("CUDA context", CONTEXT_S, _context))
    return wanted


def _multiply() -> None:
    import torch

    factor = torch.ones(1024, 1024)
    total = float((factor @ factor).sum())
    assert total == 1024**3, total


def _encode() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made: Any = Tokenizer(models.WordLevel({"fer": 0, "unknown": 1}, unk_token="unknown"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    encoded = made.encode_batch(["fer " * 64] * 256)
    assert len(encoded) == 256 and encoded[-1].ids == [0] * 64


def _context() -> None:
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda").add_(1).item()


def trial(todo: list[Step] | None = None) -> str:
    """Fork a child, have it do what engines do, and wait for it; what went wrong, ``""`` for nothing.

    Args:
        todo: what it does; :func:`steps` if None.
    """
    todo = steps() if todo is None else todo
    ours, theirs = (Fd(number) for number in os.pipe2(os.O_CLOEXEC))
    pid = os.fork()
    if pid == 0:
        _do(todo, theirs)
    with ours, Fd(os.pidfd_open(pid)) as process:
        theirs.close()
        try:
            return _follow(pid, process.fileno(), ours.fileno(), todo)
        finally:
            signal.pidfd_send_signal(process.fileno(), signal.SIGKILL)
            os.waitpid(pid, 0)


def _do(todo: list[Step], said: Fd) -> None:
    """The child: a byte for each step that is done."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        for _, _, step in todo:
            step()
            os.write(said.fileno(), b"+")
        status = 0
    except BaseException as error:
        text = (str(error).splitlines() or [""])[0]
        os.write(said.fileno(), f"{type(error).__name__}: {text}".encode()[:2000])
        status = 1
    os._exit(status)


def _follow(pid: int, process: int, said: int, todo: list[Step]) -> str:
    for name, stall, _ in todo:
        begin = moved = time.monotonic()
        used = _used(pid)
        poll = select.poll()
        poll.register(said, select.POLLIN)
        while not poll.poll(100):
            now = time.monotonic()
            if (spent := _used(pid)) != used:
                used, moved = spent, now
            if now - moved > stall or now - begin > STEP_S:
                return f"a forked child hangs in its {name} ({now - begin:.1f} s)"
        answer = os.read(said, 1)
        if not answer:
            return f"a forked child died in its {name}"
        if answer != b"+":
            return f"a forked child failed in its {name}: {(answer + os.read(said, 4096)).decode('utf-8', 'replace')}"
    return ""


def _used(pid: int) -> int:
    """Processor time of a process, in the kernel's ticks."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12])
