"""Record the small archive that tests read on machines without a GPU: only kernels of this project's own sources.

python -m tests.support.graphs_fixture FILE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")  # or the binary names the folders it was compiled in

from bench.graphs_model import norm
from fer.engines.graphs import DecodeGraphs, Replayable


class Tiny(DecodeGraphs):
    """Two norms and a copy: all that can be done without anybody else's binaries."""

    batch_sizes = (2, 1)
    deep = True

    def allocate_kv(self) -> None:
        self.cache = torch.zeros(2, 256, device="cuda", dtype=torch.bfloat16)

    def allocate(self) -> None:
        host = torch.linspace(-1, 1, 512).to(torch.bfloat16)
        self.x = torch.empty(2, 256, device="cuda", dtype=torch.bfloat16)
        self.weight = torch.empty(256, device="cuda", dtype=torch.bfloat16)
        self.weight.copy_(host[:256])

    def layout(self) -> Mapping[str, Any]:
        return {"shape": [2, 256]}

    def kv_bytes(self) -> int:
        return 4 << 20

    def largest_kv_bytes(self) -> int:
        return 1024

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {"kv.0": self.cache, "x": self.x, "weight": self.weight}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {}

    def step(self, size: int) -> Mapping[str, torch.Tensor]:
        out = norm(norm(self.x[:size], self.weight), self.weight)
        self.cache[:size].copy_(out)
        return {"out": out}

    def fill(self, size: int, number: int) -> None:
        self.x.copy_((torch.arange(512).reshape(2, 256) % (7 + number)).to(torch.bfloat16))

    def use(self, size: int, graph: Replayable | None, outputs: Mapping[str, torch.Tensor] | None) -> None:
        """Nothing decodes from these graphs."""


def main() -> None:
    from fer.cudagraph import save as saving
    from fer.cudagraph.capture import capture
    from fer.cudagraph.cupti import Recorder
    from fer.cudagraph.libcuda import open_cuda
    from fer.memory.device import CudaDevice
    from fer.memory.ranges import reserve

    device = CudaDevice(0)
    recorder = Recorder()
    ranges = reserve(device)
    torch.cuda.init()
    model = Tiny()
    with torch.inference_mode():
        for each in ranges.all:
            each.map(64 << 20)
        with ranges.static.place():
            model.allocate()
        with ranges.kv.place():
            model.allocate_kv()
    made = capture(model, model.batch_sizes, ranges)
    begin = time.perf_counter()
    saved = saving.save(Path(sys.argv[1]), open_cuda(), recorder.seen, made, model, ranges, [], {}, "fixture")
    print(
        "fixture",
        saved,
        made.troubles,
        time.perf_counter() - begin,
        Path(sys.argv[1]).stat().st_size,
        recorder.troubles,
    )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
