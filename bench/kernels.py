"""Compiled kernels: found in another place, restored, verified; beside Triton as it is, in the same run. Needs no GPU.

python -m bench.kernels                  # everything
python -m bench.kernels many [FOLDER ...]   # a thousand kernels, unpacked into folders on file systems of your choice
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fer
from bench.harness import Results, median, spread

KERNELS = 24
RUNS = 7
MANY = 1000


# -- what a fresh process does


def engine(arguments: list[str]) -> None:
    """Compile or find every kernel for each GPU; prints counts by Triton's own listener, times and binaries' digest."""
    with_fer, *archs = arguments
    begin = time.perf_counter()
    if with_fer == "fer":
        from fer.kernels import hooks

        hooks.install()
    install_s = time.perf_counter() - begin
    import hashlib

    from tests.support import kernels

    import_s = time.perf_counter() - begin - install_s
    from triton.runtime import cache

    begin = time.perf_counter()
    cache.triton_key()
    key_s = time.perf_counter() - begin
    digest, times = hashlib.sha256(), []
    with kernels.counted(chain=True) as counted:
        for arch in map(int, archs):
            for number in range(KERNELS):
                begin = time.perf_counter()
                made = kernels.compile_add(64 << number % 6, arch, num_warps=1 << number // 6)
                times.append(time.perf_counter() - begin)
                digest.update(made.asm["cubin"])
    print(
        json.dumps(
            {
                "hits": counted.hits,
                "compiled": len(counted.compiled),
                "install_s": install_s,
                "import_s": import_s,
                "key_s": key_s,
                "first_s": key_s + times[0],
                "all_s": sum(times),
                "later_s": sorted(times[1:])[len(times) // 2],
                "binaries": digest.hexdigest(),
            }
        )
    )


def run(cache: Path, home: Path, *, fer: bool, archs: tuple[int, ...] = (90,)) -> dict[str, Any]:
    environ = {**os.environ, "TRITON_CACHE_DIR": str(cache), "FER_HOME": str(home), "TRITON_DEFAULT_FP_FUSION": "1"}
    environ.pop("TRITON_CACHE_MANAGER", None)
    command = [sys.executable, "-m", "bench.kernels", "engine", "fer" if fer else "stock", *map(str, archs)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=600)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


# -- the comparisons


def moved(results: Results, base: Path) -> None:
    """Cold, the same place again, and another place; Triton alone and with FER."""
    from fer.kernels import pack, unpack

    stock, ours, home = base / "stock", base / "ours", base / "home"
    cold = run(stock, home, fer=False)
    again = run(stock, home, fer=False)
    stock.rename(base / "stock-moved")
    stock_moved = run(base / "stock-moved", home, fer=False)
    cold_fer = run(ours, home, fer=True)
    pack.pack({"triton": ours}, base / "a.ferkernels")
    shutil.rmtree(ours)
    unpack.unpack(base / "a.ferkernels", {"triton": base / "restored"}, unpack.Terms(code="take"))
    restored = run(base / "restored", home, fer=True)
    (base / "restored").rename(base / "restored-moved")
    moved_fer = run(base / "restored-moved", home, fer=True)
    for name, each in (
        ("stock, cold", cold),
        ("stock, same place", again),
        ("stock, moved", stock_moved),
        ("FER, cold", cold_fer),
        ("FER, archive in another place", restored),
        ("FER, moved", moved_fer),
    ):
        told = f"{each['hits']} hits, {each['compiled']} compiled, {each['all_s']:.3f} s for {KERNELS} kernels"
        results.add(name, told)
    same = {each["binaries"] for each in (cold, cold_fer, restored, moved_fer)}
    results.add("binaries are the same in all of these", len(same) == 1)


def first_kernel(results: Results, base: Path) -> None:
    """A warm process: what its first kernel costs, and of that Triton's key of itself."""
    home = base / "home"
    stock = [run(base / "stock-moved", home, fer=False) for _ in range(RUNS)]
    ours = [run(base / "restored-moved", home, fer=True) for _ in range(RUNS)]
    for name, key in (
        ("triton_key", "key_s"),
        ("first kernel, with triton_key", "first_s"),
        ("later kernels", "later_s"),
    ):
        results.add(f"{name}, stock (ms)", spread([each[key] for each in stock]))
        results.add(f"{name}, FER (ms)", spread([each[key] for each in ours]))
    results.add("installing FER's hooks, imports included (ms)", spread([each["install_s"] for each in ours]))


def per_hit(results: Results, base: Path) -> None:
    """One lookup by each manager, in turns, in one process: the files are in the page cache."""
    from triton.runtime.cache import FileCacheManager

    from fer.kernels import entry
    from fer.kernels.manager import VerifyingManager

    os.environ["TRITON_CACHE_DIR"] = str(base / "restored-moved")
    times: dict[type, list[float]] = {FileCacheManager: [], VerifyingManager: []}
    found = [(each.name, entry.groups_in(each.path)) for each in entry.entries_in(str(base / "restored-moved"))]
    sizes = [_bytes(base / "restored-moved" / key) for key, _ in found]
    # The stock manager needs the paths of this very place.
    for key, groups in found:
        folder = str(base / "restored-moved" / key)
        for group in groups:
            names = entry.group_names(folder, group) or []
            entry.write(folder, entry.GROUP + group, entry.group_list(folder, names))
    for _ in range(50):
        for key, groups in found:
            for kind, measured in times.items():
                begin = time.perf_counter()
                answer = kind(key).get_group(groups[0])
                measured.append(time.perf_counter() - begin)
                assert answer
    stock, ours = (median(times[kind]) for kind in (FileCacheManager, VerifyingManager))
    results.add("files of one kernel (KiB, median)", round(median([float(size) for size in sizes]) / 1024, 1))
    results.add("one hit, stock manager (us)", round(stock * 1e6, 1))
    results.add("one hit, verifying manager (us)", round(ours * 1e6, 1))
    results.add("overhead for one hit (ms)", round((ours - stock) * 1e3, 4))


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def many(results: Results, base: Path, places: tuple[Path, ...] = ()) -> None:
    """A thousand kernels: packed, unpacked and verified; beside a plain copy of the same files.

    Args:
        places: folders to unpack below; by default one on the disk of temporary files, and one in memory.
    """
    from fer.kernels import pack, unpack

    source = base / "many"
    synthesise(base / "restored-moved", source)
    archive = base / "many.ferkernels"
    packed = _timed(lambda: pack.pack({"triton": source}, archive))
    results.add(f"pack {MANY} kernels (s)", round(packed, 3))
    raw = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    results.add("cache; archive (MiB)", f"{raw / 2**20:.1f}; {archive.stat().st_size / 2**20:.1f}")
    for place in places or (base, *([Path("/dev/shm")] if os.access("/dev/shm", os.W_OK) else [])):
        kind = str(place) if places else "memory" if str(place) == "/dev/shm" else "disk"
        with tempfile.TemporaryDirectory(dir=place) as folder:
            unpacked, copied = [], []
            for number in range(RUNS):  # in turns: a disk's pace changes
                places = [Path(folder, f"{what}{number}") for what in ("unpacked", "copied")]
                unpacked.append(_timed(partial(unpack.unpack, archive, {"triton": places[0]})))
                copied.append(_timed(partial(shutil.copytree, source, places[1])))
        results.add(f"unpack and verify {MANY} kernels, {kind} (ms)", spread(unpacked))
        results.add(f"copy the same files, unverified, {kind} (ms)", spread(copied))
    target = base / "restored-many"
    unpack.unpack(archive, {"triton": target})
    results.add("unpack where all is there, every byte verified (ms)", _again(archive, target, unpack.Terms()))
    results.add("unpack where all is there, as a start does (ms)", _again(archive, target, unpack.Terms(glance=True)))
    results.add("verify the archive (ms)", spread([_timed(lambda: unpack.verify(archive)) for _ in range(RUNS)]))


def _again(archive: Path, target: Path, terms: Any) -> str:
    from fer.kernels import unpack

    return spread([_timed(lambda: unpack.unpack(archive, {"triton": target}, terms)) for _ in range(RUNS)])


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def synthesise(source: Path, target: Path) -> None:
    """Many different kernels from real ones: the same kinds of files and sizes, other keys and contents."""
    import hashlib

    from fer.kernels import entry

    real = [each.path for each in entry.entries_in(str(source))]
    for number in range(MANY):
        origin = real[number % len(real)]
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        folder = target / entry.folder_of(digest)
        folder.mkdir(parents=True)
        (metadata,) = entry.groups_in(origin)
        names = entry.group_names(origin, metadata) or []
        files = {}
        for name in names:
            data = entry.read(os.path.join(origin, name))
            if name == metadata:
                data = json.dumps({**json.loads(data), "hash": digest}).encode()
            else:
                data += hashlib.sha256(f"{number} {name}".encode()).hexdigest().encode()
            (folder / name).write_bytes(data)
            files[name] = entry.Stored.of(data)
        known = entry.load_sidecar(origin, metadata)
        sidecar = entry.Sidecar(files, known.parts if known else {})
        entry.write_group(str(folder), metadata, names, sidecar)


def other_gpus(results: Results, base: Path) -> None:
    """Kernels for GPUs that are not here: packed, verified, and found by a process that asks for both."""
    from fer.kernels import pack, unpack

    made = run(base / "both", base / "home", fer=True, archs=(90, 100))
    for arch in (90, 100):
        out = base / f"sm_{arch}.ferkernels"
        pack.pack({"triton": base / "both"}, out, pack.Choice(archs=(arch,)))
        unpack.unpack(out, {"triton": base / "both-restored"})
        results.add(f"sm_{arch}: entries packed and verified", len(unpack.verify(out).entries))
    found = run(base / "both-restored", base / "home", fer=True, archs=(90, 100))
    told = f"{found['hits']} hits, {found['compiled']} compiled, same binaries: {found['binaries'] == made['binaries']}"
    results.add("both packs restored, fresh process", told)


def stage(results: Results, base: Path) -> None:
    """What the stage costs a start that compiles nothing: without an archive, and with a thousand kernels in place."""
    from fer.kernels import store

    def once(home: Path) -> float:
        request = json.dumps({"options": {"home": str(home)}})
        environ = {**os.environ, "TRITON_CACHE_DIR": str(base / "restored-many"), "FER_HOME": str(home)}
        command = [sys.executable, "-m", "tests.support.kernels_child", request]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=100)
        answer = json.loads(done.stdout)
        assert not answer["imported"]
        return float(answer["run_s"])

    home = base / "stage"
    results.add("stage, nothing to restore (ms)", spread([once(home) for _ in range(RUNS)]))
    shutil.copy(base / "many.ferkernels", store.path_for(home, store.prefix_for("toy", "toy"), "90"))
    results.add(f"stage, {MANY} kernels in place (ms)", spread([once(home) for _ in range(RUNS)]))


def main() -> None:
    results = Results("kernels")
    # As an installed package is: some environments forbid Python to write bytecode while it runs.
    compileall.compile_dir(str(Path(fer.__file__).parent), quiet=1)
    import triton

    results.add("triton", triton.__version__)
    with tempfile.TemporaryDirectory(prefix="fer-bench-") as folder:
        base = Path(folder)
        if sys.argv[1:2] == ["many"]:
            run(base / "restored-moved", base / "home", fer=True)
            many(results, base, tuple(map(Path, sys.argv[2:])))
            results.save()
            return
        for part in (moved, first_kernel, per_hit, many, other_gpus, stage):
            part(results, base)
    results.save()


if __name__ == "__main__":
    engine(sys.argv[2:]) if sys.argv[1:2] == ["engine"] else main()
