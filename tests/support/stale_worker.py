"""A worker as a launcher forks it, whose template was made of the file ``TEST_STALE`` before that was there.

A file beside it, ``imagined``, is there as soon as a spare has done all that it does before it is told to start, and
names the device of the engine that it has made.
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
        made = file.with_name("imagining")
        made.write_text("" if loader._engine is None else str(loader._engine.device))
        made.rename(file.with_name("imagined"))

    worker.Loader.imagine = told  # type: ignore[method-assign,assignment]
    warm.watch(lambda: str(file) if file.exists() else "")
    worker.main()
