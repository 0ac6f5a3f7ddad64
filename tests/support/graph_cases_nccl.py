"""One of two ranks whose decode step adds up over both: what NCCL launches is refused, the rest is kept.

python -m tests.support.graph_cases_nccl RANK FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANKS = 2


def run(rank: int, folder: Path) -> dict[str, Any]:
    from fer.cudagraph.cupti import Recorder
    from fer.memory.device import CudaDevice
    from fer.memory.ranges import reserve

    device = CudaDevice(rank)
    recorder = Recorder()
    ranges = reserve(device)
    import torch
    import torch.distributed as dist

    torch.cuda.init()
    torch.cuda.set_device(rank)
    where = torch.device("cuda", rank)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS, device_id=where)
    from fer.cudagraph import save as saving
    from fer.cudagraph.capture import capture
    from fer.cudagraph.libcuda import open_cuda
    from tests.support.graph_cases_model import NAMES, NUMBERS, Cases

    class Summed(Cases):
        def collective(self) -> torch.Tensor:
            out = self.x * (rank + 1)
            dist.all_reduce(out)
            return out

        def right(self, size: int, out: torch.Tensor) -> bool:
            if NAMES[size] == "collective":
                return torch.equal(out, self.x * 3)
            return super().right(size, out)

    model = Summed(("product", "collective", "scaled"), device=str(where))
    with torch.inference_mode():
        model.prepare()
        for each in ranges.all:
            each.map(model.scratch_bytes)
        with ranges.static.place():
            model.allocate()
        with ranges.kv.place():
            model.allocate_kv()
    made = capture(model, model.batch_sizes, ranges)
    path = folder / f"{rank}.fergraph"
    saved = saving.save(path, open_cuda(), recorder.seen, made, model, ranges, [], {}, "fixed")
    recorder.close()
    from tests.support.graph_cases import _all_outputs

    row: dict[str, Any] = _all_outputs(model, made.graphs, made.outputs)
    refused: Mapping[str, str] = saved.refused
    name = saving.name_of(NUMBERS["collective"])
    row |= {"kept": len(saved.kept), "refused": list(refused), "why": refused.get(name, ""), "name": name}
    dist.barrier()
    return row


def main() -> None:
    try:
        row = run(int(sys.argv[1]), Path(sys.argv[2]))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(json.dumps(row), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
