"""The other caches: what of each is complete, and where it may be used."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fer.kernels import compare, compat, gpus, inductor, pack, registry, unpack
from fer.kernels.compat import Live
from fer.kernels.gpus import Seen
from fer.kernels.registry import REGISTRY
from fer.kernels.unpack import Outcome, Terms
from tests.support import kernel_entries as made

HERE = Seen(
    archs=(90,), names=("H200",), multiprocessors=(132,), uuids=("GPU-a", "GPU-b"), driver="580.1", cuda=(13, 0)
)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with GPUs and a toolkit, as far as FER asks."""
    monkeypatch.setattr(gpus, "look", lambda: HERE)
    toolkit = {"home": "/usr/local/cuda-13.0", "nvcc": "release 13.0"}
    monkeypatch.setattr(compat, "toolkit", lambda environ=None: toolkit)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def put(root: Path, files: dict[str, bytes]) -> Path:
    """Files by their path."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


LIBRARY = made.binary(machine=62)
FILES: dict[str, dict[str, bytes]] = {
    "deepgemm": {"cache/kernel.gemm.ab/kernel.cubin": made.binary(), "cache/kernel.gemm.ab/kernel.cu": b"source"},
    "flashinfer-autotune": {f"v/sm90/key/rank_tp{rank}_pp0_dp0.json": b"{}" for rank in (0, 1)},
    "flashinfer-jit": {"v/90a/cached_ops/op/op.so": LIBRARY, "v/90a/cached_ops/op/build.ninja": b"rule"},
    "compute-cache": {"ComputeCache/index": b"index", "ComputeCache/a/b/c": b"code"},
    "markers": {f"deepgemm-{'0' * 24}/marker.json": b"{}"},
    "p2p-map": {"sglang/gpu_p2p_access_cache_for_0,1.json": b"{}"},
    "sglang-cute": {"fingerprint/object.o": LIBRARY},
    "sglang-jit": {
        "sm90/norm/build-a/deps-b/norm.so": LIBRARY,
        "sm90/norm/build-a/deps-b/sgl_deps.json": b"[]",
    },
    "tilelang": {"key/kernel.so": LIBRARY, "key/params.pkl": b"\x80\x04."},
    "tvm-ffi": {"norm_ab/main.so": LIBRARY, "norm_ab/build.ninja": b"rule"},
    "inductor": {"model/artifacts.bin": b"\x80\x04.", "model/needs.json": b'{"kernels": []}'},
}


def fill(name: str, root: Path) -> Path:
    """A cache of this kind with one complete entry."""
    return put(root, FILES[name])


def everything(name: str, root: Path) -> list[registry.Found]:
    return list(REGISTRY[name].complete(root, lambda path: True))


def move(name: str, source: Path, target: Path, tmp_path: Path) -> Outcome:
    """Packed here and unpacked there, as trusted."""
    pack.pack({name: source}, tmp_path / f"{name}.a")
    terms = Terms(code="take", here=Live(host=compat.host_facts()))
    return unpack.unpack(tmp_path / f"{name}.a", {name: target}, terms)


def test_every_component_is_tried_here() -> None:
    assert set(FILES) == set(REGISTRY) - {"triton"}


@pytest.mark.parametrize("name", FILES)
def test_each_is_found_packed_and_restored_where_it_may_be(name: str, tmp_path: Path) -> None:
    source = fill(name, tmp_path / "source")
    (found,) = everything(name, source)
    target = source if not REGISTRY[name].relocatable else tmp_path / "target"
    pack.pack({name: source}, tmp_path / "a")
    before = made.content(source)
    if target is source:
        source.rename(tmp_path / "gone")
    outcome = (
        move(name, tmp_path / "gone", target, tmp_path) if target is source else move(name, source, target, tmp_path)
    )
    if REGISTRY[name].relocatable:
        assert outcome.restored == [found.path]
        assert made.content(target) == before
    else:
        assert "prefix" in outcome.skipped[found.path]  # packed elsewhere than where it is unpacked


@pytest.mark.parametrize("name", ["flashinfer-jit", "tvm-ffi"])
def test_build_folders_return_to_their_own_prefix_with_their_times(name: str, tmp_path: Path) -> None:
    source = fill(name, tmp_path / "source")
    times = {}
    for number, path in enumerate(sorted(source.rglob("*.*"))):
        os.utime(path, ns=(0, 1_700_000_000_000_000_000 + number))
        times[path] = path.stat().st_mtime_ns
    pack.pack({name: source}, tmp_path / "a")
    source.rename(tmp_path / "gone")
    terms = Terms(code="take", here=Live(host=compat.host_facts()))
    assert len(unpack.unpack(tmp_path / "a", {name: source}, terms).restored) == 1
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("compute-cache", {"driver": "590.2"}, "driver: 580.1 -> 590.2"),
        ("p2p-map", {"uuids": ("GPU-b", "GPU-a")}, "uuids: "),
        ("flashinfer-autotune", {"names": ("H100",)}, "gpu: "),
        ("inductor", {"names": ("H100",)}, "gpu: "),
        ("compute-cache", {"driver": ""}, "driver: 580.1 -> (unknown)"),
    ],
)
def test_conditions_of_each_cache(
    name: str, change: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = fill(name, tmp_path / "source")
    pack.pack({name: source}, tmp_path / "a")
    monkeypatch.setattr(gpus, "look", lambda: Seen(**{**vars(HERE), **change}))
    terms = Terms(code="take", here=Live(host=compat.host_facts()))
    outcome = unpack.unpack(tmp_path / "a", {name: tmp_path / "target"}, terms)
    (why,) = outcome.skipped.values()
    assert told in why
    assert not (tmp_path / "target").exists()


def test_content_addressed_leaves_survive_another_place_and_shuffled_times(tmp_path: Path) -> None:
    """K8."""
    source = fill("sglang-jit", tmp_path / "a")
    pack.pack({"sglang-jit": source}, tmp_path / "one")
    for number, path in enumerate(source.rglob("*")):
        os.utime(path, (number, 10_000 - number))
    pack.pack({"sglang-jit": source}, tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    unpack.unpack(tmp_path / "one", {"sglang-jit": tmp_path / "b"}, Terms(code="take"))
    assert made.content(tmp_path / "b") == made.content(source)
    (found,) = everything("sglang-jit", tmp_path / "b")
    assert found.path == "sm90/norm/build-a/deps-b"


@pytest.mark.parametrize(
    "ranks",
    [["tp1_pp0_dp0"], ["tp0_pp0_dp0", "tp2_pp0_dp0"], ["tp0_pp0_dp0", "tp1_pp0_dp0", "tp0_pp1_dp0"], ["tp0_pp1_dp0"]],
)
def test_ranks_with_a_gap_are_not_kept(tmp_path: Path, ranks: list[str]) -> None:
    for rank in ranks:
        put(tmp_path / "c", {f"v/sm90/key/rank_{rank}.json": b"{}"})
    assert not everything("flashinfer-autotune", tmp_path / "c")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: (folder / "kernel.cubin").write_bytes(b""),
        lambda folder: (folder / "kernel.cubin").unlink(),
        lambda folder: (folder / "kernel.cu").unlink(),
        lambda folder: (folder / "link").symlink_to("/etc/passwd"),
    ],
    ids=["empty", "missing", "no source", "link"],
)
def test_half_written_entries_are_left_out(tmp_path: Path, break_it: Callable[[Path], None]) -> None:
    fill("deepgemm", tmp_path)
    break_it(next(tmp_path.glob("cache/*")))
    assert not everything("deepgemm", tmp_path)


def test_kernels_of_deepgemm_need_no_trust(tmp_path: Path) -> None:
    source = fill("deepgemm", tmp_path / "source")
    pack.pack({"deepgemm": source}, tmp_path / "a")
    assert len(unpack.unpack(tmp_path / "a", {"deepgemm": tmp_path / "target"}).restored) == 1


def test_a_damaged_tree_is_healed_file_by_file(tmp_path: Path) -> None:
    source = fill("sglang-jit", tmp_path / "source")
    target = tmp_path / "target"
    move("sglang-jit", source, target, tmp_path)
    next(target.rglob("norm.so")).write_bytes(b"")
    outcome = move("sglang-jit", source, target, tmp_path)
    assert len(outcome.healed) == 1
    assert next(target.rglob("deps-b/norm.so")).read_bytes() == LIBRARY


def test_what_changes_over_time_is_not_set_back(tmp_path: Path) -> None:
    """A file that is complete and other than the archive's is newer, where a cache is written again and again."""
    source = fill("flashinfer-autotune", tmp_path / "source")
    target = tmp_path / "target"
    move("flashinfer-autotune", source, target, tmp_path)
    newer = next(target.rglob("rank_tp0*"))
    newer.write_bytes(b'{"newer": 1}')
    assert len(move("flashinfer-autotune", source, target, tmp_path).kept) == 1
    assert newer.read_bytes() == b'{"newer": 1}'
    newer.write_bytes(b"")
    assert len(move("flashinfer-autotune", source, target, tmp_path).healed) == 1


def test_places_follow_the_engines_variables(tmp_path: Path) -> None:
    home = {"HOME": "/h"}
    assert REGISTRY["deepgemm"].where({**home, "SGLANG_DG_CACHE_DIR": "/dg"}) == Path("/dg")
    assert REGISTRY["deepgemm"].where(home) == Path("/h/.deep_gemm")
    for below in (".cache/deep_gemm", ".cache/sglang/deep_gemm"):
        (tmp_path / below).mkdir(parents=True)
        assert REGISTRY["deepgemm"].where({"HOME": str(tmp_path)}) == tmp_path / below
    assert REGISTRY["sglang-jit"].where({**home, "SGLANG_CACHE_DIR": "/s"}) == Path("/s/jit")
    assert REGISTRY["sglang-cute"].where(home) == Path("/h/.cache/sglang/cute_aot")
    assert REGISTRY["flashinfer-jit"].where({"FLASHINFER_WORKSPACE_BASE": "/f"}) == Path("/f/.cache/flashinfer")
    assert REGISTRY["compute-cache"].where({"CUDA_CACHE_PATH": "/c/ComputeCache"}) == Path("/c")


# -- torch's artifacts (K25)


def test_artifacts_without_their_kernels_are_told(tmp_path: Path) -> None:
    triton = tmp_path / "triton"
    kernel = made.make(triton, "add")
    needs = json.dumps({"kernels": [kernel.name]}).encode()
    put(tmp_path / "inductor", {"model/artifacts.bin": b"\x80\x04.", "model/needs.json": needs})
    packed = pack.pack({"inductor": tmp_path / "inductor"}, tmp_path / "a")
    (whole,) = compare.expected(packed.manifest, triton, None)
    assert whole.why == ""
    (without,) = compare.expected(packed.manifest, tmp_path / "empty", None)
    assert without.why.startswith("1 of its kernels' binaries are not in Triton's cache")
    (kernel / "add.cubin").write_bytes(b"")
    assert inductor.missing([kernel.name], triton) == [kernel.name]


def test_a_damaged_blob_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "inductor"
    folder.mkdir(mode=0o700)
    (folder / "m").mkdir(mode=0o700)
    (folder / "m" / inductor.BLOB).write_bytes(b"damaged")
    (folder / "m" / inductor.NEEDS).write_text(json.dumps({"sha256": "0" * 64, "kernels": []}))
    assert inductor.load(folder, "m", None) is None
    assert inductor.load(folder, "other", None) is None
