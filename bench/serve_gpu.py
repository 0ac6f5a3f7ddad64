"""SIGKILL of the serving engine to the next token at the client on one GPU: a model of 8B shape, 60 GiB of cache.

Each run kills the engine in the middle of a streamed answer and compares the whole text with the undisturbed one. Rows:
a parked standby that is promoted, a restart by the launcher, both with the cache that outlives the engine and with a
new one, a restart by a new interpreter, and the plain start (``FER_MODE=off``); then planned switches, many deaths
one after another, after which nothing may be left behind, and deaths under many answers at once.

python -m bench.serve_gpu [FOLDER]   # makes the model in FOLDER (16 GB), saves and proves its graphs, then measures

Every row is written as soon as it is known; after ``--limit-s`` no run begins any more.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Results, gpu_processes_mib, gpu_used_mib, private_directory, spread
from bench.serve_cpu import LIMIT_S, ROWS, WARM, Service, faster, launcher, medians, service
from bench.standby_cpu import cycles, kept, killed

SIZES = (1, 2, 4, 8, 16, 32)
LAYERS, HEADS, WIDTH = 36, 8, 128  # of bench.graphs_start's model
NEW = ["--no-keep-cache"]
NAMES: dict[str, tuple[str, list[str]]] = {
    "standby": ("standby", []),
    "standby with a new cache": ("standby", NEW),
    "launcher": ("launcher", []),
    "launcher with a new cache": ("launcher", NEW),
    "interpreter": ("keeper", []),
    "plain": ("plain", NEW),
}
"""Of each row the way of ``bench.serve_cpu``, and arguments of its own."""
FAST = ("standby", "launcher")
ORDER = [
    "standby",
    "launcher",
    "plain",
    "switch",
    "cycles",
    "busy",
    "interpreter",
    *(name for name in NAMES if "new" in name),
]
PROVEN_S = 180.0
CROWD = 12
"""Answers at once: more than the graphs take that a start restores first."""


def length_for(gib: float) -> int:
    """Positions of each row with which the cache is as large as asked, or slightly more."""
    position = 2 * LAYERS * HEADS * WIDTH * 2 * max(SIZES)
    return math.ceil(gib * (1 << 30) / position / 64) * 64


def make(folder: Path) -> None:
    """The model, and a tokenizer in which each token is a word."""
    from tests.support.serve_models import add_words

    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "bench.graphs_start", "make", str(folder), str(LAYERS)]
        subprocess.run(command, check=True)
    if not (folder / "tokenizer.json").exists():
        add_words(folder)


class Bench:
    """The rows, with what they share."""

    def __init__(self, results: Results, model: Path, more: list[str], limit_s: float, directory: Path) -> None:
        self.results, self.model, self.more, self.directory = results, model, more, directory
        self._deadline = time.monotonic() + limit_s
        self.medians: dict[str, float] = {}

    def prime(self) -> None:
        """The first start: publishes the weights, captures, saves, and has its graphs proven beside it."""
        from fer.cudagraph import store

        begin = time.monotonic()
        with self._service("keeper") as served:
            served.quiet(1)
            self.results.add("first start, until it serves (s)", round(time.monotonic() - begin, 1))
            self.results.add("device memory with one engine (MiB)", memory_used())
            listed = None
            while "cuda:0" in self.more and time.monotonic() < begin + PROVEN_S:
                found = store.find()
                listed = store.look(found[0]) if found else None
                if listed is not None and listed.proof.startswith(("proven", "failed")):
                    break
                time.sleep(0.2)
            why = f"{listed.proof} {listed.why} {dict(listed.quarantined)}" if listed is not None else "no archive"
            self.results.add("its graphs", why)
            self.results.add("its stages", stages(served))

    def row(self, name: str, runs: int) -> None:
        """Deaths of one kind."""
        if self._late(name):
            return
        kind, arguments = NAMES[name]
        engines = 2 if kind == "standby" else 1
        found: list[dict[str, float]] = []
        with self._service(kind, arguments) as served:
            served.quiet(engines)
            self.results.add(f"{name}: device memory at rest (MiB)", memory_used())
            undisturbed = "".join(piece for _, piece in served.pieces())
            while len(found) < runs and time.monotonic() < self._deadline:
                found.append(killed(served, engines, undisturbed))
            served.quiet(engines)
            self.results.add(f"{name}: stages afterwards", stages(served))
        if not found:
            self._late(name)
            return
        whole = [run["whole"] for run in found]
        self.medians[name] = statistics.median(whole)
        self.results.add(f"{name}: SIGKILL to next token at the client (ms)", spread(whole))
        self.results.add(f"{name}: median of each part (ms)", medians(found))
        if kind == "launcher":
            self.results.add(f"{name}: runs in which a spare waited", sum("interpreter" not in run for run in found))

    def _late(self, name: str) -> bool:
        """Whether the time is up, which is told as what became of a row: its engines alone take a while."""
        late = time.monotonic() >= self._deadline
        if late:
            self.results.add(f"{name}: not run", "the time was up")
        return late

    def switches(self, runs: int) -> None:
        """Planned switches in the middle of answers: no request may fail."""
        if self._late("switch"):
            return
        gaps: list[float] = []
        with self._service("standby") as served:
            served.quiet(2)
            undisturbed = "".join(piece for _, piece in served.pieces())
            while len(gaps) < runs and time.monotonic() < self._deadline:
                gap, text = switched(served, others=2 * (len(gaps) % 2))
                if len(gaps) % 2 == 0 and text != undisturbed:
                    raise RuntimeError(f"another answer: {text!r} in place of {undisturbed!r}")
                gaps.append(gap)
                served.quiet(2)
        told = spread(gaps) if gaps else "not run, the time was up"
        self.results.add("planned switch, no request failed: longest gap at a client (ms)", told)

    def cycles(self, count: int) -> None:
        """Deaths one after another; raises where an answer differs or something is left."""
        if self._late("cycles"):
            return
        with self._service("standby") as served:
            cycles(self.results, served, count, lambda: self._held(served), self._deadline)

    def busy(self, runs: int) -> None:
        """Deaths under many answers; raises where one of them ends early."""
        for kind in ("launcher", "standby"):
            found: list[float] = []
            if self._late(f"{kind}, {CROWD} answers"):
                return
            with self._service(kind) as served:
                while len(found) < runs and time.monotonic() < self._deadline:
                    found.append(crowd(served, engines=1 + (kind == "standby")))
            name = f"{kind}, {CROWD} answers under way: SIGKILL to the last client's next token (ms)"
            self.results.add(name, spread(found))

    def _held(self, served: Service) -> dict[str, int]:
        return {**kept(served, self.directory), "device memory that is no process's, steps of 64 MiB": unowned() // 64}

    @contextlib.contextmanager
    def _service(self, kind: str, own: Sequence[str] = ()) -> Iterator[Service]:
        arguments, environment = ROWS[kind]
        with (
            launcher(self.model) if "auto" in arguments else contextlib.nullcontext(),
            service(self.model, [*arguments, *self.more, *own], environment) as served,
        ):
            yield served


def memory_used() -> int:
    """MiB in use on GPU 0; 0 where there is none."""
    return gpu_used_mib() if shutil.which("nvidia-smi") else 0


def unowned() -> int:
    """MiB on GPU 0 that no living process accounts for: what a keeper holds, and what would have leaked.

    What a process accounts for ends with it, and differs: contexts of equal engines take 1,152 or 1,392 MiB.
    """
    return memory_used() - sum(gpu_processes_mib()) if shutil.which("nvidia-smi") else 0


def stages(served: Service) -> dict[str, Any]:
    """What the serving engine's start says of itself."""
    active = next(member for member in served.status()["members"] if member["role"] == "active")
    recovery = active["recovery"]
    return {
        "phases (s)": {name: round(seconds, 3) for name, seconds in recovery["phase_s"].items()},
        "stages": {name: f"{stage['path']}: {stage['why']}" for name, stage in recovery["stages"].items()},
        "via": active["processes"][0]["via"],
    }


def switched(served: Service, others: int) -> tuple[float, str]:
    """One switch in the middle of an answer, while others begin: the longest gap at its client (seconds), its text.

    Raises:
        RuntimeError: the switch, or a request, failed.
    """
    counts: list[int] = []
    more = [threading.Thread(target=lambda: counts.append(len([*served.pieces()]))) for _ in range(others)]
    times: list[float] = []
    text = ""
    asked: subprocess.Popen[str] | None = None
    for at, piece in served.pieces():
        times.append(at)
        text += piece
        if len(times) == WARM:
            asked = subprocess.Popen(
                [sys.executable, "-m", "fer", "switch"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for thread in more:
                thread.start()
    assert asked is not None
    said = asked.communicate(timeout=LIMIT_S)[0]
    for thread in more:
        thread.join(LIMIT_S)
    # Answers that share steps may round otherwise than one alone, so of those only the length is compared.
    if asked.returncode or counts != [len(times)] * others:
        raise RuntimeError(f"a switch or a request failed: {said!r}, {counts} pieces beside {len(times)}")
    return max(after - before for before, after in itertools.pairwise(times)), text


def crowd(served: Service, engines: int) -> float:
    """One death under many answers: seconds until every client has its next token.

    Answers that share steps may round otherwise than one alone, so only their length is compared.

    Raises:
        RuntimeError: an answer ended early.
    """
    served.quiet(engines)
    pid = served.spared()["pid"]
    moments: list[list[float]] = [[] for _ in range(CROWD)]

    def listen(times: list[float]) -> None:
        for at, _ in served.pieces():
            times.append(at)

    clients = [threading.Thread(target=listen, args=(times,)) for times in moments]
    for client in clients:
        client.start()
    until = time.monotonic() + LIMIT_S
    while min(map(len, moments)) < WARM and time.monotonic() < until:
        time.sleep(0.001)
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    for client in clients:
        client.join(LIMIT_S)
    lengths = sorted(map(len, moments))
    if lengths[0] != lengths[-1]:
        raise RuntimeError(f"answers ended early: {lengths} pieces")
    return max(next(at for at in times if at > killed) for times in moments) - killed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, default=Path("/tmp/fer-serve-model"))
    parser.add_argument("--device", default="cuda:0", help="cpu tries the benchmark itself, with a small model")
    parser.add_argument("--gib", type=float, default=60.0, help="of key/value cache")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--slow-runs", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--limit-s", type=float, default=540.0)
    parser.add_argument("--steps", nargs="*", default=ORDER)
    arguments = parser.parse_args()

    results = Results("serve_gpu")
    begin = time.monotonic()
    failed = False
    length = length_for(arguments.gib)
    more = ["--device", arguments.device, "--dtype", "bfloat16", "--max-length", str(length)]
    more += ["--batch-sizes", ",".join(map(str, SIZES))]
    with tempfile.TemporaryDirectory(prefix="fer-bench-") as home, private_directory() as directory:
        os.environ["FER_HOME"] = home
        make(arguments.folder)
        results.add("model made (s)", round(time.monotonic() - begin, 1))
        results.add("cache: rows, positions of each, GiB", [max(SIZES), length, round(cache_gib(length), 2)])
        results.add("caches", "page cache warm, byte-compiled packages; nothing is compiled")
        bench = Bench(results, arguments.folder, more, begin + arguments.limit_s - time.monotonic(), directory)
        steps: dict[str, Callable[[], None]] = {
            name: lambda name=name: bench.row(  # type: ignore[misc]
                name, arguments.runs if name in FAST else arguments.slow_runs
            )
            for name in NAMES
        }
        steps |= {"switch": lambda: bench.switches(5), "cycles": lambda: bench.cycles(arguments.cycles)}
        steps["busy"] = lambda: bench.busy(arguments.slow_runs)
        bench.prime()
        for name in arguments.steps:
            try:
                steps[name]()
            except (RuntimeError, OSError, StopIteration) as error:  # the next row may do better
                failed = True
                results.add(f"{name}: failed", f"{type(error).__name__}: {error}")
            results.save()
        faster(results, bench.medians)
        results.save()
    sys.exit(failed)


def cache_gib(length: int) -> float:
    return 2 * LAYERS * HEADS * WIDTH * 2 * max(SIZES) * length / (1 << 30)


if __name__ == "__main__":
    main()
