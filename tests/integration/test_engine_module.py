"""ModuleEngine: what it builds, loads and says about itself."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fer.engines import callables
from fer.engines.base import Ranks
from fer.engines.conformance_worker import plain
from fer.engines.module import ModuleEngine
from fer.errors import FerBug, UnsupportedQuantization, UsageError
from tests.support import engine_cases as cases
from tests.support.processes import ROOT, WAIT_S


def build(width: int = 4) -> nn.Module:
    return nn.Linear(width, width)


def load(module: nn.Module, value: float = 1.0) -> None:
    assert isinstance(module, nn.Linear)
    nn.init.constant_(module.weight, value)


def another(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.ReLU())


@dataclass(frozen=True)
class Plan:
    width: int
    dtype: torch.dtype = torch.float32

    def build(self) -> nn.Module:
        return nn.Linear(self.width, self.width, dtype=self.dtype)


def settings(engine: ModuleEngine) -> dict[str, Any]:
    return dict(engine.identity().settings)


def test_builds_on_meta_and_loads_on_the_device() -> None:
    engine = ModuleEngine(build, load)
    skeleton, module = engine.build(), engine.load()
    assert {tensor.device.type for tensor in skeleton.state_dict().values()} == {"meta"}
    assert not skeleton.training and not module.training
    assert isinstance(module, nn.Linear) and module.weight.eq(1).all()
    with pytest.raises(FerBug):
        _ = engine.module
    engine.adopt(module)
    assert engine.module is module


def test_a_loader_may_return_another_module() -> None:
    assert isinstance(ModuleEngine(build, another).load(), nn.Sequential)


def test_phases_call_what_they_were_given() -> None:
    called: list[tuple[str, nn.Module]] = []
    engine = ModuleEngine(
        build, load, kv=lambda module: called.append(("kv", module)), first_token=lambda m: called.append(("token", m))
    )
    engine.adopt(engine.load())
    engine.allocate_kv()
    engine.first_token()
    assert called == [("kv", engine.module), ("token", engine.module)]


def test_sources_and_bound_values_are_part_of_the_identity(tmp_path: Path) -> None:
    here = Path(__file__).resolve()
    engine = ModuleEngine(functools.partial(build, 8), functools.partial(load, value=2.0), sources=[tmp_path])
    assert {here, tmp_path} == set(engine.identity().sources)
    other = ModuleEngine(functools.partial(build, 16), functools.partial(load, value=2.0))
    assert settings(engine) != settings(other)
    width = 8

    def closed() -> nn.Module:
        return build(width)

    assert 8 in settings(ModuleEngine(closed, load)).values()
    bound = ModuleEngine(Plan(8, torch.float64).build, load)
    assert {"torch.dtype": "torch.float64"} in settings(bound).values() and 8 in settings(bound).values()
    assert callables.name(Plan(8).build).endswith(":Plan.build")


def test_sources_of_bound_callables_are_followed() -> None:
    def wrap(inner: Any) -> Any:
        def outer() -> nn.Module:
            module: nn.Module = inner()
            return module

        return outer

    engine = ModuleEngine(wrap(functools.partial(cases.build_awkward, 8)), load)
    assert Path(cases.__file__).resolve() in engine.identity().sources


def test_values_that_cannot_be_compared_are_refused_by_name() -> None:
    token = object()

    def load_with(module: nn.Module) -> None:
        assert token

    with pytest.raises(UsageError, match="'token'"):
        ModuleEngine(build, load_with)
    assert ModuleEngine(build, load_with, settings={"version": 3}).identity().settings["version"] == 3


def test_code_without_a_file_is_refused() -> None:
    namespace: dict[str, Any] = {}
    exec("def made(module): pass", namespace)
    with pytest.raises(UsageError, match="source file"):
        ModuleEngine(build, namespace["made"])


def test_unsupported_quantisation_is_refused_before_any_work() -> None:
    engine = ModuleEngine(build, load, quantization="awq", quantization_config={"bits": 4})
    for call in (engine.identity, engine.load):
        with pytest.raises(UnsupportedQuantization, match="awq"):
            call()


def test_identity_is_the_same_in_another_process(tmp_path: Path) -> None:
    path = str(cases.write_awkward(tmp_path / "weights.safetensors"))
    mine = cases.awkward(path).identity()
    code = (
        "import json; from tests.support import engine_cases as c; from fer.engines.conformance_worker import plain; "
        f"i = c.awkward({path!r}).identity(); print(json.dumps([plain(i), i.ranks.launch]))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=3 * WAIT_S, check=True
    )
    theirs, launch = json.loads(child.stdout)
    assert theirs == plain(mine)
    assert launch != mine.ranks.launch, "two starts are two launches"


def test_a_launch_of_one_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ModuleEngine(build, load)
    engine.init_distributed()
    assert not torch.distributed.is_initialized()
    assert engine.agree(True) and not engine.agree(False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="init_distributed"):
        ModuleEngine(build, load).identity()


def test_the_estimate_is_the_checkpoints_share_unless_said(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(1001))
    engine = ModuleEngine(build, load, checkpoint=[file])
    assert engine.estimated_bytes() == 1001
    for ranks, share in ((Ranks(tp_size=2, pp_size=2), 251), (Ranks(ep_size=4), 251), (Ranks(dp_size=4), 1001)):
        engine._ranks = ranks
        assert engine.estimated_bytes() == share
    assert ModuleEngine(build, load, checkpoint=[file], estimated_bytes=77).estimated_bytes() == 77
