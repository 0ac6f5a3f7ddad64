"""Whether restored graphs do what the captured ones did, seen by their outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from fer.cudagraph.probe import CLOSE, NUMBERS, fill_pattern, judge, replay_probe
from fer.cudagraph.restore import outputs_of
from fer.engines.graphs import DEEP, SHALLOW
from fer.errors import FerError
from fer.memory.patience import lacks_memory

if TYPE_CHECKING:
    from fer.cudagraph.plan import Plan
    from fer.engines.graphs import DecodeGraphs

NO_MEMORY: Final = "there is no memory to compare its outputs"
"""Begins the reason against a graph of which nothing bad is known."""


def cheapest(plan: Plan, names: Sequence[str], count: int) -> list[str]:
    """So many graphs of which there is least to compare."""
    assert plan.archive is not None
    outputs = plan.archive.facts["outputs"]
    return sorted(names, key=lambda name: sum(math.prod(each["shape"]) for each in outputs[name].values()))[:count]


def reach(plan: Plan, names: Sequence[str], count: int) -> int:
    """How many of these graphs are ready, one after another, once the :func:`cheapest` of them are."""
    return max((1 + names.index(name) for name in cheapest(plan, names, count)), default=1)


def check(
    plan: Plan, graphs: DecodeGraphs, names: Sequence[str], golden: Mapping[str, Sequence[str]] | None, *, deep: bool
) -> dict[str, str]:
    """Why graphs may not be used, by name; those that may are not in it.

    Args:
        golden: digests of the probes for this checkpoint; None where other weights were in place when the graphs were
            saved, and graphs are compared with one eager step.
        deep: replay the deep probes too. The cache is filled for them, and zeros afterwards.
    """
    assert plan.archive is not None
    kv, wrong = plan.ranges.kv, dict[str, str]()
    if deep and golden and plan.archive.facts["kv"]["deep"]:
        try:
            fill_pattern(plan.cuda, kv.address, kv.mapped)
            for name in names:
                wrong |= _of(plan, graphs, name, DEEP, golden.get(name))
        finally:
            plan.cuda.call("synchronize")
            plan.cuda.call("fill", kv.address, 0, kv.mapped)
            plan.cuda.call("synchronize")
    for name in names:
        wrong |= _of(plan, graphs, name, SHALLOW, (golden or {}).get(name))
    return wrong


def _of(plan: Plan, graphs: DecodeGraphs, name: str, number: int, golden: Sequence[str] | None) -> dict[str, str]:
    assert plan.archive is not None
    size, graph = int(name.rpartition("/")[2]), plan.ready.graphs[name]
    try:
        outputs = outputs_of(plan.archive, name, f"cuda:{plan.device.ordinal}", plan.ranges)
        if golden:
            recorded = golden[NUMBERS.index(number)]
            replay = partial(replay_probe, graphs, size, number, graph.replay)
            why = judge(plan.archive, name, number, recorded, outputs, replay)
        else:
            unlike = str(number) in plan.archive.facts["unlike"].get(name, {})
            why = _beside_eager(graphs, size, number, graph, outputs, whole_numbers=not unlike)
    except (FerError, RuntimeError, KeyError) as error:
        why = f"{NO_MEMORY if lacks_memory(error) else 'its outputs could not be compared'}: {error}"
    return {name: why} if why else {}


def _beside_eager(
    graphs: DecodeGraphs, size: int, number: int, graph: Any, outputs: Mapping[str, Any], *, whole_numbers: bool
) -> str:
    """How a graph differs from one eager step; whole numbers are left out where native replays differ in them too."""
    import torch

    with torch.inference_mode():
        graphs.fill(size, number)
        eager = {key: value.clone() for key, value in graphs.step(size).items()}
        graphs.fill(size, number)
        graph.replay()
        torch.cuda.synchronize()
        for key, value in outputs.items():
            if value.is_floating_point():
                wanted = eager[key].float()
                same = bool((value.float() - wanted).abs().max() <= CLOSE * wanted.abs().max())
            else:
                same = not whole_numbers or torch.equal(value, eager[key])
            if not same:
                return f"its output {key} is not that of an eager step"
    return ""
