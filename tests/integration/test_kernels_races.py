"""Processes that write, read, pack and die at the same time: a reader sees an old entry, a complete one, or none."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fer.kernels import entry, manager, pack, unpack
from tests.support import kernel_entries as made
from tests.support.processes import Children

pytest.importorskip("triton")


def test_eight_processes_and_an_archive_of_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    """K23: half of them use Triton's own manager; archives made meanwhile hold complete kernels only."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    child = children.spawn([sys.executable, "-m", "tests.support.kernels_race", "8", "50"])
    packed = []
    while child.poll() is None:
        packed.append(pack.pack({"triton": cache}, tmp_path / "a"))
        for each in packed[-1].manifest.entries:
            assert {file.name.rpartition(".")[2] for file in each.files} == {"ttir", "ptx", "cubin", "json"}
        unpack.verify(tmp_path / "a")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "done\n"), err
    assert packed
    assert len(pack.pack({"triton": cache}, tmp_path / "a").manifest.entries) == 50
    left = [path for path in cache.rglob("*") if path.name.startswith((".tmp.", "tmp."))]
    assert not left
    assert not (cache / entry.QUARANTINE).exists()


def in_a_child(work: Callable[[], None]) -> int:
    """How a forked child ended: minus the signal, or its code."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_me() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FILES = {"add.ttir": b"ttir" * 100, "add.cubin": made.binary(b"old" * 100), "add.ptx": b"ptx" * 100}


def compile_add(content: bytes) -> None:
    """What a compilation stores, file after file."""
    one = manager.VerifyingManager(made.key_of("add90"))
    metadata = b'{"hash": "%s", "name": "add", "target": {}}' % made.digest_of("add90").encode()
    files = {**FILES, "add.cubin": made.binary(content * 100), "add.json": metadata}
    one.put_group("add.json", {name: one.put(data, name) for name, data in files.items()})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(manager, "COUNTS", manager.Counts())
    yield tmp_path / "cache"


@pytest.mark.parametrize("existing", [False, True], ids=["cold", "over an old one"])
def test_a_writer_that_is_killed_at_any_step_leaves_no_half_kernel(
    cache: Path, monkeypatch: pytest.MonkeyPatch, existing: bool
) -> None:
    """K13: killed before, within and after each file, the sidecar and the list."""
    steps = 0
    for step in range(100):
        if existing:
            compile_add(b"old")
        calls = [0]
        real = os.replace

        def replace(
            source: str, target: str, calls: list[int] = calls, step: int = step, real: Callable[..., None] = real
        ) -> None:
            if calls[0] == step:
                with open(source, "r+b") as file:
                    file.truncate(os.path.getsize(source) // 2)  # the write itself had not come to its end
                kill_me()
            calls[0] += 1
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace)
            ended = in_a_child(lambda: compile_add(b"new"))
        found = manager.VerifyingManager(made.key_of("add90")).get_group("add.json")
        if found is not None:
            content = Path(found["add.cubin"]).read_bytes()
            assert content in (made.binary(b"old" * 100), made.binary(b"new" * 100))
            entry.inspect(str(cache / made.key_of("add90")), found, "add.json")
        if ended != -signal.SIGKILL:
            assert ended == 7
            assert found is not None
            break
        steps += 1
    assert steps == 6  # four files, the sidecar, the list
    compile_add(b"healed")
    assert manager.VerifyingManager(made.key_of("add90")).get_group("add.json") is not None


def test_an_unpacker_that_is_killed_leaves_whole_entries(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    for name in ("add", "scale", "softmax"):
        made.make(source, name)
    pack.pack({"triton": source}, tmp_path / "a")
    for step in range(4):
        renamed = [0]
        real = os.rename

        def rename(
            old: str, new: str, renamed: list[int] = renamed, step: int = step, real: Callable[..., None] = real
        ) -> None:
            if renamed[0] == step:
                kill_me()
            renamed[0] += 1
            real(old, new)

        target = tmp_path / f"t{step}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", rename)
            ended = in_a_child(lambda target=target: unpack.unpack(tmp_path / "a", {"triton": target}) and None)  # type: ignore[misc]
        assert ended == (-signal.SIGKILL if step < 3 else 7)
        whole = list(entry.entries_in(str(target)))
        assert len(whole) == step
        outcome = unpack.unpack(tmp_path / "a", {"triton": target})
        assert (len(outcome.kept), len(outcome.restored)) == (step, 3 - step)
