"""One rank of two that vote; what it found goes to stdout, a line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from fer.engines import ranks
from fer.errors import FerError


def listens() -> list[str]:
    """Addresses that sockets of this process listen at, TCP and UDP, as the kernel writes them."""
    mine = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)}
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] in ("0A", "07") and f"socket:[{fields[9]}]" in mine:
                found.append(fields[1].partition(":")[0])
    return found


def _is_link(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def main() -> None:
    job, rank, store = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    launch = ranks.Launch(rank=rank, world=2, store=store)
    os.environ.update(launch.variables("cpu"))
    ranks.start("cpu", launch)
    found: dict[str, object] = {"listens": listens()}
    place = ranks.of_launch("tp", "cpu")
    found["place"] = [place.tp_rank, place.tp_size, place.local_size]
    found["both"] = [ranks.agree(True, "cpu"), ranks.agree(rank == 0, "cpu"), ranks.agree(True, "cpu")]
    if job == "dissent":  # the other votes only after this one has gone on
        ranks.DISSENT_S = 0.1
        went_on = store.with_suffix(".went-on")
        while rank == 1 and not went_on.exists():
            time.sleep(0.005)
        found["late"] = ranks.agree(rank == 1, "cpu")
        went_on.touch()
        found["after"] = [ranks.agree(True, "cpu"), ranks.agree(rank == 0, "cpu")]
    if job == "death":
        if rank == 1:
            print(json.dumps(found), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            ranks.agree(True, "cpu")
        except FerError as error:
            found["error"] = error.to_dict()
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
