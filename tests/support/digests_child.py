"""A process that ends while digests of its checkpoint, its one argument, are computed."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

from fer.weights import checkpoint
from fer.weights.background import Digests


def main() -> None:
    hashing = threading.Event()

    def endless(opened: Any, file: Any, cancelled: Any) -> bytes:
        hashing.set()
        while not cancelled():
            threading.Event().wait(0.001)
        raise checkpoint._Cancelled

    checkpoint._hash_file = endless
    files = [Path(sys.argv[1])]
    digests = Digests(None, "edition", files, checkpoint.stamp(files), {})  # type: ignore[arg-type]  # never asked
    digests.start()
    assert hashing.wait(20)
    print("ends", flush=True)


if __name__ == "__main__":
    main()
