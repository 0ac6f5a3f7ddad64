"""Many processes that fill one cache at once, as ranks of a cold start do; Triton's compiler is left out.

``python -m tests.support.kernels_race PROCESSES KERNELS`` writes to ``TRITON_CACHE_DIR``; every second process uses
Triton's own manager. Prints ``done`` when each has found each kernel complete.
"""

from __future__ import annotations

import json
import os
import sys

from triton.runtime.cache import FileCacheManager

from fer.kernels.manager import VerifyingManager
from tests.support import kernel_entries as made


def files_of(name: str) -> dict[str, bytes]:
    """What compiling one kernel gives."""
    digest = made.digest_of(f"{name}90")
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    metadata = {"hash": digest, "name": name, "target": target, "triton_version": "3.9.0"}
    return {
        f"{name}.ttir": f"ttir of {name}".encode() * 50,
        f"{name}.ptx": f"ptx of {name}".encode() * 200,
        f"{name}.cubin": made.binary(name.encode() * 500),
        f"{name}.json": json.dumps(metadata).encode(),
    }


def work(number: int, kernels: int) -> None:
    """Look up and "compile" every kernel, in an order of this process's own."""
    kind = FileCacheManager if number % 2 else VerifyingManager
    names = [f"kernel{(index * 7 + number * 11) % kernels}" for index in range(kernels)]
    for name in names:
        manager, wanted = kind(made.key_of(f"{name}90")), files_of(name)
        found = manager.get_group(f"{name}.json")
        if found is None:
            found = {each: manager.put(data, each) for each, data in wanted.items()}
            manager.put_group(f"{name}.json", found)
        for each, path in found.items():
            with open(path, "rb") as file:
                assert file.read() == wanted[each], (number, path)
    for name in names:
        assert VerifyingManager(made.key_of(f"{name}90")).get_group(f"{name}.json") is not None, (number, name)


def main(processes: int, kernels: int) -> int:
    pids = []
    for number in range(processes):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(number, kernels)
                status = 0
            except BaseException as error:
                print(f"process {number}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(status)
        pids.append(pid)
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    print("failed" if failed else "done", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
