"""Real Triton kernels on a GPU: packed, unpacked elsewhere, found by a fresh process, and bitwise the same results.

One of them is tuned by Triton itself, one moves its data by TMA descriptors, one is written in Gluon, and a model runs
under torch.compile. Each process is a fresh one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fer.kernels import coverage, gpus, pack, places, store, unpack
from fer.kernels.components import triton_helpers
from fer.kernels.manager import SPEC
from fer.kernels.unpack import Terms
from tests.support import engine_models as models
from tests.support.processes import ROOT

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not places.compiler(os.environ), reason="Triton's helper library needs a C compiler"),
]
LIMIT_S = 240.0


def run(cache: Path, *names: str, **variables: str) -> dict[str, Any]:
    """Run kernels in a fresh process: digests of results and binaries, hits and compilations by Triton's listener."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "FER_"))}
    environ |= {"TRITON_CACHE_DIR": str(cache), "TRITON_CACHE_MANAGER": SPEC, "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels_gpu_child", *names],
        cwd=ROOT,
        env={**environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def there_and_back(tmp_path: Path, *names: str, **variables: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same kernels compiled, and restored elsewhere from an archive."""
    first = run(tmp_path / "cache", *names, **variables)
    for why in first["left_out"].values():
        pytest.skip(why)
    packed = pack.pack({"triton": tmp_path / "cache"}, tmp_path / "a.ferkernels")
    assert not packed.left_out
    shutil.rmtree(tmp_path / "cache")
    outcome = unpack.unpack(tmp_path / "a.ferkernels", {"triton": tmp_path / "elsewhere"}, Terms(code="take"))
    assert len(outcome.restored) == len(packed.manifest.entries)
    return first, run(tmp_path / "elsewhere", *names, **variables)


@pytest.mark.parametrize("name", ["add", "softmax", "tuned", "tma", "gluon"])
def test_restored_kernels_are_hits_and_give_the_same_bits(tmp_path: Path, name: str) -> None:
    first, second = there_and_back(tmp_path, name, TRITON_CACHE_AUTOTUNING="1")
    assert first["compiled"] and not second["compiled"], second
    assert second["hits"] >= 1
    assert second["results"] == first["results"] and second["right"] == {name: True}
    assert second["binaries"] == first["binaries"]
    assert second["chosen"] == first["chosen"]  # what tuning chose comes back with the kernels


def test_without_helpers_the_kernels_are_still_hits(tmp_path: Path) -> None:
    first = run(tmp_path / "cache", "add")
    pack.pack({"triton": tmp_path / "cache"}, tmp_path / "a.ferkernels", pack.Choice(code=False))
    unpack.unpack(tmp_path / "a.ferkernels", {"triton": tmp_path / "elsewhere"})
    assert not triton_helpers(tmp_path / "elsewhere")
    second = run(tmp_path / "elsewhere", "add")
    assert (second["compiled"], second["results"]) == ([], first["results"])


def test_a_damaged_binary_is_compiled_again_and_runs(tmp_path: Path) -> None:
    first = run(tmp_path / "cache", "add")
    (binary,) = (tmp_path / "cache").glob("*/add.cubin")
    data = bytearray(binary.read_bytes())
    data[len(data) // 2] ^= 1
    binary.write_bytes(data)
    second = run(tmp_path / "cache", "add")
    assert second["compiled"] == ["add"] and second["results"] == first["results"]


def test_what_the_driver_tells() -> None:
    import torch

    seen = gpus.look()
    assert seen is not None
    properties = torch.cuda.get_device_properties(0)
    assert 10 * properties.major + properties.minor in seen.archs
    assert properties.multi_processor_count in seen.multiprocessors
    assert properties.name in seen.names


def test_the_driver_loads_a_binary_without_a_context(tmp_path: Path) -> None:
    run(tmp_path / "cache", "add")
    (binary,) = (tmp_path / "cache").glob("*/add.cubin")
    code = f"""
from fer.kernels import compat
sound = open({str(binary)!r}, "rb").read()
print(repr(compat.load_once(sound)), bool(compat.load_once(sound[:64] + bytes(len(sound)))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["''", "True"], done.stderr


@pytest.mark.timeout(600)
def test_a_start_under_torch_compile_compiles_nothing_twice(tmp_path: Path) -> None:
    """By the whole start: the archive is written back by the first, in another place the second finds everything."""
    models.qwen3(tmp_path / "model")
    home = tmp_path / "home"

    def start(name: str) -> dict[str, Any]:
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / name / "inductor"), "TRITON_CACHE_MANAGER": ""}
        (tmp_path / name).mkdir()
        return run(tmp_path / name / "triton", f"start:{tmp_path / 'model'}", FER_HOME=str(home), **caches)

    first, second = start("first"), start("second")
    assert first["kernels"]["compiled"] > 0 and store.archives(home)
    assert second["kernels"]["path"] == "restored"
    assert second["kernels"]["compiled"] == 0, second["kernels"]["why"]
    assert second["kernels"]["hits"] > 0
    assert second["results"] == first["results"]
    records = [coverage.read(folder) for folder in store.starts(home)]
    assert len(records) == 2 and not [each for each in records[1] if not each.hit]
