"""A device's context where another process still has what it takes; the driver is a pretended one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fer.errors import DriverError
from fer.memory import driver, patience
from fer.memory.device import CudaDevice
from tests.support.memory_driver import BAD, FakeDriver, Status

RETAIN = "cuDevicePrimaryCtxRetain"
PASSING = [Status.CUDA_ERROR_OUT_OF_MEMORY, Status.CUDA_ERROR_DEVICE_UNAVAILABLE]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    pretended = FakeDriver()
    monkeypatch.setattr(driver, "bindings", lambda: pretended)
    yield pretended


@pytest.mark.parametrize("status", PASSING)
def test_it_is_waited_for(fake: FakeDriver, status: Status) -> None:
    for _ in range(3):
        fake.fail(RETAIN, status=status)
    assert CudaDevice(0).name == "Pretended GPU"
    assert fake.calls.count(RETAIN) == 4


@pytest.mark.parametrize("status", PASSING)
def test_but_not_for_ever(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, status: Status) -> None:
    monkeypatch.setattr(patience, "FREED_S", 0.0)
    fake.fail(RETAIN, status=status)
    with pytest.raises(DriverError) as caught:
        CudaDevice(0)
    assert driver.code_of(caught.value) == status


def test_what_waiting_does_not_mend_is_told_at_once(fake: FakeDriver) -> None:
    fake.fail(RETAIN, status=BAD)
    with pytest.raises(DriverError):
        CudaDevice(0)
    assert fake.calls.count(RETAIN) == 1
