"""The keeper: from exec to its first answer, and the memory it takes.

python -m bench.keeper
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fer
from bench.harness import Results, spread

RUNS = 20


def start_once(directory: Path) -> tuple[float, int, int]:
    """Seconds until a client was greeted, the keeper's RSS and the whole process tree's, KiB."""
    from fer.errors import KeeperUnavailable
    from fer.weights.client import KeeperClient

    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "fer.weights.keeper", "--runtime-dir", str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while True:
        try:
            client = KeeperClient.connect(directory, timeout=1)
            break
        except KeeperUnavailable:
            time.sleep(0.001)
    seconds = time.perf_counter() - begin
    rss = _rss(client.keeper_pid)
    both = rss + (_rss(process.pid) if process.pid != client.keeper_pid else 0)
    client.stop(force=True)
    client.close()
    process.wait(10)
    return seconds, rss, both


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])


def main() -> None:
    results = Results("keeper")
    # As an installed package is: some environments forbid Python to write bytecode while it runs.
    compileall.compile_dir(str(Path(fer.__file__).parent), quiet=1)
    runs = []
    for _ in range(RUNS):
        directory = Path(tempfile.mkdtemp(prefix="fer-bench-"))
        os.chmod(directory, 0o700)
        try:
            runs.append(start_once(directory))
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    results.add("exec to first answer (ms)", spread([seconds for seconds, _, _ in runs]))
    results.add("keeper RSS (MiB)", round(max(rss for _, rss, _ in runs) / 1024, 1))
    results.add("keeper and minder RSS (MiB)", round(max(both for _, _, both in runs) / 1024, 1))
    results.save()


if __name__ == "__main__":
    main()
