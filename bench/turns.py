"""Small torch operations beside a thread that computes in Python: at Python's own turns and at FER's.

python -m bench.turns [--operations 800] [--runs 5]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from bench.harness import Results, spread


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """A thread that computes, as one does that builds graphs from tables."""
    over = threading.Event()

    def work() -> None:
        total = 0
        while not over.is_set():
            for number in range(200):
                total += number * number

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> None:
    import torch

    from fer.turns import TURN_S, short_turns

    parser = argparse.ArgumentParser()
    parser.add_argument("--operations", type=int, default=800)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    results = Results("turns")
    torch.set_num_threads(1)
    small = torch.ones(64, 64)

    def operations() -> float:
        begin = time.perf_counter()
        with torch.inference_mode():
            for _ in range(arguments.operations):
                torch.mm(small, small)
        return time.perf_counter() - begin

    operations()
    results.add("alone (ms)", spread([operations() for _ in range(arguments.runs)]))
    with busy():
        usual = f"beside a busy thread, turns of {sys.getswitchinterval() * 1e3:g} ms (ms)"
        results.add(usual, spread([operations() for _ in range(arguments.runs)]))
        with short_turns():
            results.add(
                f"the same, turns of {TURN_S * 1e3:g} ms (ms)", spread([operations() for _ in range(arguments.runs)])
            )
    results.save()


if __name__ == "__main__":
    main()
