"""ModuleEngine sees the module-level values and local code that builder and loader read, and refuses what it cannot."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import fer
from fer.engines.module import ModuleEngine
from fer.errors import UsageError
from tests.support.processes import WAIT_S, Children

Make = Callable[..., ModuleType]

CODE = """
import argparse, functools, logging, re, sys, threading, typing
from dataclasses import dataclass
import torch
from torch import nn
import {own}_constants as constants
from {own}_constants import helper

log = logging.getLogger("own")
lock = threading.Lock()
T = typing.TypeVar("T")
Alias = typing.Callable[[int], int] | None
NAME = re.compile("weight|bias")
ARGUMENTS = argparse.Namespace(width=4)
SCALE = 1.0
SHIFT = 0.0
KINDS = {{"linear": nn.Linear}}
UNUSED = object()

@dataclass
class Plan:
    width: int = 4

class Model(nn.Module):
    factor = 1.0
    def __init__(self):
        super().__init__()
        self.linear = KINDS["linear"](ARGUMENTS.width, Plan().width)
        self.shift = self.made()
    def made(self):
        return SHIFT
    def forward(self, x):
        return self.linear(x)

def build():
    log.info("built")
    return Model()

@torch.no_grad()
def fill(module, by=2.0):
    with lock:
        for name, parameter in module.named_parameters():
            if NAME.search(name):
                parameter.fill_(by * SCALE * constants.FACTOR * module.factor * helper())

def load(module):
    return [fill(m) for m in (module,)] and None
"""
CONSTANTS = """
FACTOR = 1.0
OTHER = 1.0
INNER = 1.0
def helper():
    return INNER
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Imports a local module of this code, and another that it reads, both afresh."""
    made: list[str] = []
    monkeypatch.syspath_prepend(tmp_path)

    def make(code: str = CODE) -> ModuleType:
        name = f"own_{tmp_path.name}_{len(made)}"
        made.extend((name, f"{name}_constants"))
        (tmp_path / f"{name}.py").write_text(code.format(own=name))
        (tmp_path / f"{name}_constants.py").write_text(CONSTANTS)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


def settings(module: Any, **arguments: Any) -> dict[str, Any]:
    return dict(ModuleEngine(module.build, module.load, **arguments).identity().settings)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("SCALE", "fill.SCALE"),
        ("SHIFT", "Model.made.SHIFT"),
        ("constants.FACTOR", "fill.constants.FACTOR"),
        ("constants.INNER", "helper.INNER"),
        ("Model.factor", "Model.factor"),
        ("Plan.width", "Plan.width"),
        ("ARGUMENTS.width", "Model.__init__.ARGUMENTS"),
        ("KINDS", "Model.__init__.KINDS"),
    ],
)
def test_what_is_read_by_name_is_part_of_the_identity(own: Make, name: str, where: str) -> None:
    module = own()
    before = settings(module)
    owner: Any = module
    for part in name.split(".")[:-1]:
        owner = getattr(owner, part)
    setattr(owner, name.split(".")[-1], {"linear": torch.nn.Bilinear} if name == "KINDS" else 2.0)
    after = settings(module)
    changed = {key for key in before | after if before.get(key) != after.get(key)}
    assert changed
    assert all(key.endswith(where) for key in changed), changed


def test_defaults_count_and_what_nobody_reads_does_not(own: Make) -> None:
    module: Any = own()
    before = settings(module)
    module.UNUSED, module.constants.OTHER = object(), 2.0
    assert settings(module) == before
    module.fill.__wrapped__.__defaults__ = (3.0,)
    changed = {key for key, value in settings(module).items() if before[key] != value}
    assert [key.rpartition(":")[2] for key in changed] == ["fill.by="]


def test_files_of_local_code_are_sources(own: Make, tmp_path: Path) -> None:
    module: Any = own()
    sources = ModuleEngine(module.build, module.load).identity().sources
    ours = {path for path in sources if path.parent == tmp_path.resolve()}
    assert ours == {Path(str(m.__file__)).resolve() for m in (module, module.constants)}
    assert not any(Path(fer.__file__).resolve().parent in path.parents for path in sources)


@pytest.mark.parametrize("value", [object(), torch.ones(2), [object()]], ids=["object", "tensor", "list"])
def test_module_values_that_cannot_be_compared_are_refused_by_name(own: Make, value: object) -> None:
    module: Any = own()
    module.SCALE = value
    with pytest.raises(UsageError, match="'SCALE'"):
        ModuleEngine(module.build, module.load)
    assert settings(module, settings={"scale": 3})["scale"] == 3


RECOVER = """
import json, sys
import torch
from torch import nn
import fer
from fer.engines.module import ModuleEngine
SCALE = float(sys.argv[1])
def build():
    return nn.Linear(4, 4)
def load(module):
    for parameter in module.parameters():
        nn.init.constant_(parameter, SCALE)
engine = ModuleEngine(build, load)
told = fer.recover(engine).stages["weights"]
print(json.dumps([told.path, told.why, engine.module.weight[0, 0].item()]))
"""


@pytest.mark.timeout(180)
def test_a_value_of_the_command_line_is_a_named_miss(children: Children, tmp_path: Path) -> None:

    script = tmp_path / "engine.py"
    script.write_text(RECOVER)
    rows = []
    for value in ("1", "2", "2"):
        child = children.spawn([sys.executable, script, value])
        out, err = child.communicate(timeout=3 * WAIT_S)
        assert child.returncode == 0, err
        rows.append(json.loads(out.splitlines()[-1]))
    assert [(path, weight) for path, _, weight in rows] == [("loaded", 1.0), ("loaded", 2.0), ("attached", 2.0)]
    assert "SCALE" in rows[1][1]
