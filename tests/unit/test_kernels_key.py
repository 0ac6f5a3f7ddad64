"""``triton_key`` is remembered for exactly the files it was made of, and FER's hooks wait for Triton's import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fer.kernels import hooks, tritonkey
from fer.kernels.manager import SPEC
from tests.support.processes import ROOT, WAIT_S

OLD = 1_000_000_000_000_000_000


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Triton's folder looks like, with files that settled long ago."""
    root = tmp_path / "triton"
    for name in (
        "_C/libtriton.so",
        "runtime/cache.py",
        "compiler/code.py",
        "backends/nvidia/driver.py",
        "language/x.py",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
        os.utime(root / name, ns=(OLD, OLD))
    monkeypatch.setattr(tritonkey, "_SETTLED_NS", -(10**18))  # change times are now, and cannot be set
    return root


class Asked:
    """Stands for Triton's own function."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        return f"key {self.times}"


def test_it_is_computed_once(package: Path) -> None:
    asked = Asked()
    assert [tritonkey.memoised(package, asked) for _ in range(3)] == ["key 1"] * 3
    assert oct(tritonkey.path_for(package).parent.stat().st_mode)[-3:] == "700"


def touch(package: Path) -> None:
    os.utime(package / "compiler/code.py", ns=(OLD, OLD + 1))


def rewrite(package: Path) -> None:
    """The same size, and the time set back: the change time and the inode tell."""
    (package / "_C/libtriton.so").unlink()
    (package / "_C/libtriton.so").write_text("_C/LIBTRITON.so")
    os.utime(package / "_C/libtriton.so", ns=(OLD, OLD))


def grow(package: Path) -> None:
    (package / "language/x.py").write_text("longer than it was")


def add(package: Path) -> None:
    (package / "backends/nvidia/new.py").write_text("")


def remove(package: Path) -> None:
    (package / "backends/nvidia/driver.py").unlink()


@pytest.mark.parametrize("change", [touch, rewrite, grow, add, remove], ids=lambda change: change.__name__)
def test_another_file_is_another_key(package: Path, change: Callable[[Path], None]) -> None:
    asked = Asked()
    tritonkey.memoised(package, asked)
    change(package)
    assert tritonkey.memoised(package, asked) == "key 2"


def test_a_damaged_memo_is_no_key(package: Path) -> None:
    asked = Asked()
    tritonkey.memoised(package, asked)
    memo = tritonkey.path_for(package)
    memo.write_bytes(memo.read_bytes().replace(b"key 1", b"key 9"))
    assert tritonkey.memoised(package, asked) == "key 2"


def test_a_memo_that_others_could_have_written_is_no_key(package: Path) -> None:
    asked = Asked()
    tritonkey.memoised(package, asked)
    tritonkey.path_for(package).parent.chmod(0o777)
    assert tritonkey.memoised(package, asked) == "key 2"


def test_files_that_just_changed_are_hashed_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tritonkey, "_SETTLED_NS", 2 * 10**9)
    asked = Asked()
    assert [tritonkey.memoised(package, asked) for _ in range(2)] == ["key 1", "key 2"]


def test_a_change_while_it_is_computed_is_not_remembered(package: Path) -> None:
    def compute() -> str:
        grow(package)
        return "half old, half new"

    asked = Asked()
    assert tritonkey.memoised(package, compute) == "half old, half new"
    assert not tritonkey.path_for(package).exists()
    assert tritonkey.memoised(package, asked) == "key 1"


def test_without_a_place_to_remember_it_is_computed(package: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert tritonkey.memoised(package, Asked(), home=tmp_path / "file") == "key 1"


def test_links_are_followed_once(package: Path) -> None:
    (package / "backends/loop").symlink_to(package / "backends")
    assert tritonkey.memoised(package, Asked()) == "key 1"


# -- hooks


def in_a_process(code: str, **environ: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=WAIT_S * 3,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_installing_imports_no_triton_and_its_import_completes_it() -> None:
    code = """
import sys
from fer.kernels import hooks
done = hooks.install()
assert not {"triton", "torch", "numpy"} & set(sys.modules)
import importlib.util
assert importlib.util.find_spec("triton") is not None  # as torch asks, without an import
assert "triton" not in sys.modules
import triton
from triton.runtime import autotuner, cache
assert cache.triton_key.__fer__ and autotuner.triton_key is cache.triton_key
assert triton.knobs.cache.manager_class.__name__ == "VerifyingManager"
assert triton.__spec__.loader is triton.__loader__ and type(triton.__loader__).__module__ != "fer.kernels.hooks"
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "fer.kernels.hooks"]
assert not done.troubles, done.troubles
listener = triton.knobs.compilation.listener
hooks.install()
assert listener is triton.knobs.compilation.listener is not None
print("fine")
"""
    pytest.importorskip("triton")
    assert in_a_process(code) == "fine"


def test_the_real_key_is_the_same_with_and_without_the_memo() -> None:
    pytest.importorskip("triton")
    plain = in_a_process("from triton.runtime.cache import triton_key; print(triton_key())")
    code = "from fer.kernels import hooks; hooks.install(); from triton.runtime import cache; print(cache.triton_key())"
    assert in_a_process(code) == plain  # computed
    assert in_a_process(code) == plain  # remembered


def test_a_manager_set_by_the_program_stays_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    ours: dict[str, str] = {}
    assert hooks._claim_manager(ours) == ""
    assert ours == {"TRITON_CACHE_MANAGER": SPEC}
    assert hooks._claim_manager(ours) == ""
    cache = SimpleNamespace(manager_class=object)
    monkeypatch.setitem(sys.modules, "triton.knobs", SimpleNamespace(cache=cache))  # type: ignore[arg-type]
    untouched: dict[str, str] = {}
    assert "manager_class" in hooks._claim_manager(untouched)
    assert not untouched


def test_a_users_listener_is_chained(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from fer.kernels import coverage

    heard: list[dict[str, Any]] = []
    knobs: Any = SimpleNamespace(
        compilation=SimpleNamespace(listener=lambda **given: heard.append(given)),
        runtime=SimpleNamespace(jit_post_compile_hook=None),
    )
    monkeypatch.setattr(coverage, "_attached", {})
    coverage.attach(knobs)
    coverage.attach(knobs)
    knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=True)
    assert len(heard) == 1
