"""What every test gets: a clean environment, places of its own, and the end of all that it started."""

from __future__ import annotations

import gc
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import zygote
from tests.support.descriptors import leaked, open_descriptors
from tests.support.processes import Children, kill_all_with

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: workers share the cores, and threads that wait for each other's turn spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_FOREIGN = ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "NOTIFY_SOCKET")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers must collect the same tests, so no name may hold what differs between processes."""
    named = [item.nodeid for item in items if re.search(r"0x[0-9a-f]{6}", item.nodeid)]
    if named:
        raise pytest.UsageError(f"addresses in the names of tests: {named[:3]}")


@pytest.fixture(scope="session", autouse=True)
def _the_zygote_ends() -> Iterator[None]:
    yield
    zygote.shared.end()


@pytest.fixture(autouse=True)
def places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No setting from outside reaches a test; ``FER_HOME`` and ``FER_RUNTIME_DIR`` are its own.

    Gives the runtime directory. Its path is short, since sockets live in it. Whatever was started with one of the two
    and still runs after the test, keepers that detached themselves included, is killed.
    """
    for name in [*os.environ]:
        if name.startswith(("FER_", "LISTEN_")) or name in _FOREIGN:
            monkeypatch.delenv(name)
    around = Path(tempfile.mkdtemp(prefix="fer-test-"))  # some tests put a log or a socket beside it
    around.chmod(0o711)  # others may come as far as the runtime directory: whether it lets them in is tested
    runtime = around / "r"
    runtime.mkdir(mode=0o700)
    home = str(tmp_path / "fer-home")
    monkeypatch.setenv("FER_HOME", home)
    monkeypatch.setenv("FER_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield runtime
    kill_all_with("FER_RUNTIME_DIR", str(runtime))
    kill_all_with("FER_HOME", home)
    shutil.rmtree(around, ignore_errors=True)


@pytest.fixture
def runtime_dir(places: Path) -> Path:
    """The test's own runtime directory."""
    return places


@pytest.fixture
def children() -> Iterator[Children]:
    """Starts child processes; those that are left at the end are killed before anything else is torn down."""
    started = Children()
    yield started
    started.end()


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, written once a run for every test and worker.

    Converting it takes 20 s: ``TEST_MODELS`` names a folder that keeps it between runs.
    """
    from fer.engines.demo_model import smollm2

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    return smollm2(Path(os.environ.get("TEST_MODELS") or shared))


@pytest.fixture
def no_fd_leak() -> Iterator[None]:
    """Fails the test if descriptors are open after it that were not before it."""
    gc.collect()
    before = open_descriptors()
    yield
    gc.collect()
    left = leaked(before, open_descriptors())
    assert not left, f"descriptors left open: {left}"
