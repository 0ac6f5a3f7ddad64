"""Whether a restored graph does what the captured one did, seen by its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fer.cudagraph.restore import outputs_of
from fer.cudagraph.save import digests
from fer.errors import FerError

if TYPE_CHECKING:
    from fer.cudagraph.plan import Plan
    from fer.engines.graphs import DecodeGraphs

_CLOSE = 2e-2


def check(plan: Plan, graphs: DecodeGraphs, name: str, golden: Sequence[str] | None, device: str) -> str:
    """Why a graph may not be used, ``""`` where it may.

    Args:
        golden: digests of its outputs for this checkpoint; None where other weights were in place when it was saved,
            ``[]`` where two native runs differed. Both are compared with one eager step.
    """
    import torch

    assert plan.archive is not None
    size, graph = int(name.rpartition("/")[2]), plan.ready[name]
    try:
        outputs = outputs_of(plan.archive, name, device, plan.ranges)
        with torch.inference_mode():
            if golden:
                found = digests(graphs, size, graph.replay, outputs)
                return "" if found == list(golden) else "its outputs are not the recorded ones"
            graphs.fill(size, 0)
            eager = {key: value.clone() for key, value in graphs.step(size).items()}
            graphs.fill(size, 0)
            graph.replay()
            torch.cuda.synchronize()
            for key, value in outputs.items():
                if not torch.equal(value, eager[key]) and not (
                    value.is_floating_point() and torch.allclose(value.float(), eager[key].float(), _CLOSE, _CLOSE)
                ):
                    return f"its output {key} is not that of an eager step"
    except (FerError, RuntimeError, KeyError) as error:
        return f"its outputs could not be compared: {error}"
    return ""
