"""TransformersEngine standing by: next to no memory for its cache, and the same answers once it serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from fer.engines import cache
from fer.engines.transformers import TransformersEngine
from fer.errors import OutOfMemory
from fer.memory.base import Room
from fer.orchestrator import Recovered, recover_for_duty
from tests.support import engine_models, serve_models

PROMPT, COUNT = "Once upon a time", 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = engine_models.llama(tmp_path_factory.mktemp("standby") / "tiny", seed=3, eos_token_id=None)
    return serve_models.add_tokenizer(made)


@pytest.fixture(scope="module")
def answer(folder: Path) -> list[int]:
    engine = TransformersEngine(folder, max_length=128)
    engine.adopt(engine.load())
    engine.load_tokenizer()
    return engine.generate(PROMPT, COUNT)


def parked(folder: Path, sizes: tuple[int, ...] = ()) -> tuple[TransformersEngine, Recovered]:
    engine = TransformersEngine(folder, max_length=128, batch_sizes=sizes)
    recovered = recover_for_duty(engine, parked=True, mode="off")
    assert recovered.parked and _positions(engine) == cache.PARKED_LENGTH
    return engine, recovered


def _positions(engine: TransformersEngine) -> int:
    decode = engine.graphs()
    if decode is not None:
        assert decode.slots is not None
        return decode.slots.memory[0].shape[3]
    return int(engine._cache.get_max_length())


@pytest.mark.parametrize("sizes", [(), (1, 2)])
def test_an_engine_that_stood_by_answers_as_ever(folder: Path, answer: list[int], sizes: tuple[int, ...]) -> None:
    engine, recovered = parked(folder, sizes)
    for _ in range(2):
        parts = recovered.unpark()
        assert not recovered.parked and {*parts} == {"backing", "self_test"}
        assert _positions(engine) == 128
        assert engine.generate(PROMPT, COUNT) == answer
        assert recovered.park() and recovered.parked
        assert _positions(engine) == cache.PARKED_LENGTH


@pytest.mark.parametrize("sizes", [(), (1, 2)])
def test_one_without_memory_stays_parked_and_may_be_asked_again(
    folder: Path, answer: list[int], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, recovered = parked(folder, sizes)
    needed = engine._cache_bytes()
    with monkeypatch.context() as little:
        little.setattr(cache, "room_of", lambda device: Room(free=needed - 1, total=needed))
        with pytest.raises(OutOfMemory) as caught:
            recovered.unpark()
    assert caught.value.fields == {"needed": needed, "free": needed - 1}
    assert recovered.parked and _positions(engine) == cache.PARKED_LENGTH
    recovered.unpark()
    assert engine.generate(PROMPT, COUNT) == answer


def test_the_memory_that_is_asked_for_is_what_the_cache_takes(folder: Path) -> None:
    engine, recovered = parked(folder, (1, 2))
    recovered.unpark()
    decode = engine.graphs()
    assert decode is not None and decode.slots is not None
    assert engine._cache_bytes() == sum(memory.nbytes for memory in decode.slots.memory)


def test_an_engine_that_serves_from_the_start_can_be_parked(folder: Path, answer: list[int]) -> None:
    engine = TransformersEngine(folder, max_length=128)
    recovered = recover_for_duty(engine, parked=False, mode="off")
    assert not recovered.parked and engine.generate(PROMPT, COUNT) == answer
    recovered.unpark()
    assert recovered.park() and _positions(engine) == cache.PARKED_LENGTH
    recovered.unpark()
    assert engine.generate(PROMPT, COUNT) == answer
