"""An engine that is to serve at once, and one that has waited for it: their start, up to the first token."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fer.engines.transformers import TransformersEngine
from fer.orchestrator import Imagined, Recovered, imagine, recover_for_duty
from fer.report import boottime_ns
from fer.standby import wire
from fer.standby.process import Command, Process, through
from fer.standby.router import Router, RouterLimits
from fer.standby.supervisor import Supervisor
from fer.standby.version import Version
from tests.integration.test_serve_engine import LIMIT_S, Serving, play
from tests.support import engine_models, serve_models
from tests.support.forked_engine import ForkedEngine
from tests.support.keeper import Keeper
from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(180)
IDS = [1, 5, 9, 20, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = engine_models.llama(tmp_path_factory.mktemp("at_once") / "tiny", seed=3, eos_token_id=None)
    return serve_models.add_words(made)


@pytest.fixture(scope="module")
def right(folder: Path) -> list[int]:
    """The answer of an engine without anything around it."""
    engine = TransformersEngine(folder, max_length=128, batch_sizes=(1, 2))
    engine.adopt(engine.load())
    return engine.generate(IDS, 20)


@pytest.fixture
def computed() -> Iterator[list[str]]:
    """The modules of whatever model computes in this process."""
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    yield seen
    hook.remove()


def engine_of(folder: Path, **more: Any) -> TransformersEngine:
    return TransformersEngine(folder, max_length=128, batch_sizes=(1, 2), keep_cache=True, device="cpu", **more)


def recovered(folder: Path, imagined: Imagined | None = None, **how: Any) -> tuple[TransformersEngine, Recovered]:
    engine = engine_of(folder)
    return engine, recover_for_duty(engine, parked=True, imagined=imagined, **how)


def test_its_first_token_is_its_promotions(folder: Path, keeper: Keeper, computed: list[str], right: list[int]) -> None:
    computed.clear()
    engine, made = recovered(folder, at_once=True)
    assert computed == [] and "server" not in made.report.to_json()["phase_s"]
    made.unpark()
    assert "LlamaForCausalLM" in computed
    assert engine.generate(IDS, 20) == right
    assert made.park() and made.parked
    computed.clear()
    made.settle()
    assert computed == [], "it has served: there is nothing left to warm up"
    made.unpark()
    assert engine.generate(IDS, 20) == right


def test_one_that_is_not_promoted_warms_up_and_waits(
    folder: Path, keeper: Keeper, computed: list[str], right: list[int]
) -> None:
    engine, made = recovered(folder, at_once=True)
    computed.clear()
    made.settle()
    assert "LlamaForCausalLM" in computed and made.parked
    computed.clear()
    made.settle()
    assert computed == []
    made.unpark()
    assert engine.generate(IDS, 20) == right


def test_one_that_stands_by_warms_up_in_its_start(folder: Path, keeper: Keeper, computed: list[str]) -> None:
    computed.clear()
    _, made = recovered(folder)
    assert "LlamaForCausalLM" in computed and made.parked
    computed.clear()
    made.settle()
    assert computed == []


def test_what_was_imagined_is_attached_to(
    folder: Path, keeper: Keeper, right: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recovered(folder)  # publishes
    engine = engine_of(folder)
    made = imagine(engine)
    waited = boottime_ns()

    def none(self: TransformersEngine) -> nn.Module:
        raise AssertionError("it was built already")

    with monkeypatch.context() as strict:
        strict.setattr(TransformersEngine, "build", none)
        start = recover_for_duty(engine, parked=True, at_once=True, imagined=made)
    assert start.report.stages["weights"].path == "attached"
    assert start.report._started >= waited, "the time that it has waited is no part of its start"
    start.unpark()
    assert engine.generate(IDS, 20) == right


def test_what_was_imagined_of_weights_that_nobody_keeps_does_no_harm(
    folder: Path, keeper: Keeper, right: list[int]
) -> None:
    every: list[dict[str, Any]] = [{"mode": "off"}, {"weights": False}, {}]
    for number, settings in enumerate(every):
        engine = engine_of(folder, revision=f"another {number}")
        start = recover_for_duty(engine, parked=True, at_once=True, imagined=imagine(engine), **settings)
        assert start.report.stages["weights"].path == ("off" if settings else "loaded")
        start.unpark()
        assert engine.generate(IDS, 20) == right


@pytest.mark.parametrize(("stale", "device"), [(False, "auto"), (True, "cpu")])
def test_a_spare_of_a_template_that_is_another_now_ends(
    folder: Path, runtime_dir: Path, tmp_path: Path, stale: bool, device: str
) -> None:
    file = tmp_path / "template.py"
    worker = ("--socket", str(runtime_dir / "w.sock"), "--model", str(folder), "--device", device)
    command = Command(
        arguments=("python", "-m", "tests.support.stale_worker", *worker, "--max-length", "128"),
        environment={**os.environ, "TEST_STALE": str(file)},
    )

    async def work() -> None:
        spawn: Any = ForkedEngine
        spare = await Process.start(command, spawn, None)
        while not (tmp_path / "imagined").exists():
            await asyncio.sleep(0.01)
        assert (tmp_path / "imagined").read_text() == "cpu", "its engine is made, also where no device was named"
        if stale:
            file.touch()
        spare.go(wire.SERVE)
        if stale:
            await spare.ended
            assert await spare.status() == 1
            assert f"this spare engine ends: {file} changed" in await spare.why()
        else:
            await spare.ready
            assert not spare.ended.done()
            spare.signal(signal.SIGKILL)
            await spare.ended
        await spare.close()

    play(work())


FORKED = """
import runpy, signal, sys
from pathlib import Path
from fer.standby import launcher
from fer.standby.launcher_imports import Imports
Imports().modules([])
before, file = {*sys.modules}, Path(sys.argv.pop(1))
def tell(number, frame):
    more = {name for name in {*sys.modules} - before if name.split(".")[0] == "fer"}
    file.with_suffix(".part").write_text(" ".join(sorted(more)))
    file.with_suffix(".part").rename(file)
signal.signal(signal.SIGUSR1, tell)
runpy.run_module("fer.standby.worker", run_name="__main__", alter_sys=True)
"""


def test_an_engine_that_a_launcher_forks_imports_nothing_more_of_fer(
    folder: Path, runtime_dir: Path, tmp_path: Path, keeper: Keeper
) -> None:
    recovered(folder)  # publishes
    file = tmp_path / "imported"

    def commands(path: Path) -> Sequence[Command]:
        worker = ["--socket", str(path), "--model", str(folder), "--device", "cpu", "--max-length", "128"]
        arguments = (sys.executable, "-c", FORKED, str(file), *worker, "--batch-sizes", "1,2")
        return [Command(arguments=arguments, folder=ROOT)]

    made = Serving(folder, runtime_dir, "retry")
    made.router = Router(RouterLimits(wait_s=LIMIT_S), "retry", lambda target: None)
    made.supervisor = Supervisor(
        Version(online=commands), runtime_dir, through("off"), made.router, service=f"imports-{os.getpid()}"
    )

    async def work() -> None:
        async with made.running():
            ids, _ = await made.answer("w5 w7", 20)
            os.kill(made.supervisor.status()["pid"], signal.SIGUSR1)
            while not file.exists():
                await asyncio.sleep(0.01)
            assert made.path() == "attached" and len(ids) == 20
            assert file.read_text().split() == []

    play(work())
