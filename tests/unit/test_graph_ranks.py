"""Graphs of several ranks: all keep one, or none; and a step that one rank could not take ends all of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fer.cudagraph import capture as capturing
from fer.engines.base import EngineIdentity, Ranks
from fer.errors import OutOfMemory, PeerRankFailed
from fer.options import Options
from fer.report import Report
from fer.stages import Start
from tests.support.cudagraph_engine import ToyEngine
from tests.support.cudagraph_stage import Bench


class Steps:
    """An engine's step, which fails as asked."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.error = error
        self.votes: list[bool] = []

    def step(self, size: int) -> dict[str, torch.Tensor]:
        if self.error is not None:
            raise self.error
        return {}


def warm_up(steps: Steps, *, others: bool = True) -> list[bool]:
    """One warm-up step of a rank whose peers vote so; fills in ``steps`` what this one votes."""
    graphs: Any = steps

    def agree(flag: bool) -> bool:
        steps.votes.append(flag)
        return flag and others

    capturing._warm_up(graphs, 4, agree)
    return steps.votes


def test_every_warm_up_step_is_voted_on() -> None:
    assert warm_up(Steps()) == [True]


def test_a_rank_that_lacks_memory_says_so_before_it_ends() -> None:
    steps = Steps(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(OutOfMemory, match="a step of 4 rows") as caught:
        warm_up(steps)
    assert steps.votes == [False] and "CUDA out of memory" in caught.value.why


def test_any_other_error_of_a_step_is_told_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="misaligned"):
        warm_up(Steps(RuntimeError("misaligned address")))


def test_the_others_learn_of_it_by_name() -> None:
    with pytest.raises(PeerRankFailed, match="another rank of this launch failed in a step of 4 rows"):
        warm_up(Steps(), others=False)


class Half(ToyEngine):
    """One of two ranks."""

    def identity(self) -> EngineIdentity:
        return dataclasses.replace(super().identity(), ranks=Ranks(tp_size=2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_took_a_step_apart_capture_nothing_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
) -> None:
    bench = Bench(monkeypatch, tmp_path)
    bench.plan.recorder = SimpleNamespace(seen=None, close=lambda: None)  # type: ignore[assignment]
    engine = ToyEngine(graphs=bench.graphs) if ranks == 1 else Half(graphs=bench.graphs)
    bench.start = Start(engine=engine, options=Options(), report=Report())

    def capture(graphs: Any, sizes: Any, ranges: Any, *, keep: bool, agree: Any) -> Any:
        assert (agree is None) == (ranks == 1)
        if ranges is not None:
            raise OutOfMemory("a step needs more memory than this rank has")
        return bench.capture(graphs, sizes, ranges, keep=keep)

    monkeypatch.setattr("fer.cudagraph.capture.capture", capture)
    if ranks == 1:
        assert "not saved" in bench.run().why and bench.captures, "alone it captures elsewhere"
        return
    with pytest.raises(OutOfMemory):
        bench.run()
    assert not bench.captures


def test_ranks_take_steps_of_one_width_whichever_graphs_each_has() -> None:
    from fer.engines.decode import TransformersGraphs

    config = SimpleNamespace(
        num_hidden_layers=1, num_key_value_heads=2, num_attention_heads=2, head_dim=8, vocab_size=16
    )
    sizes, kind = (1, 2, 8), torch.float32
    alone = TransformersGraphs(config, batch_sizes=sizes, length=8, dtype=kind, device="cuda:0")
    assert [alone.step_size(active) for active in (1, 3)] == [1, 3], "it has no graphs, and pads to none"
    graph: Any = "a graph"
    alone.use(8, graph, {})
    assert alone.step_size(3) == 8
    for graphs in ((), (8,), (1, 2, 8)):
        rank = TransformersGraphs(config, batch_sizes=sizes, length=8, dtype=kind, device="cuda:0", world=2)
        for size in graphs:
            rank.use(size, graph, {})
        assert [rank.step_size(active) for active in (1, 2, 3)] == [1, 2, 8]
