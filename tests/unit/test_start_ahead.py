"""What a start begins before it is needed: the device in the background, the empty module beside it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from fer import orchestrator, stages
from fer.cudagraph import ahead as archives_ahead
from fer.errors import DriverError, UnsupportedQuantization
from fer.kernels import gpus
from fer.kernels.session import Session
from fer.kernels.stage import KernelsStage
from fer.memory import open as opening
from fer.options import Options
from fer.orchestrator import imagine
from fer.report import Report
from fer.stages import Start, Wide
from fer.weights import edition
from fer.weights import stage as weights
from fer.weights.edition import Workshop
from fer.weights.stage import WeightsStage


class Engine:
    """As much of one as is asked before its weights are."""

    def __init__(self, device: str = "cuda:1", *, alone: bool = True, quantization: str = "", fault: bool = False):
        self.device, self._alone, self._quantization, self._fault = device, alone, quantization, fault
        self.built: list[nn.Module] = []
        self.asked: list[str] = []

    def alone(self) -> bool:
        return self._alone

    def import_code(self) -> None:
        self.asked.append("code")

    def graphs(self) -> object:
        return self

    def identity(self) -> Any:
        self.asked.append("identity")
        quantization = {"quantization": self._quantization, "quantization_config": {}}
        return SimpleNamespace(engine="e", model="m", **quantization)

    def build(self) -> nn.Module:
        if self._fault:
            raise ValueError("no such layer")
        self.built.append(nn.Linear(2, 2))
        return self.built[-1]


def start(engine: Engine, **settings: Any) -> Start:
    made: Any = engine
    return Start(engine=made, options=Options.load(**settings), report=Report(), parked=False)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What was opened, and whether in the background; no driver is here, as every call is told."""
    calls: list[tuple[str, ...]] = []

    def now(device: str, transport: str = "auto") -> None:
        calls.append(("now", device, transport))
        raise DriverError("there is no driver")

    monkeypatch.setattr(weights, "open_ahead", lambda device, transport: calls.append(("ahead", device, transport)))
    monkeypatch.setattr(weights, "open_backend", now)
    return calls


@pytest.mark.parametrize(
    ("device", "settings", "world", "opens"),
    [
        ("cuda:1", {"transport": "vmm"}, "1", True),
        ("cuda:1", {}, "2", True),
        ("cuda", {}, "1", True),
        ("cuda", {}, "2", False),
        ("cpu", {}, "1", False),
        ("cuda:1", {"mode": "off"}, "1", False),
        ("cuda:1", {"weights": False}, "1", False),
    ],
)
def test_a_device_is_opened_early_where_it_is_known_and_wanted(
    opened: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    settings: dict[str, Any],
    world: str,
    opens: bool,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    stage, engine = WeightsStage(), Engine(device, alone=False)
    transport = settings.get("transport", "auto")
    stage.begin(start(engine, **settings))
    assert opened == [("ahead", device, transport)] * opens
    stage.prepare(start(engine, **settings))  # what goes wrong is told when it is opened for use
    assert opened[1:] == [("now", device, transport)] * opens
    stage.ahead(start(engine, **settings))
    assert not engine.built, "ranks are not told apart yet"


def test_nobody_waits_for_the_device_of_an_engine_without_process_groups(opened: list[tuple[str, ...]]) -> None:
    stage, engine = WeightsStage(), Engine()
    begun = start(engine)
    stage.begin(begun)
    stage.prepare(begun)
    assert opened == [("ahead", "cuda:1", "auto")]
    stage.ahead(begun)
    stage.ahead(begun)
    assert len(engine.built) == 1 and stage._skeleton is engine.built[0]
    assert engine.built[0].weight.device.type == "meta"
    assert {"identity", "skeleton"} <= {step["name"] for step in begun.report.to_json()["steps"]}


def test_what_is_wrong_with_a_module_is_told_when_it_is_built_for_use(opened: list[tuple[str, ...]]) -> None:
    stage, engine = WeightsStage(), Engine(fault=True)
    stage.imagine(engine)  # type: ignore[arg-type]
    stage.ahead(start(engine))
    assert stage._skeleton is None


def test_weights_that_cannot_be_kept_are_refused_before_anything_is_built(opened: list[tuple[str, ...]]) -> None:
    engine = Engine(quantization="gguf-of-mine")
    with pytest.raises(UnsupportedQuantization):
        WeightsStage().ahead(start(engine))
    assert not engine.built


def test_what_was_imagined_is_bound_once(opened: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    stage, engine = WeightsStage(), Engine("cpu")
    stage.imagine(engine)  # type: ignore[arg-type]
    begun = start(engine)
    stage.begin(begun)
    stage.ahead(begun)
    assert opened == [] and len(engine.built) == 1
    monkeypatch.setattr(edition, "open_backend", opening.open_backend)
    workshop = Workshop(begun.engine, begun.options, begun.report, stage._skeleton)
    assert workshop._skeleton() is engine.built[0]
    assert workshop._skeleton() is engine.built[1], "one that was bound in vain is bound no further"


def test_a_process_that_waits_imagines_what_needs_no_device(
    opened: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = Engine()
    monkeypatch.setattr(archives_ahead, "read", lambda of, home: engine.asked.append(f"archives in {home.name}"))
    monkeypatch.setattr(gpus, "look", lambda: engine.asked.append("GPUs"))
    stage = imagine(engine).weights
    assert engine.asked == ["code", "identity", "archives in fer-home", "GPUs"]
    assert isinstance(stage, WeightsStage) and opened == []
    assert stage._skeleton is engine.built[0]
    unknown = imagine(None).weights
    assert isinstance(unknown, WeightsStage) and unknown._skeleton is None


class Named(Wide):
    """Keeps what it was asked to do."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self._asked = name, asked

    def prepare(self, start: Start) -> None:
        self._asked.append(f"{self.name} prepare")

    def ahead(self, start: Start) -> None:
        self._asked.append(f"{self.name} ahead")

    def run(self, start: Start) -> None:
        self._asked.append(f"{self.name} run")


def test_who_records_graphs_is_there_before_kernels_are_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    weights_stage, kernels, graphs = (Named(name, asked) for name in ("weights", "kernels", "graphs"))
    monkeypatch.setattr(stages, "before_weights", lambda: [kernels])
    made: Any = SimpleNamespace(init_distributed=lambda: None)
    begun = Start(engine=made, options=Options.load(), report=Report(), parked=False)
    assert orchestrator._load_weights(begun, weights_stage, graphs, tokenizer=False) == [kernels]
    in_turn = ["graphs prepare", "kernels ahead", "weights run"]  # torch loads modules of its own for the second
    assert asked == ["weights prepare", "kernels run", "weights ahead", *in_turn]


def test_without_a_thread_kernels_are_prepared_by_their_first_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stage, made = KernelsStage(), Session()
    made._wanted = [("module:function", "{}")]
    stage._session = made
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setattr(threading.Thread, "start", none)
    any_start: Any = None
    stage.ahead(any_start)
    assert "can't start new thread" in made._why[0] and "not prepared" in caplog.text


# --- in the background ---


def joined(work: Callable[[], None]) -> None:
    """Run it, and wait for the thread that it started."""
    before = {*threading.enumerate()}
    work()
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
        assert not thread.is_alive()


def test_a_device_that_cannot_be_opened_fails_nobody_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def failing(device: str, transport: str) -> None:
        seen.extend([device, transport, threading.current_thread() is not threading.main_thread()])
        raise DriverError("there is no driver")

    monkeypatch.setattr(opening, "open_backend", failing)
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_value))
    joined(lambda: opening.open_ahead("cuda:3", "vmm"))
    assert seen == ["cuda:3", "vmm", True]


@pytest.mark.parametrize(("device", "opens"), [("cuda", "cuda:2"), ("cuda:1", "cuda:1")])
def test_what_is_current_is_what_the_caller_has_chosen(
    monkeypatch: pytest.MonkeyPatch, device: str, opens: str
) -> None:
    main, seen = threading.current_thread(), list[str]()
    monkeypatch.setattr("fer.memory.device.current_ordinal", lambda: 2 if threading.current_thread() is main else 0)
    monkeypatch.setattr(opening, "open_backend", lambda device, transport: seen.append(device))
    joined(lambda: opening.open_ahead(device))
    assert seen == [opens]


def test_without_a_thread_the_device_is_opened_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    opening.open_ahead("cuda:0")
