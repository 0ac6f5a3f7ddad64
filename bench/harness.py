"""What the benchmarks share: children that are forked, measured and killed, a private keeper, results in one file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def child(work: Callable[..., Any], *arguments: Any, kill: bool = True, timeout: float = 300.0) -> Any:
    """Run ``work`` in a forked child and return its result (plain data).

    The child ends by SIGKILL, as a crashed engine does, so nothing it might tidy up flatters the result. Fork from a
    process that holds no CUDA context.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        status = 1
        try:
            with os.fdopen(write, "w") as out:
                out.write(json.dumps(work(*arguments)))
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        if kill and status == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(status)
    os.close(write)
    with os.fdopen(read) as source:
        text = _read(source, pid, timeout)
    os.waitpid(pid, 0)
    if not text:
        raise RuntimeError(f"{work.__name__} failed in its child")
    return json.loads(text)


def _read(source: Any, pid: int, timeout: float) -> str:
    import select

    ready, _, _ = select.select([source], [], [], timeout)
    if not ready:
        os.kill(pid, signal.SIGKILL)
        return ""
    return str(source.read())


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """A runtime directory of the benchmark's own; the keeper that came to be there is stopped at the end.

    At SIGTERM too, which ends the program then: a keeper stays otherwise, and with it the memory of a GPU.
    """
    from fer.errors import FerError
    from fer.weights.client import KeeperClient

    directory = Path(tempfile.mkdtemp(prefix="fer-bench-"))
    os.environ["FER_RUNTIME_DIR"] = str(directory)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield directory
    finally:
        signal.signal(signal.SIGTERM, before)
        with contextlib.suppress(FerError), KeeperClient.connect(directory) as client:
            client.stop(force=True)
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def private_keeper() -> Iterator[Path]:
    """The same, with a keeper from the beginning."""
    from fer.weights.keeper.start import start_keeper

    with private_directory() as directory:
        start_keeper(directory)
        yield directory


def gpu_used_mib() -> int:
    """Memory in use on the first visible GPU, as nvidia-smi reports it, MiB: by a process without a context."""
    return int(_of_gpu("--query-gpu=memory.used")[0])


def gpu_processes_mib() -> list[int]:
    """What each process accounts for of that, MiB; nothing where processes are another container's."""
    return [int(line) for line in _of_gpu("--query-compute-apps=used_memory") if line.strip().isdigit()]


def _of_gpu(question: str) -> list[str]:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", "-i", gpu, question, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def median(values: list[float]) -> float:
    return statistics.median(values)


def spread(values: list[float], unit: float = 1e3) -> str:
    """Median and worst, in milliseconds unless ``unit`` says otherwise, and every run."""
    every = ", ".join(f"{v * unit:.1f}" for v in values)
    return f"median {statistics.median(values) * unit:.1f}, worst {max(values) * unit:.1f} ({every})"


def machine() -> dict[str, str]:
    """Where the figures come from."""
    import torch

    facts = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__}
    facts["cpu"] = f"{os.cpu_count()} cores, {platform.machine()}, kernel {platform.release()}"
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        facts["gpu"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return facts


class Results:
    """Rows of one benchmark: printed as they come, saved as JSON where ``FER_BENCH_OUT`` names a directory."""

    def __init__(self, name: str) -> None:
        self.name, self.rows = name, dict[str, Any]()
        print(f"# {name}", json.dumps(machine()), flush=True)

    def add(self, row: str, value: Any) -> None:
        self.rows[row] = value
        print(f"{row}: {value}", flush=True)

    def save(self) -> None:
        where = os.environ.get("FER_BENCH_OUT")
        if where:
            path = Path(where) / f"{self.name}.json"
            path.write_text(json.dumps({"machine": machine(), "rows": self.rows}, indent=1))
