"""``python -m fer.weights.keeper``: the keeper, under a minder unless systemd keeps its descriptors.

Exit codes: 0 stopped, 2 bad arguments, 3 it cannot be the keeper of that directory, 75 to be started again.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse


def main(arguments: list[str]) -> int:
    """Become what was asked for; the exit code."""
    if arguments[:2] == ["--serve", "--runtime-dir"]:  # by a minder
        from fer.weights.keeper.boot import serve

        return serve(Path(arguments[2]), "minder")
    if arguments[:2] == ["--adopt", "--runtime-dir"]:  # by a keeper that has lost its minder
        from fer.weights.keeper import minder

        return minder.adopt(Path(arguments[2]))
    return _start(_parse(arguments))


def _parse(arguments: list[str]) -> argparse.Namespace:
    import argparse  # no restart waits for it

    parser = argparse.ArgumentParser(prog="python -m fer.weights.keeper", description="Holds weights for FER engines.")
    parser.add_argument("--runtime-dir", type=Path, help="folder of the socket (by default $XDG_RUNTIME_DIR/fer)")
    parser.add_argument(
        "--store",
        choices=("auto", "systemd", "minder"),
        default="auto",
        help="who keeps the descriptors when the keeper is killed; auto: systemd where it says that it does",
    )
    parser.add_argument("--detach", action="store_true", help="go to the background, log to keeper.log")
    return parser.parse_args(arguments)


def _start(given: argparse.Namespace) -> int:
    from fer.errors import FerError
    from fer.options import KeeperOptions, Options
    from fer.weights.keeper.process import raise_limits, settings_file
    from fer.weights.keeper.sockets import choose_dir

    try:
        chosen = Options.load(runtime_dir=given.runtime_dir).runtime_dir
        KeeperOptions.load()  # what is wrong with them is said here, to whoever starts us, and not only in a log
    except FerError as error:
        print(error, file=sys.stderr)
        return 2
    os.environ.update(settings_file())  # for its table [keeper], which is read after a detached keeper left this folder
    try:
        raise_limits()
        directory, passed_over = choose_dir(chosen)
    except FerError as error:
        print(error, file=sys.stderr)
        return 3
    if passed_over:
        print(f"passed over: {passed_over}", file=sys.stderr)
    if given.detach:
        from fer.weights.keeper.process import LOG, detach

        try:
            if not detach(directory / LOG):
                return 0
        except OSError as error:
            print(error, file=sys.stderr)
            return 3
    if given.store == "systemd" or (given.store == "auto" and os.environ.get("FDSTORE", "0") != "0"):
        from fer.weights.keeper.boot import serve

        return serve(directory, "systemd")
    from fer.weights.keeper import minder

    return minder.mind(directory)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
