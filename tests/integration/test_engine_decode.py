"""Decoding over slots: Transformers' own tokens, for rows of different lengths, with and without graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fer.engines import decode
from fer.engines.graphs import DEEP, SHALLOW
from fer.engines.transformers import TransformersEngine
from fer.errors import OptionError
from tests.support import engine_models as models

PROMPTS = [[1, 5, 9, 200, 31], [1, 7], [1, 44, 300, 2, 8, 90, 17, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.qwen3(tmp_path_factory.mktemp("decode") / "qwen3", dtype="float32")


def engine(folder: Path, **more: Any) -> TransformersEngine:
    made = TransformersEngine(folder, max_length=64, **more)
    made.adopt(made.load())
    return made


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_rows_of_different_lengths_answer_as_each_alone(folder: Path, attention: str) -> None:
    plain = engine(folder, attention=attention)
    expected = [plain.generate(prompt, 12) for prompt in PROMPTS]
    slots = engine(folder, attention=attention, batch_sizes=(2, 4))
    assert slots.generate_many(PROMPTS, 12) == expected
    assert [slots.generate(prompt, 12) for prompt in PROMPTS] == expected
    assert slots.generate_many(PROMPTS[1:], 12) == expected[1:]


class Recorded:
    """A graph in the pretended sense: it runs the step on all rows of its size."""

    def __init__(self, decode: Any, size: int) -> None:
        self.decode, self.size, self.replays = decode, size, 0
        self.outputs: dict[str, torch.Tensor] = {k: v.clone() for k, v in decode.step(size).items()}

    def replay(self) -> None:
        self.replays += 1
        for name, value in self.decode.step(self.size).items():
            self.outputs[name].copy_(value)

    def reset(self) -> None: ...

    def pool(self) -> None: ...


def test_a_batch_is_padded_to_the_smallest_graph_that_is_ready(folder: Path) -> None:
    expected = [engine(folder).generate(prompt, 8) for prompt in PROMPTS]
    slots = engine(folder, batch_sizes=(1, 2, 4, 8))
    decode = slots.graphs()
    assert decode is not None
    with torch.inference_mode():
        graphs = {size: Recorded(decode, size) for size in (2, 8)}
    for size, graph in graphs.items():
        decode.use(size, graph, graph.outputs)
    assert slots.generate_many(PROMPTS, 8) == expected
    assert (graphs[2].replays, graphs[8].replays) == (0, 7)
    assert slots.generate(PROMPTS[0], 8) == expected[0]
    assert graphs[2].replays == 7
    decode.use(2, None, None)
    assert slots.generate(PROMPTS[0], 8) == expected[0]
    assert (graphs[2].replays, graphs[8].replays) == (7, 14)


def test_the_cache_is_what_the_layout_says(folder: Path) -> None:
    made = engine(folder, batch_sizes=(4, 1))
    decode = made.graphs()
    assert decode is not None
    made.allocate_kv()
    assert decode.slots is not None
    shape = [len(decode.slots.memory), *decode.slots.memory[0].shape]
    assert decode.layout() == {"shape": shape, "dtype": "float32"}
    assert decode.kv_bytes() >= sum(memory.nbytes for memory in decode.slots.memory)
    assert decode.largest_kv_bytes() == decode.slots.memory[0].nbytes
    assert decode.pin(decode.layout())
    assert not decode.pin({**decode.layout(), "dtype": "bfloat16"})


def test_fixed_inputs_leave_the_cache_out_of_account(folder: Path) -> None:
    decode = engine(folder, batch_sizes=(4,)).graphs()
    assert decode is not None

    def outputs() -> Mapping[str, torch.Tensor]:
        with torch.inference_mode():
            decode.fill(4, SHALLOW)
            return {name: value.clone() for name, value in decode.step(4).items()}

    first = outputs()
    assert decode.slots is not None
    for memory in decode.slots.memory:
        with torch.inference_mode():
            memory.normal_()
    for name, value in outputs().items():
        assert torch.equal(value, first[name])


def probes(decode: Any, *, one_slab: bool) -> list[dict[str, torch.Tensor]]:
    """Outputs of all deep probes, then all shallow ones, over a cache with one pattern."""
    decode.allocate_kv()
    slots, found = decode.slots, []
    with torch.inference_mode():
        for layer, memory in zip(slots.layers, slots.memory, strict=True):
            if one_slab:  # as a process that proves graphs maps the cache: all layers are one memory
                layer.keys, layer.values = layer._kept = (slots.memory[0][0], slots.memory[0][1])
            memory.copy_(torch.arange(memory.numel()).reshape(memory.shape) * 37 % 101 / 101)
        decode.allocate()
        for number in (DEEP, SHALLOW):
            for size in decode.batch_sizes:
                decode.fill(size, number)
                found.append({name: value.clone() for name, value in decode.step(size).items()})
    return found


def test_probes_see_the_same_over_one_slab_as_over_a_whole_cache(folder: Path) -> None:
    decode = engine(folder, batch_sizes=(4, 1, 2)).graphs()
    assert decode is not None
    whole, slab = probes(decode, one_slab=False), probes(decode, one_slab=True)
    assert len(whole) == 6
    for one, other in zip(whole, slab, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(whole[0]["logits"], whole[3]["logits"])  # the deep ones do read the cache


def test_an_idle_engine_has_its_missing_graphs_captured(folder: Path) -> None:
    made, asked = engine(folder, batch_sizes=(1, 4)), []
    decode = made.graphs()
    assert decode is not None

    class Watching:
        captured, missing = False, True

        def capture_missing(self, most: int | None = None) -> None:
            asked.append("idle")

        def verify_owners(self) -> list[str]:
            return []

        def wait(self, timeout: float | None = None) -> bool:
            return True

        def wait_for(self, size: int, timeout: float) -> bool:
            return True

    decode.session = Watching()
    made.generate(PROMPTS[0], 3)
    made.generate_many(PROMPTS, 3)
    assert asked == ["idle", "idle"]


@pytest.mark.parametrize("by", ["self_test", "first_prompt", "first_step"])
def test_a_first_token_leaves_the_cache_as_it_was(folder: Path, by: str) -> None:
    made = engine(folder, batch_sizes=(1, 4))
    decode = made.graphs()
    assert decode is not None and not decode.prompted
    made.allocate_kv()
    assert decode.slots is not None
    for memory in decode.slots.memory:
        with torch.inference_mode():
            memory.copy_(torch.rand(memory.shape))
    before = [memory.clone() for memory in decode.slots.memory]
    made.self_test() if by == "self_test" else getattr(decode, by)(7)
    assert decode.prompted == (by == "first_prompt")
    for memory, held in zip(decode.slots.memory, before, strict=True):
        assert torch.equal(memory, held)


def test_a_step_at_the_beginning_makes_what_a_prompt_does(folder: Path) -> None:
    decode = engine(folder, batch_sizes=(1, 4)).graphs()
    assert decode is not None
    assert [decode.first_step(token) for token in (0, 7, 90)] == [decode.prompt(2, [token]) for token in (0, 7, 90)]


class Replayed:
    """A graph that notes how often it ran."""

    def __init__(self, token: list[int]) -> None:
        self.times, self.outputs = 0, {"token": torch.tensor(token)}

    def replay(self) -> None:
        self.times += 1

    def reset(self) -> None: ...

    def pool(self) -> None: ...


class Restoring:
    """A session whose graph for four rows is made while somebody waits for it, or never."""

    captured = missing = False

    def __init__(self, decode: Any, graph: Replayed | None) -> None:
        self.decode, self.graph, self.asked = decode, graph, list[int]()

    def wait_for(self, size: int, timeout: float) -> bool:
        self.asked.append(size)
        if self.graph is not None:
            self.decode.use(4, self.graph, self.graph.outputs)
        return self.graph is not None

    def wait(self, timeout: float | None = None) -> bool:
        return True

    def verify_owners(self) -> list[str]:
        return []

    def capture_missing(self, most: int | None = None) -> None: ...


@pytest.mark.parametrize("comes", [True, False])
def test_rows_wait_for_the_graph_of_their_number_and_not_for_ever(folder: Path, comes: bool) -> None:
    decode = engine(folder, batch_sizes=(8, 1, 4)).graphs()
    assert decode is not None
    for row in range(3):
        decode.prompt(row, [row])
    one, four, eight = Replayed([9]), Replayed([5, 6, 7, 8]), Replayed([1] * 8)
    decode.use(1, one, one.outputs)
    decode.use(8, eight, eight.outputs)
    decode.session = session = Restoring(decode, four if comes else None)
    assert decode.advance(1) == [9] and session.asked == []
    for _ in range(3):
        assert decode.advance(3) == ([5, 6, 7] if comes else [1, 1, 1])
    assert session.asked == [4], "once: it is there, or in trouble"


def test_what_cannot_be_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(OptionError, match="batch_sizes"):
        TransformersEngine(folder, batch_sizes=(1, 1))
    with pytest.raises(OptionError, match="4 prompts"):
        engine(folder, batch_sizes=(2,)).generate_many([[1]] * 4)
    with pytest.raises(OptionError, match="at once"):
        engine(folder).generate_many([[1]])


def test_a_model_with_windows_decodes_without_graphs(tmp_path: Path) -> None:
    path = models.qwen3(
        tmp_path / "windows", use_sliding_window=True, sliding_window=8, max_window_layers=1, dtype="float32"
    )
    made = engine(path, batch_sizes=(1,))
    assert made.graphs() is None
    assert len(made.generate([1, 5], 4)) <= 4


def test_rows_change_places_piece_by_piece(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = engine(folder, batch_sizes=(4,)).graphs()
    assert graphs is not None
    graphs.allocate_kv()
    assert graphs.slots is not None
    for memory in graphs.slots.memory:
        with torch.inference_mode():
            memory.copy_(torch.rand(memory.shape))
    before = [memory.clone() for memory in graphs.slots.memory]
    monkeypatch.setattr(decode, "_SWAPPED", before[0][:, 0].nbytes // 5)
    graphs.swap(1, 3)
    for memory, held in zip(graphs.slots.memory, before, strict=True):
        assert torch.equal(memory, held[:, [0, 3, 2, 1]])
