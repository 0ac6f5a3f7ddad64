"""SIGKILL to the first sign of a process's end: its control socket or its tie, beside the pidfd, which tells the last.

A process with ten threads and some memory is killed; with ``fer.standby.tie.show_end_at_once`` and without.

python -m bench.first_sign [--runs 8] [--mib 800]
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
import time

from bench.harness import Results, spread
from fer.memory.fd import Fd
from fer.standby import tie

VICTIM = """
import sys, threading
from fer.standby import tie
memory = bytearray(int(sys.argv[1]) << 20)
for _ in range(10):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
if sys.argv[2] == "with":
    assert tie.show_end_at_once()
print(flush=True)
threading.Event().wait()
"""


def killed(mib: int, way: str) -> tuple[float, float]:
    """Seconds from SIGKILL until one of both hung up, and until the pidfd told the end."""
    held, alarm = tie.make()
    ours, theirs = socket.socketpair()
    with held, alarm, ours:
        with theirs:
            victim = subprocess.Popen(
                [sys.executable, "-c", VICTIM, str(mib), way],
                stdin=theirs,
                stdout=subprocess.PIPE,
                pass_fds=[held.fileno()],
            )
        tie.bind(held.fileno(), victim.pid)
        held.close()
        assert victim.stdout is not None
        with victim.stdout, Fd(os.pidfd_open(victim.pid)) as process:
            victim.stdout.readline()
            signs, end = select.poll(), select.poll()
            signs.register(ours, select.POLLIN)
            signs.register(alarm.fileno(), 0)
            end.register(process.fileno(), select.POLLIN)
            begin = time.perf_counter()
            victim.send_signal(signal.SIGKILL)
            signs.poll()
            seen = time.perf_counter() - begin
            end.poll()
            gone = time.perf_counter() - begin
        victim.wait()
    return seen, gone


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--mib", type=int, default=800, help="of memory that the process has written to")
    arguments = parser.parse_args()
    results = Results("first_sign")
    for way in ("without", "with"):
        found = [killed(arguments.mib, way) for _ in range(arguments.runs)]
        results.add(f"{way}: first sign (ms)", spread([seen for seen, _ in found]))
        results.add(f"{way}: pidfd (ms)", spread([gone for _, gone in found]))
    results.save()


if __name__ == "__main__":
    main()
