"""Helpers of the GPU memory tests: children that use a GPU without torch, and a watch on device memory."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Sequence

import torch

from fer.memory import fdpass
from fer.memory.cuda import open_device
from fer.memory.fd import Fd
from tests.support.processes import Children

CHILD_S = 60.0
SLACK = 64 << 20
"""Bytes of device memory that the driver's own bookkeeping may move by."""

PRELUDE = """
import ctypes, os, signal, socket, sys, time
from fer.errors import FerError
from fer.memory import driver, fdpass
from fer.memory.open import open_backend
sock = socket.socket(fileno=int(sys.argv[1]))
sock.settimeout(30)
arguments = sys.argv[2:]

def say(*words):
    print(*words, flush=True)

def fill(backend, address, value, size):
    with backend._cuda.current():
        driver.call("cuMemsetD8", address, value, size)
        driver.call("cuCtxSynchronize")

def read(backend, address, size):
    buffer = (ctypes.c_uint8 * size)()
    with backend._cuda.current():
        driver.call("cuMemcpyDtoH", ctypes.addressof(buffer), address, size)
    return bytes(buffer)

def die():
    os.kill(os.getpid(), signal.SIGKILL)
"""


def child(
    children: Children, body: str, *arguments: object, fds: Sequence[Fd] = (), **options: object
) -> tuple[int, str, list[Fd]]:
    """Run a piece of code after :data:`PRELUDE`, with descriptors waiting on its ``sock``.

    Returns:
        return code, standard output, and the descriptors it sent back in one message before it ended.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        number = theirs.fileno()
        process = children.python(
            PRELUDE + body, str(number), *[str(each) for each in arguments], pass_fds=[number], **options
        )
        theirs.close()
        for first in range(0, len(fds), fdpass.MAX_FDS):
            fdpass.send(ours, b"slabs", fds[first : first + fdpass.MAX_FDS])
        out, err = process.communicate(timeout=CHILD_S)
        ours.setblocking(False)
        try:
            _, got, _ = fdpass.receive(ours, 100)
        except BlockingIOError:
            got = []
    print(out, err[-2000:])
    return process.returncode, out, got


def free_bytes() -> int:
    """Free device memory, after garbage is collected and torch has given back what it only caches."""
    gc.collect()
    torch.cuda.empty_cache()
    return open_device(0).room().free


def wait_for_free(wanted: int, *, within: float = 20.0) -> None:
    """Wait until ``wanted`` bytes are free, give or take :data:`SLACK`; a dead process's memory returns late."""
    end = time.monotonic() + within
    while (free := free_bytes()) < wanted - SLACK:
        assert time.monotonic() < end, f"{(wanted - free) >> 20} MiB of device memory are still held"
        time.sleep(0.05)


def warm_up() -> None:
    """Load the kernels that the tests use: their code takes device memory for the rest of the process."""
    words = torch.arange(1000, device="cuda")
    torch.arange(1000, out=words)
    assert torch.equal(words.fill_(3), words) and int(words[-1]) == 3 and int(words.sum()) == 3000
    letters = torch.full((1024,), 1, dtype=torch.uint8, device="cuda").fill_(2)
    letters[-1] = 3
    torch.cuda.synchronize()
