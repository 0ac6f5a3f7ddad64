"""The caches that FER carries beside Triton's, one table: each with its place, what of it is complete, and its traps.

An entry of these is a folder that is restored as a whole or not at all; the rules of where it may be used are facts
that must be the same there. A cache that is laid out otherwise has no entries.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fer.kernels import compat, elf, gpus, inductor
from fer.kernels.components import TRITON, Component, Found, Wanted
from fer.kernels.entry import Odd, read

MARKER: Final = "marker.json"
"""The one file of a completion marker."""

_PASSING: Final = re.compile(r"(\.lock|\.tmp|\.tmp\..*|lock|\.ninja_lock)$|^\.?tmp")
_RANK: Final = re.compile(r"rank_tp(\d+)_pp(\d+)_dp(\d+)(?:_gpu[\w-]+)?\.json$")

Whole = Callable[[Path, list[str]], bool]
"""Whether a folder with these files is complete."""


def home_of(*parts: str) -> Callable[[Mapping[str, str]], Path | None]:
    """A folder below the user's home."""

    def where(environ: Mapping[str, str]) -> Path | None:
        home = environ.get("HOME") or os.path.expanduser("~")
        return Path(home, *parts) if home not in ("", "~") else None

    return where


def named(*names: str, otherwise: tuple[str, ...] = (), below: tuple[str, ...] = ()) -> Callable[..., Path | None]:
    """A folder that the first of these variables names, with ``below`` under it; else one below the home."""

    def where(environ: Mapping[str, str]) -> Path | None:
        chosen = next((environ[name] for name in names if environ.get(name)), "")
        if chosen:
            return Path(chosen, *below)
        return home_of(*otherwise)(environ) if otherwise else None

    return where


def sglang(*below: str, variable: str = "") -> Callable[[Mapping[str, str]], Path | None]:
    """A folder of SGLang's: the one a variable names, else one in ``SGLANG_CACHE_DIR``, else in ``~/.cache/sglang``."""

    def where(environ: Mapping[str, str]) -> Path | None:
        if chosen := environ.get(variable):
            return Path(chosen)
        return named("SGLANG_CACHE_DIR", otherwise=(".cache", "sglang", *below), below=below)(environ)

    return where


def _deep_gemm_root(environ: Mapping[str, str]) -> Path | None:
    """DeepGEMM's own folder, or the one SGLang gives it (some releases in ``~/.cache`` itself), whichever is there."""
    if environ.get("SGLANG_DG_CACHE_DIR") or environ.get("DG_JIT_CACHE_DIR"):
        return named("SGLANG_DG_CACHE_DIR", "DG_JIT_CACHE_DIR")(environ)
    engines = (sglang("deep_gemm")(environ), home_of(".cache", "deep_gemm")(environ))
    there = next((path for path in engines if path is not None and path.is_dir()), None)
    return there or home_of(".deep_gemm")(environ)


def _flashinfer_root(environ: Mapping[str, str]) -> Path | None:
    return named("FLASHINFER_WORKSPACE_BASE", otherwise=(".cache", "flashinfer"), below=(".cache", "flashinfer"))(
        environ
    )


def _compute_cache(environ: Mapping[str, str]) -> Path | None:
    """The folder above the driver's cache, which is one entry."""
    chosen = environ.get("CUDA_CACHE_PATH")
    if not chosen:
        return home_of(".nv")(environ)
    return Path(chosen).parent if Path(chosen).name == "ComputeCache" else None


def of_fer(name: str) -> Callable[[Mapping[str, str]], Path | None]:
    """A folder of FER's own."""

    def where(environ: Mapping[str, str]) -> Path | None:
        from fer.kernels.store import folder

        try:
            return folder() / name
        except RuntimeError:
            return None  # a user without a home

    return where


def folders(depth: int, whole: Whole, *, pattern: str = "*") -> Callable[[Path, Wanted], Iterator[Found]]:
    """Entries of a tree: the complete folders at a depth below its root, links and what passes left out."""

    def complete(root: Path, wanted: Wanted) -> Iterator[Found]:
        for folder in sorted(root.glob("/".join(["*"] * (depth - 1) + [pattern]))):
            path = folder.relative_to(root).as_posix()
            if folder.is_symlink() or not folder.is_dir() or not wanted(path):
                continue
            files = files_below(folder)
            if files and whole(folder, files):
                yield Found(path, files)

    return complete


def files_below(folder: Path) -> list[str]:
    """Regular files in a folder and below, by relative name; empty where it holds something that is no file."""
    found = []
    for place, below, names in os.walk(folder):
        below.sort()
        for name in names:
            path = Path(place, name)
            if _PASSING.search(name):
                continue
            if not stat.S_ISREG(path.lstat().st_mode):
                return []
            found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def _inductor_entries(root: Path, wanted: Wanted) -> Iterator[Found]:
    """Blobs, each with the names of the kernels that belong to it."""
    for found in folders(1, lambda folder, files: inductor.BLOB in files)(root, wanted):
        found.parts["needs"] = inductor.needs_of(root / found.path)
        yield found


def _any(folder: Path, files: list[str]) -> bool:
    return all((folder / name).stat().st_size for name in files)


def _deep_gemm(folder: Path, files: list[str]) -> bool:
    return _has_cubin(folder, "kernel.cubin") and "kernel.cu" in files


def _has_cubin(folder: Path, name: str) -> bool:
    try:
        data = read(str(folder / name))
    except Odd:
        return False
    return elf.machine(data) == elf.CUDA and not elf.damage(data)


def _library(folder: Path, files: list[str]) -> bool:
    libraries = [name for name in files if name.endswith(".so")]
    return bool(libraries) and not any(elf.damage(read(str(folder / name))) for name in libraries)


def _objects(folder: Path, files: list[str]) -> bool:
    return all(not elf.damage(read(str(folder / name))) for name in files if name.endswith(".o"))


def _built(folder: Path, files: list[str]) -> bool:
    """A workspace in which something was built; libraries that are there are whole."""
    return _library(folder, files) and "build.ninja" in {name.rpartition("/")[2] for name in files}


def _all_ranks(folder: Path, files: list[str]) -> bool:
    """Ranks that do not agree throw all of it away, so that a folder with a gap is worth nothing."""
    found = [tuple(map(int, match.groups())) for name in files if (match := _RANK.match(name))]
    groups: dict[tuple[int, int], list[int]] = {}
    for tp, pp, dp in found:
        groups.setdefault((pp, dp), []).append(tp)
    sizes = {tuple(sorted(ranks)) for ranks in groups.values()}
    stages = sorted({pp for pp, _ in groups})
    return (
        len(sizes) == 1
        and next(iter(sizes)) == tuple(range(len(next(iter(sizes)))))
        and stages == list(range(len(stages)))
        and _any(folder, files)
    )


def _whole_folder(root: Path, wanted: Wanted) -> Iterator[Found]:
    """The driver's cache: its index belongs to all of it."""
    path = root / "ComputeCache"
    if path.is_dir() and wanted("ComputeCache"):
        files = files_below(path)
        if files:
            yield Found("ComputeCache", files)


def _access_maps(root: Path, wanted: Wanted) -> Iterator[Found]:
    """Maps of which GPU reaches which; each engine has them in its own folder, one for each set of visible GPUs."""
    for engine in ("sglang", "vllm"):
        names = sorted(path.name for path in (root / engine).glob("gpu_p2p_access_cache_for_*.json"))
        if names and wanted(engine) and _any(root / engine, names):
            yield Found(engine, names)


# -- facts


def _toolkit(root: Path) -> Mapping[str, Any]:
    """Build files hold absolute paths, of the cache and of the toolkit."""
    toolkit = compat.toolkit()
    return {"prefix": os.path.realpath(root), "toolkit": toolkit["home"], "nvcc": toolkit["nvcc"]}


def _driver(root: Path) -> Mapping[str, Any]:
    seen = gpus.look()
    return {"driver": seen.driver if seen else "", "gpu": list(seen.names) if seen else []}


def _gpus(root: Path) -> Mapping[str, Any]:
    """The map counts GPUs by number: it holds for these very GPUs in this order."""
    seen = gpus.look()
    return {
        "uuids": list(seen.uuids) if seen else [],
        "driver": seen.driver if seen else "",
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES") or "all",
    }


def _torch(root: Path) -> Mapping[str, Any]:
    from fer.environment import package_version

    seen = gpus.look()
    version = package_version("torch")
    return {"torch": version if isinstance(version, str) else "", "gpu": list(seen.names) if seen else []}


# -- the table

OTHERS: Final = (
    Component(  # the CUDA driver
        name="compute-cache",
        where=_compute_cache,
        complete=_whole_folder,
        places="ComputeCache",
        relocatable=True,
        facts=_driver,
        mutable=True,
        traps="of use to the very driver that wrote it; evicts where CUDA_CACHE_MAXSIZE is small",
    ),
    Component(  # DeepGEMM 2: cache/kernel.<name>.<digest>/kernel.cubin
        name="deepgemm",
        where=_deep_gemm_root,
        complete=folders(2, _deep_gemm, pattern="kernel.*"),
        places=r"[^/]+/kernel\.[^/]+",
        relocatable=True,
        traps="engines warm every shape up again unless a completion marker says that it was done",
    ),
    Component(  # SGLang 0.5: <FlashInfer's version>/<arch>/<digest of model and layout>/rank_*.json
        name="flashinfer-autotune",
        where=sglang("flashinfer", "autotune"),
        complete=folders(3, _all_ranks),
        places="[^/]+/[^/]+/[^/]+",
        relocatable=True,
        facts=_driver,
        mutable=True,
        traps="named after the model's path; all ranks or none",
    ),
    Component(  # FlashInfer 0.7: <version>/<archs>/{cached_ops,generated}, built by ninja
        name="flashinfer-jit",
        where=_flashinfer_root,
        complete=folders(2, _built),
        places="[^/]+/[^/]+",
        relocatable=False,
        facts=_toolkit,
        times=True,
        mutable=True,
        traps="build files hold absolute paths: the same host's prefix and CUDA toolkit only; prefer its AOT wheels",
    ),
    Component(  # torch's own cache artifacts, see fer.kernels.inductor
        name="inductor",
        where=of_fer("inductor"),
        complete=_inductor_entries,
        places="[^/]+",
        relocatable=True,
        facts=_torch,
        mutable=True,
        traps="pickles; keyed by the GPU's name; tracing still runs; its kernels' binaries are in Triton's cache",
    ),
    Component(  # FER's own, see fer.kernels.markers
        name="markers",
        where=of_fer("markers"),
        complete=folders(1, lambda folder, files: files == [MARKER] and _any(folder, files)),
        places="[a-z0-9-]+-[0-9a-f]{24}",
        relocatable=True,
        mutable=True,
        traps="worth nothing without the kernels they name",
    ),
    Component(  # SGLang and vLLM: <engine>/gpu_p2p_access_cache_for_<CUDA_VISIBLE_DEVICES>.json
        name="p2p-map",
        where=home_of(".cache"),
        complete=_access_maps,
        places="sglang|vllm",
        relocatable=True,
        facts=_gpus,
        mutable=True,
        traps="of use on the same GPUs in the same order only",
    ),
    Component(  # SGLang 0.5: <fingerprint>/<digest>.o
        name="sglang-cute",
        where=sglang("cute_aot", variable="SGLANG_CUTE_AOT_CACHE_DIR"),
        complete=folders(1, _objects),
        places="[^/]+",
        relocatable=True,
        traps="objects that SGLang loads into its process as they are",
    ),
    Component(  # SGLang 0.5: <target>/<module>/build-<key>/deps-<key>, a leaf that is never changed
        name="sglang-jit",
        where=sglang("jit", variable="SGLANG_JIT_CACHE_DIR"),
        complete=folders(4, _library, pattern="deps-*"),
        places="[^/]+/[^/]+/[^/]+/deps-[^/]+",
        relocatable=True,
        traps="content-addressed; SGLANG_JIT_FORCE_RECOMPILE ignores it",
    ),
    Component(
        name="tilelang",
        where=named("TILELANG_CACHE_DIR", otherwise=(".tilelang", "cache")),
        complete=folders(1, _any),
        places="[^/]+",
        relocatable=True,
        traps="shared objects and pickles",
    ),
    Component(  # tvm-ffi 0.1: <name>_<digest of the sources>, built by ninja
        name="tvm-ffi",
        where=named("TVM_FFI_CACHE_DIR", otherwise=(".cache", "tvm-ffi")),
        complete=folders(1, _built),
        places="[^/]+",
        relocatable=False,
        facts=_toolkit,
        times=True,
        traps="build files hold absolute paths: the same host's prefix and CUDA toolkit only",
    ),
)

REGISTRY: Final[dict[str, Component]] = {each.name: each for each in (TRITON, *OTHERS)}
"""Every component by name."""
