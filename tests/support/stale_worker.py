"""A worker as a launcher forks it, whose template was made of the file ``TEST_STALE`` before that was there.

A file beside it, ``imagined``, is there as soon as a spare has done all that it does before it is told to start.
"""

from __future__ import annotations

import os
from pathlib import Path

from fer import warm
from fer.standby import worker

if __name__ == "__main__":
    file = Path(os.environ["TEST_STALE"])
    imagine = worker.Loader.imagine

    def told(loader: worker.Loader) -> None:
        imagine(loader)
        file.with_name("imagined").touch()

    worker.Loader.imagine = told  # type: ignore[method-assign,assignment]
    warm.watch(lambda: str(file) if file.exists() else "")
    worker.main()
