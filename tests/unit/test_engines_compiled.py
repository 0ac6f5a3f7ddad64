"""TransformersEngine under torch.compile: the same tokens, two programs for all lengths, a walk that is not repeated.

Backends that compile no C++ stand for Inductor, which takes most of a minute for the CPU.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fer.engines import compiled
from fer.engines.transformers import TransformersEngine
from fer.errors import OptionError
from fer.kernels import coverage, gpus, markers
from tests.support import engine_models as models
from tests.support import kernel_entries as made

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.qwen3(tmp_path_factory.mktemp("model") / "qwen3", dtype="float32", num_hidden_layers=1)


def loaded(folder: Path, **arguments: Any) -> TransformersEngine:
    torch._dynamo.reset()
    engine = TransformersEngine(folder, max_length=64, **arguments)
    engine.adopt(engine.load())
    return engine


def programs() -> int:
    """Graphs that torch's compiler has made."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def test_the_same_tokens_and_no_program_for_each_length(folder: Path) -> None:
    plain = loaded(folder)
    engine = loaded(folder, compile="aot_eager")
    engine.warm_up()
    before = programs()
    assert before > 0
    for prompt in ([5, 6, 7], [9], list(range(3, 40)), list(range(3, 20))):
        assert engine.generate(prompt, 12) == plain.generate(prompt, 12)
    assert programs() == before  # everything was compiled in the warm-up
    steps = [engine.prefill([5, 6, 7]), *(engine.advance(token) for token in (8, 9))]
    alone = [plain.prefill([5, 6, 7]), *(plain.advance(token) for token in (8, 9))]
    assert all(torch.allclose(left, right, atol=1e-5) for left, right in zip(steps, alone, strict=True))


def test_an_engine_that_stands_by_walks_what_its_cache_holds(folder: Path) -> None:
    plain, engine = loaded(folder), loaded(folder, compile="eager")
    engine.park()
    engine.warm_up()
    engine.unpark()
    assert engine.generate(list(range(3, 40)), 12) == plain.generate(list(range(3, 40)), 12)


def test_mistakes_are_named(folder: Path) -> None:
    with pytest.raises(OptionError, match="aot_eager"):
        TransformersEngine(folder, compile="nosuch")
    with pytest.raises(OptionError, match="exclude each other"):
        TransformersEngine(folder, compile="eager", batch_sizes=(1, 2))


def test_the_walk_over_lengths_is_not_repeated(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "look", lambda: gpus.Seen(archs=(90,)))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    walked: list[int] = []
    engine = loaded(folder, compile="eager")
    prefill = engine.prefill

    def watched(ids: list[int]) -> torch.Tensor:
        walked.append(len(ids))
        return prefill(ids)

    monkeypatch.setattr(engine, "prefill", watched)

    def warm_up() -> str:
        walked.clear()
        return compiled.warm_up(engine, "eager", engine.max_length)

    assert "no kernels are kept" in warm_up()  # the stage is off
    monkeypatch.setenv(coverage.VARIABLE, str(tmp_path))
    assert "no completed walk" in warm_up()
    assert walked == list(compiled.lengths(64)) == [2, 4, 8, 16, 32]
    assert "left no kernels" in warm_up()
    kernel = made.make(tmp_path / "cache", "add")
    assert warm_up() and walked[-1] == 32
    assert warm_up() == "" and walked == [2]
    engine.max_length = 128
    assert "1 to 64, not for 1 to 128" in warm_up()
    shutil.rmtree(kernel)
    assert "kernels are missing" in warm_up()
    (left,) = markers.folder().iterdir()
    assert left.name.startswith("torch-compile-eager-")
