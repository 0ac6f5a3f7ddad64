"""GPU tests: skipped, and saying so, where there is no CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _missing() -> str:
    try:
        import torch
    except ImportError as error:
        return str(error)
    if not torch.cuda.is_available():
        return "no CUDA device"
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError as error:
        return f"{error}: pip install 'fast-engine-recovery[cuda]'"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The hook sees every collected test, those of other folders too.
    ours = [item for item in items if HERE in item.path.parents]
    missing = _missing() if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def warm_gpu() -> None:
    """A device whose context and kernels are loaded, so that what it uses afterwards is what a test uses."""
    from tests.support.memory_gpu import warm_up

    warm_up()


@pytest.fixture
def hbm_flat(warm_gpu: None) -> Iterator[None]:
    """Fails the test if device memory is in use after it that was not before it."""
    from tests.support.memory_gpu import free_bytes, wait_for_free

    before = free_bytes()
    yield
    wait_for_free(before)
