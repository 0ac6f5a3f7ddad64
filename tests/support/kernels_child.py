"""One start of an engine that compiles kernels, as far as the kernels' stage sees it; a process of its own.

``python -m tests.support.kernels_child REQUEST`` prints one JSON object. The request is JSON::

    blocks       kernels to compile, by their block size
    arch         90
    jit          True: through a warm-up of the function, as a call does; False: through the compiler alone
    warm         True: wait for the preparation of kernels before the first lookup
    deep_gemm    name of a kernel that DeepGEMM builds meanwhile
    options      settings of the start
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any


def main(request: dict[str, Any]) -> dict[str, Any]:
    from fer.engines.base import Engine, EngineIdentity
    from fer.kernels.stage import KernelsStage
    from fer.options import Options
    from fer.report import Report
    from fer.stages import Start

    class Toy(Engine):
        device = "cuda:0"

        def identity(self) -> EngineIdentity:
            return EngineIdentity(engine="toy", engine_version="1", model=request.get("model", "toy"))

        def build(self) -> Any:
            raise NotImplementedError

        load = adopt = build  # type: ignore[assignment]

    start = Start(engine=Toy(), options=Options(**request.get("options", {})), report=Report())
    if request.get("jit"):
        import triton  # noqa: F401 - an engine's import comes before its stages

        from tests.support import kernels  # noqa: F401
    begin = time.perf_counter()
    stage = KernelsStage()
    with start.report.phase("kernels"):
        stage.run(start)
    seconds = time.perf_counter() - begin
    stage.ahead(start)
    wait_for("fer-warm")  # it finds no GPU: the pretended one comes later
    imported = "triton" in sys.modules and not request.get("jit")
    answer: dict[str, Any] = {"imported": imported, "run_s": seconds, "binaries": []}
    if request.get("blocks"):
        answer |= compile_all(request)
    if name := request.get("deep_gemm"):
        write_deep_gemm(name)
    stage.finish(start)
    told = start.report.stages["kernels"]
    wait_for("fer-kernels-finish")
    wait_for("fer-kernels-writer")
    kept = {"cache": os.environ.get("TRITON_CACHE_DIR"), "manager": os.environ.get("TRITON_CACHE_MANAGER")}
    return {**answer, **kept, "path": told.path, "why": told.why, "details": dict(told.details)}


def write_deep_gemm(name: str) -> None:
    """What DeepGEMM leaves of one kernel."""
    from pathlib import Path

    from tests.support import kernel_entries as made

    folder = Path(os.environ["SGLANG_DG_CACHE_DIR"], "cache", name)
    folder.mkdir(parents=True)
    (folder / "kernel.cu").write_text("source")
    (folder / "kernel.cubin").write_bytes(made.binary())


def compile_all(request: dict[str, Any]) -> dict[str, Any]:
    """Look the kernels up; hits and compilations by a listener in front of FER's, digests of the binaries."""
    import hashlib

    from tests.support import kernels

    arch, jit = request.get("arch", 90), request.get("jit", False)
    if not jit:
        with kernels.counted(chain=True) as counted:
            found = [kernels.compile_add(block, arch).asm["cubin"] for block in request["blocks"]]
    else:
        with kernels.pretended_gpu(arch), kernels.counted(chain=True) as counted:
            if request.get("warm"):
                prepare()
            found = [kernels.warm_up(block).asm["cubin"] for block in request["blocks"]]
    digests = [hashlib.sha256(binary).hexdigest() for binary in found]
    return {"hits": counted.hits, "compiled": len(counted.compiled), "binaries": digests}


def prepare() -> None:
    """What the stage begins beside the weights; here the pretended GPU has to be there first."""
    from fer.kernels import store, unpack, warm

    (archive,) = store.archives()
    manifest = unpack.peek(archive)[0]
    thread = warm.begin(warm.specializations(map(manifest.parts_of, manifest.entries)))
    assert thread is not None
    thread.join(60)


def wait_for(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
