"""A new process of torch and Transformers: from its command to its first line, with a launcher and without.

python -m bench.launcher
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness import Results, median, spread

RUNS = 5
ENGINE = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
print("first line", flush=True)
"""
ANSWERS = """
import sys
import torch
from fer.engines.transformers import TransformersEngine
import fer
engine = TransformersEngine(sys.argv[1])
fer.recover(engine)
print("first line", engine.generate([1, 2, 3], 4), flush=True)
"""


@contextlib.contextmanager
def launcher(*arguments: str) -> Iterator[float]:
    """A launcher; seconds until it served."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "fer", "launcher", "run", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the launcher ended")
        try:
            yield time.perf_counter() - begin
        finally:
            process.terminate()


def first_line(command: Sequence[str]) -> float:
    """Seconds from here to the first line of a command, which then runs to its end."""
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        if not select.select([process.stdout], [], [], 120)[0]:
            raise RuntimeError("no line came")
        line = process.stdout.readline()
        seconds = time.perf_counter() - begin
        _, err = process.communicate(timeout=120)
        if not line.startswith(b"first line") or process.returncode:
            raise RuntimeError(err.decode())
        if "auto" in command and b"forked" not in err:
            raise RuntimeError(f"it was not forked: {err.decode()}")
        return seconds


def spawned(command: Sequence[str]) -> float:
    """The same by the Python interface, as a supervisor starts engines."""
    from fer.standby.launcher_client import spawn

    reading, writing = os.pipe()
    begin = time.perf_counter()
    with spawn(command, stdout=writing) as child, os.fdopen(reading) as source:
        os.close(writing)
        line = source.readline()
        seconds = time.perf_counter() - begin
        if child.via != "launcher" or not line.startswith("first line") or child.wait(120):
            raise RuntimeError(child.why)
    return seconds


def main() -> None:
    results = Results("launcher")
    home = Path(tempfile.mkdtemp(prefix="fer-bench-"))
    os.environ["FER_RUNTIME_DIR"] = str(home)
    script, answering = home / "engine.py", home / "answering.py"
    script.write_text(ENGINE)
    answering.write_text(ANSWERS)
    try:
        _first_lines(results, script)
        if len(sys.argv) > 1:
            _answers(results, answering, sys.argv[1])
    finally:
        with contextlib.suppress(Exception):
            from fer.weights.client import KeeperClient

            KeeperClient.connect(home).stop(force=True)
        shutil.rmtree(home, ignore_errors=True)
    results.save()


def _first_lines(results: Results, script: Path) -> None:
    command = [sys.executable, str(script)]
    by = [sys.executable, "-m", "fer", "run", "--launcher"]
    first_line(command)  # page cache and bytecode are as warm for the first row as for the last
    with launcher() as ready:
        results.add("launcher: from its command until it serves (s)", round(ready, 2))
        plain = [first_line(command) for _ in range(RUNS)]
        off = [first_line([*by, "off", "--", *command]) for _ in range(RUNS)]
        forked = [first_line([*by, "auto", "--", *command]) for _ in range(RUNS)]
        direct = [spawned(command) for _ in range(RUNS)]
    results.add("python engine.py, to the first line (ms)", spread(plain))
    results.add("fer run --launcher off -- python engine.py (ms)", spread(off))
    results.add("fer run -- python engine.py, by the launcher (ms)", spread(forked))
    results.add("spawn() in a running process, by the launcher (ms)", spread(direct))
    results.add("plain / fer run by the launcher", round(median(plain) / median(forked), 1))
    results.add("plain / spawn() by the launcher", round(median(plain) / median(direct), 1))


def _answers(results: Results, script: Path, model: str) -> None:
    """A whole start of FER's engine on attached weights, up to a few tokens."""
    command = [sys.executable, str(script), model]
    first_line(command)  # publishes the weights
    first_line(command)
    with launcher("--preload", model):
        plain = [first_line(command) for _ in range(RUNS)]
        forked = [first_line([sys.executable, "-m", "fer", "run", "--", *command]) for _ in range(RUNS)]
        direct = [spawned(command) for _ in range(RUNS)]
    results.add("engine on attached weights, plain, to its first answer (ms)", spread(plain))
    results.add("the same by fer run and the launcher (ms)", spread(forked))
    results.add("the same by spawn() and the launcher (ms)", spread(direct))
    results.add("plain / launcher, to the first answer", round(median(plain) / median(direct), 1))


if __name__ == "__main__":
    main()
