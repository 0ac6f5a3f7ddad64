"""State of the process that decides weights decides between hit and miss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fer
from fer.engines.module import ModuleEngine
from fer.engines.transformers import TransformersEngine
from fer.errors import OptionError
from tests.support import engine_models as models

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]
    precisions = [backend.fp32_precision for backend in backends]
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    for backend, precision in zip(backends, precisions, strict=True):  # which the older interface does not reset
        backend.fp32_precision = precision
    torch.use_deterministic_algorithms(False)


def build() -> nn.Module:
    return nn.Linear(4, 4)


def load(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 1.0)


CHANGES = {
    "default_dtype": lambda: torch.set_default_dtype(torch.bfloat16),
    "matmul_precision": lambda: torch.set_float32_matmul_precision("high"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
}


def test_the_default_type_is_a_named_miss() -> None:
    for dtype, path in ((torch.float32, "loaded"), (torch.bfloat16, "loaded"), (torch.bfloat16, "attached")):
        torch.set_default_dtype(dtype)
        engine = ModuleEngine(build, load)
        told = fer.recover(engine).stages["weights"]
        assert (told.path, next(engine.module.parameters()).dtype) == (path, dtype), told.why
        if path == "loaded" and dtype == torch.bfloat16:
            assert "settings.process.default_dtype" in told.why


@pytest.mark.parametrize("name", CHANGES)
def test_both_engines_tell_it_as_it_is_now(name: str, tmp_path: Path) -> None:
    change: Callable[[], object] = CHANGES[name]
    engines = [ModuleEngine(build, load), TransformersEngine(models.llama(tmp_path / "llama"))]
    before = [engine.identity().settings["process"] for engine in engines]
    change()
    after = [engine.identity().settings["process"] for engine in engines]
    assert before[0] == before[1] and after[0] == after[1]
    assert [key for key in before[0] if before[0][key] != after[0][key]] == [name]


@pytest.mark.parametrize("name", ["loader", "evaluate", "process"])
def test_a_setting_cannot_take_a_name_of_fers_own(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        ModuleEngine(build, load, settings={name: 1})
