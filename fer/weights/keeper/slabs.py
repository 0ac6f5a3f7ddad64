"""What a descriptor must be to be kept as a slab or a payload."""

from __future__ import annotations

import functools
import os
import stat

from fer.errors import ProtocolError
from fer.memory import seal
from fer.memory.base import HOST
from fer.memory.fd import Fd
from fer.weights import wire
from fer.weights.wire import SlabInfo

_PLAIN_DEVICES = {1, 4, 5, 136}
"""Majors of memory devices and terminals, never of a GPU."""


def check_slab(info: SlabInfo, fd: Fd, gpu: str) -> None:
    """Refuse what is no slab of that description.

    Raises:
        ProtocolError: ``not_a_slab``.
    """
    # The other way round is fine: a model on a GPU may keep some of its tensors in host memory.
    if info.kind != HOST and gpu == HOST:
        raise ProtocolError(f"a slab of kind {info.kind} for {gpu}", code="not_a_slab")
    if info.kind == "host" and not seal.is_sealed_slab(fd, info.size):
        raise ProtocolError(f"a host slab must be a sealed memfd of its {info.size} bytes", code="not_a_slab")
    if info.kind == "cuda" and not plausible_cuda_fd(fd):
        raise ProtocolError("a cuda slab must be a descriptor of an NVIDIA device", code="not_a_slab")
    if info.kind == "cuda-ipc":  # the handle, in a memfd; the memory itself stays with its exporter
        checked_payload("handle", fd, 4096)


def check_estate(info: SlabInfo, fd: Fd, gpu: str) -> None:
    """Refuse what no next holder could map: an estate's memory is written by its holder, so only its size is sealed.

    Raises:
        ProtocolError: ``not_a_slab``.
    """
    if info.kind == HOST:
        if not seal.is_fixed_size(fd, info.size):
            why = "its size and its seals must be sealed"
            raise ProtocolError(f"no memfd of {info.size} bytes", why=why, code="not_a_slab")
    elif info.kind != "cuda" or gpu == HOST or not plausible_cuda_fd(fd):
        raise ProtocolError(f"a slab of kind {info.kind} for {gpu}", code="not_a_slab")


def plausible_cuda_fd(fd: Fd) -> bool:
    """True for what the driver exports: a descriptor of one of its character devices.

    Where ``/proc/devices`` does not name them (a sandbox), any device that is no terminal or memory device will do,
    and so will an anonymous inode: the keeper cannot look further without a driver of its own.
    """
    facts = os.fstat(fd.fileno())
    majors = _nvidia_majors()
    if stat.S_ISCHR(facts.st_mode):
        major = os.major(facts.st_rdev)
        return major in majors if majors else major not in _PLAIN_DEVICES
    return not majors and os.readlink(f"/proc/self/fd/{fd.fileno()}").startswith("anon_inode:")


@functools.cache
def _nvidia_majors() -> frozenset[int]:
    try:
        with open("/proc/devices", encoding="ascii") as lines:
            pairs = [line.split() for line in lines]
    except (OSError, UnicodeDecodeError):
        return frozenset()
    return frozenset(int(pair[0]) for pair in pairs if len(pair) == 2 and pair[1].startswith("nvidia"))


def checked_payload(name: str, fd: Fd, limit: int | None = None) -> bytes:
    """The bytes of a payload.

    Raises:
        ProtocolError: ``bad_payload``: it is no sealed memfd, or too big.
    """
    try:
        return seal.read_sealed(fd, wire.PAYLOAD_LIMITS[name] if limit is None else limit)
    except ProtocolError as error:
        raise ProtocolError(f"the {name} is no payload", why=str(error), code="bad_payload") from None


def checksum(content: bytes) -> bytes:
    """What stands for a payload's content in comparisons."""
    import hashlib  # loads OpenSSL, which a start need not wait for

    return hashlib.sha256(content).digest()
