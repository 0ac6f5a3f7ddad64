"""Sealed memfds: what counts as one, and what does not."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

import pytest

from fer.errors import ProtocolError
from fer.memory import seal
from fer.memory.fd import Fd

_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which fcntl has from Python 3.12 on

pytestmark = pytest.mark.usefixtures("no_fd_leak")


def test_sealed_bytes_read_back_whoever_moved_the_offset() -> None:
    data = os.urandom(3 * mmap.PAGESIZE + 5)
    with seal.sealed_bytes("test", data) as fd:
        os.lseek(fd.fileno(), 7, os.SEEK_SET)
        assert seal.read_sealed(fd, len(data)) == data
        assert seal.read_sealed(fd.fileno(), 1 << 30) == data
        assert not os.get_inheritable(fd.fileno())
        with pytest.raises(ProtocolError, match="at most"):
            seal.read_sealed(fd, len(data) - 1)


@pytest.mark.parametrize("data", [b"", bytearray(b"ab"), memoryview(b"abcd")[::1]])
def test_kinds_of_bytes(data: bytes) -> None:
    with seal.sealed_bytes("test", data) as fd:
        assert seal.read_sealed(fd, 10) == bytes(data)


def test_a_sealed_memfd_cannot_change() -> None:
    with seal.sealed_bytes("test", b"fixed") as fd:
        for change in (
            lambda: os.write(fd.fileno(), b"x"),
            lambda: os.ftruncate(fd.fileno(), 1),
            lambda: os.ftruncate(fd.fileno(), 100),
            lambda: mmap.mmap(fd.fileno(), 5),
            lambda: fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, _FUTURE_WRITE),
        ):
            with pytest.raises(OSError):
                change()
        assert seal.read_sealed(fd, 5) == b"fixed"


def test_a_memfd_cannot_be_executed() -> None:
    with seal.memfd("test") as fd:
        if not fcntl.fcntl(fd.fileno(), fcntl.F_GET_SEALS):
            pytest.skip("this kernel has no MFD_NOEXEC_SEAL")
        with pytest.raises(PermissionError):
            os.fchmod(fd.fileno(), 0o777)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_WRITE, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_SEAL])
def test_every_seal_is_needed(missing: int) -> None:
    with seal.memfd("test") as fd:
        os.ftruncate(fd.fileno(), 4096)
        fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, seal.SEALS & ~missing)
        assert not seal.is_sealed_slab(fd, 4096)
        with pytest.raises(ProtocolError):
            seal.read_sealed(fd, 4096)


def test_slabs_have_exactly_their_size() -> None:
    with seal.sealed_bytes("test", bytes(4096)) as fd:
        assert seal.is_sealed_slab(fd, 4096)
        assert not seal.is_sealed_slab(fd, 8192)
        assert not seal.is_sealed_slab(fd, 0)
    with seal.sealed_bytes("test", b"") as empty:
        assert not seal.is_sealed_slab(empty, 0)


def test_other_descriptors_are_no_slabs(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(4096))
    read_end, write_end = os.pipe()
    others = [os.open(file, os.O_RDWR), os.open("/dev/zero", os.O_RDONLY), read_end, write_end]
    others.append(os.open(tmp_path, os.O_PATH))
    for number in others:
        with Fd(number) as fd:
            assert not seal.is_sealed_slab(fd, 4096)
            with pytest.raises(ProtocolError):
                seal.read_sealed(fd, 4096)
    assert not seal.is_sealed_slab(number, 4096), "a closed number is no slab either"
