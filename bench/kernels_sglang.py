"""SGLang's starts for ``bench.kernels_gpu``: cold, from FER's archive, and with its own caches moved.

SGLang runs as it is installed; only Triton's cache manager is another one, which counts. Its caches are folders of the
run's own, so that a cold start is cold. What of a cache may not be moved (build files with absolute paths) comes back
to the same place, everything else to another one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.kernels_lookups import counted

if TYPE_CHECKING:
    from bench.kernels_gpu import Plan

PROMPT = [785, 6722, 315, 9625, 374, 12095, 11, 323, 279, 6722, 315, 15344, 374]
# Few graphs, and no kernels that a pruned installation may lack: what is measured is the compiling before them.
ARGUMENTS = ("--attention-backend", "triton", "--sampling-backend", "pytorch")
GRAPHS = ("--cuda-graph-max-bs-decode", "8", "--cuda-graph-backend-prefill", "disabled")
MOVABLE = ("triton", "deepgemm", "sglang-jit", "sglang-cute")
FIXED = ("tvm-ffi", "flashinfer-jit")
STOPPED_S = 30.0


def shell_environment(file: Path) -> dict[str, str]:
    """What a shell file exports."""
    command = ["bash", "-c", '. "$1" >/dev/null && env -0', "bash", str(file)]
    out = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
    return dict(line.split("=", 1) for line in out.split("\0") if "=" in line)


class Caches:
    """Where one start has its caches: those that can be moved in ``movable``, the others below ``home``."""

    def __init__(self, movable: Path, home: Path) -> None:
        self.movable, self.home = movable, home
        for folder in (movable, home):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def variables(self) -> dict[str, str]:
        return {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": str(self.home / ".cache"),
            "TRITON_CACHE_DIR": str(self.movable / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.movable / "inductor"),
            "SGLANG_DG_CACHE_DIR": str(self.movable / "deep_gemm"),
            "DG_JIT_CACHE_DIR": str(self.movable / "deep_gemm"),
            "SGLANG_JIT_CACHE_DIR": str(self.movable / "sglang-jit"),
            "SGLANG_CUTE_AOT_CACHE_DIR": str(self.movable / "sglang-cute"),
            "TVM_FFI_CACHE_DIR": str(self.home / ".cache" / "tvm-ffi"),
            "FLASHINFER_WORKSPACE_BASE": str(self.home),
        }

    def roots(self, names: tuple[str, ...]) -> dict[str, Path]:
        """Folders as FER's components know them."""
        from fer.kernels.registry import REGISTRY

        found = {name: REGISTRY[name].where(self.variables) for name in names}
        return {name: path for name, path in found.items() if path is not None}

    def entries(self) -> dict[tuple[str, str], float]:
        """Every complete entry with the time at which it was written last."""
        from fer.kernels.registry import REGISTRY

        found = {}
        for name, root in self.roots(MOVABLE + FIXED).items():
            for each in REGISTRY[name].complete(root, lambda path: True):
                times = [(root / each.path / file).stat().st_ctime for file in each.files]
                found[name, each.path] = max(times)
        return found


class Served:
    """The rows of one checkpoint."""

    def __init__(self, plan: Plan, base: Path, name: str, env: Path, model: str, arguments: argparse.Namespace) -> None:
        if not model or not env.is_file():
            raise SystemExit(f"{name} needs --sglang-env FILE and a checkpoint (--model, --fp8-model)")
        self.plan, self.base, self.name, self.model = plan, base, name, model
        self.shell, self.fp8 = shell_environment(env), name == "fp8"
        # FER asks for the toolkit that compiles SGLang's kernels, here as there.
        os.environ.update({key: value for key, value in self.shell.items() if key == "CUDA_HOME"})
        self.compile_s = min(arguments.fp8_compile_s, 300.0)
        self.tokens: dict[str, Any] = {}
        self.cold_entries: dict[tuple[str, str], float] = {}

    def schedule(self) -> None:
        """What matters first; the row of the moved caches has what is left."""
        limit_s, again_s = (self.compile_s, self.compile_s) if self.fp8 else (170.0, 100.0)
        add, name = self.plan.add, self.name
        add(f"{name}: cold", limit_s, self.cold, least_s=45, reserve_s=75)
        add(f"{name}: FER, archive in another place", again_s, self.restored, least_s=40, needs=f"{name}: cold")
        add(f"{name}: stock, caches moved", again_s, self.moved, least_s=40, needs=f"{name}: cold", rank=1)

    # -- rows

    def cold(self, limit_s: float) -> None:
        caches = self._cold = Caches(self.base / "cold", self.base / "home")
        self._row("cold", caches, limit_s, fer=False)
        self.cold_entries = caches.entries()

    def restored(self, limit_s: float) -> None:
        from fer.kernels import compat, pack, unpack

        begin = time.monotonic()
        archive = self.base / "a.ferkernels"
        packed = pack.pack(self._cold.roots(MOVABLE + FIXED), archive)
        packed_s = time.monotonic() - begin
        (self.base / "cold").rename(self.base / "moved")
        (self.base / "home").rename(self.base / "home-moved")
        caches = Caches(self.base / "restored", self.base / "home")
        begin = time.monotonic()
        terms = unpack.Terms(code="take", here=compat.live(ask_triton=False))
        outcome = unpack.unpack(archive, caches.roots(MOVABLE + FIXED), terms)
        told = {
            "entries": len(packed.manifest.entries),
            "archive_mib": round(archive.stat().st_size / 2**20, 2),
            "pack_s": round(packed_s, 3),
            "unpack_s": round(time.monotonic() - begin, 3),
            "restored": len(outcome.restored),
            "skipped": sorted(set(outcome.skipped.values()))[:5],
        }
        self.plan.results.add(f"{self.name}: archive", told)
        self._row("FER, archive in another place", caches, limit_s - (time.monotonic() - begin), fer=True)

    def moved(self, limit_s: float) -> None:
        if not (self.base / "moved").is_dir():  # the row before was left out
            (self.base / "cold").rename(self.base / "moved")
            (self.base / "home").rename(self.base / "home-moved")
        self._row("stock, caches moved", Caches(self.base / "moved", self.base / "home-moved"), limit_s, fer=False)

    # -- how

    def _row(self, name: str, caches: Caches, limit_s: float, *, fer: bool) -> None:
        lookups = self.base / "lookups" / name.replace(" ", "-")
        lookups.mkdir(parents=True)
        environ = self._environment(caches, lookups, fer=fer)
        before, begun = caches.entries(), time.time()
        answer = self._start(environ, name, limit_s)
        after = caches.entries()
        written = {key for key, when in after.items() if when >= begun and before.get(key) != when}
        answer["triton"] = counted(lookups)
        answer["entries"] = {
            kind: sum(each == kind for each, _ in after) for kind in sorted({each for each, _ in after})
        }
        answer["written"] = {
            kind: sum(each == kind for each, _ in written) for kind in sorted({each for each, _ in written})
        }
        if self.cold_entries:
            # What the cold start had compiled by the time it was stopped, and this one compiled once more.
            answer["compiled_again"] = len(written & set(self.cold_entries))
        if "tokens" in answer:
            self.tokens[name] = answer.pop("tokens")
            same = len({json.dumps(tokens) for tokens in self.tokens.values()}) == 1
            answer["tokens"] = "the same in all rows" if same else f"DIFFERENT: {self.tokens}"
        self.plan.results.add(f"{self.name}: {name}", answer)

    def _environment(self, caches: Caches, lookups: Path, *, fer: bool) -> dict[str, str]:
        from bench.kernels_gpu import ROOT
        from fer.kernels.manager import SPEC

        environ = {**self.shell, **caches.variables, "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONUNBUFFERED": "1"}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), str(ROOT)]))
        environ |= {"FER_HOME": str(self.base / "fer")}
        if fer:
            return environ | {"TRITON_CACHE_MANAGER": SPEC, "FER_KERNELS_RECORD": str(lookups)}
        return environ | {"TRITON_CACHE_MANAGER": "bench.kernels_lookups:Telling", "BENCH_LOOKUPS": str(lookups)}

    def _start(self, environ: Mapping[str, str], name: str, limit_s: float) -> dict[str, Any]:
        """Start the engine, wait for its first token, and kill it; what it came to within the limit."""
        from bench.kernels_gpu import end, logs

        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", self.model, "--host", "127.0.0.1"]
        command += ["--port", str(port), *ARGUMENTS, *GRAPHS]
        log = logs() / f"{self.name}-{name.replace(' ', '-').replace(',', '')}.log"
        begin = time.monotonic()
        with log.open("wb") as out:
            child = subprocess.Popen(command, env=dict(environ), stdout=out, stderr=out, start_new_session=True)
        try:
            tokens, first_s = _first_tokens(port, child, begin + limit_s)
        finally:
            end(child)
            _memory_back(STOPPED_S)
        if first_s is None:
            if child.returncode not in (None, -9):
                raise RuntimeError(
                    f"ended by itself with {child.returncode}: {log.read_bytes()[-1500:].decode(errors='replace')}"
                )
            return {"stopped_s": round(time.monotonic() - begin, 1)}
        return {"first_tokens_s": round(first_s, 2), "tokens": tokens}


def _first_tokens(port: int, child: subprocess.Popen[bytes], deadline: float) -> tuple[Any, float | None]:
    """Greedy tokens of a fixed prompt, and the seconds since the start; None where it did not come to that."""
    begin = time.monotonic()
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
    while time.monotonic() < deadline and child.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=max(1.0, deadline - time.monotonic()))
        try:
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            told = json.loads(response.read())
            if response.status == 200 and told.get("output_ids"):
                return told["output_ids"], time.monotonic() - begin
        except (OSError, http.client.HTTPException, ValueError):
            pass  # not there yet
        finally:
            connection.close()
        time.sleep(0.05)
    return None, None


def _memory_back(limit_s: float) -> None:
    """Wait until the killed engine's memory is free again, as far as a driver is there to ask."""
    from bench.harness import gpu_used_mib

    end = time.monotonic() + limit_s
    try:
        while gpu_used_mib() > 2000 and time.monotonic() < end:
            time.sleep(0.2)
    except (OSError, subprocess.CalledProcessError):
        return
