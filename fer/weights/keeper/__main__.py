"""``python -m fer.weights.keeper``: the keeper, under a minder unless systemd keeps its descriptors.

Exit codes: 0 stopped, 2 bad arguments, 3 it cannot be the keeper of that directory, 75 to be started again.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    """Parse, and become what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m fer.weights.keeper", description="Holds weights for FER engines.")
    parser.add_argument("--runtime-dir", type=Path, help="folder of the socket (by default $XDG_RUNTIME_DIR/fer)")
    parser.add_argument(
        "--store",
        choices=("auto", "systemd", "minder"),
        default="auto",
        help="who keeps the descriptors when the keeper is killed; auto: systemd where it says that it does",
    )
    parser.add_argument("--detach", action="store_true", help="go to the background, log to keeper.log")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)  # by a minder
    parser.add_argument("--adopt", action="store_true", help=argparse.SUPPRESS)  # by a keeper without one
    given = parser.parse_args(arguments)
    directory = given.runtime_dir
    if directory is None:
        from fer.weights.keeper.sockets import default_dir

        directory = default_dir()
    directory = directory.expanduser().absolute()
    if given.adopt:
        from fer.weights.keeper import minder

        return minder.adopt(directory)
    if given.detach:
        from fer import paths
        from fer.errors import FerError
        from fer.weights.keeper.process import detach

        try:
            paths.ensure_private(directory)
        except (FerError, OSError) as error:
            print(error, file=sys.stderr)
            return 3
        if not detach(directory / "keeper.log"):
            return 0
    if given.serve or given.store == "systemd" or (given.store == "auto" and os.environ.get("FDSTORE", "0") != "0"):
        from fer.weights.keeper.boot import serve

        return serve(directory, "minder" if given.serve else "systemd")
    from fer.weights.keeper import minder

    return minder.mind(directory)


if __name__ == "__main__":
    sys.exit(main())
