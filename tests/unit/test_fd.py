"""One owner for each descriptor."""

from __future__ import annotations

import gc
import os

import pytest

from fer.memory.fd import Fd
from tests.support.descriptors import open_descriptors


def _fd() -> Fd:
    return Fd(os.open("/dev/null", os.O_RDONLY))


def test_closing_twice_never_closes_a_strangers_file() -> None:
    fd = _fd()
    number = fd.fileno()
    fd.close()
    with open("/dev/zero", "rb") as stranger:
        assert stranger.fileno() == number, "the kernel hands the number out again"
        fd.close()
        assert stranger.read(1) == b"\0"
    assert fd.closed


def test_a_closed_descriptor_has_no_number() -> None:
    fd = _fd()
    fd.close()
    for use in (fd.fileno, fd.detach, fd.dup):
        with pytest.raises(ValueError):
            use()
    assert repr(fd) == "Fd(closed)"


def test_detach_hands_ownership_over(no_fd_leak: None) -> None:
    fd = _fd()
    number = fd.detach()
    del fd
    gc.collect()
    os.fstat(number)
    os.close(number)


def test_a_forgotten_descriptor_is_closed(no_fd_leak: None) -> None:
    fd = _fd()
    del fd


def test_dup_and_with_close(no_fd_leak: None) -> None:
    with _fd() as fd, fd.dup() as second:
        assert not os.get_inheritable(second.fileno())
        assert os.fstat(fd.fileno()).st_rdev == os.fstat(second.fileno()).st_rdev
        assert {fd.fileno(), second.fileno()} <= set(open_descriptors())


def test_a_failed_call_gives_no_owner() -> None:
    with pytest.raises(ValueError):
        Fd(-1)
