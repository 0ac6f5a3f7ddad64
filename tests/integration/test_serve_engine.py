"""TransformersEngine behind the supervisor: answers that outlive engines and keepers are the engine's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from fer.engines.transformers import TransformersEngine
from fer.standby import wire
from fer.standby.model import TransformersModel
from fer.standby.outage import Outage
from fer.standby.process import Command
from fer.standby.router import Resume, Router, RouterLimits
from fer.standby.scheduler import Job, OneRow, Scheduler, SlotRows
from fer.standby.supervisor import Supervisor
from fer.standby.text import TextStream
from fer.standby.version import Version
from fer.weights.client import KeeperClient
from tests.support import engine_models, serve_models
from tests.support.forked_engine import ForkedEngine
from tests.support.processes import kill_and_wait

pytestmark = pytest.mark.timeout(180)
PROMPT, COUNT = "Once upon a time", 60
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = engine_models.llama(tmp_path_factory.mktemp("serve") / "tiny", seed=3, eos_token_id=None)
    return serve_models.add_tokenizer(made)


@pytest.fixture(scope="module")
def alone(folder: Path) -> TransformersEngine:
    """The engine without a server around it."""
    engine = TransformersEngine(folder, max_length=128)
    engine.adopt(engine.load())
    engine.load_tokenizer()
    return engine


class Serving:
    """Supervisor and router in this process, engines in others."""

    def __init__(self, folder: Path, sockets: Path, resume: Resume, *more: str) -> None:
        def commands(path: Path) -> Sequence[Command]:
            arguments = ["python", "-m", "fer.standby.worker", "--socket", str(path), "--model", str(folder)]
            return [Command(arguments=(*arguments, "--device", "cpu", "--max-length", "128", *more))]

        self.outages: list[Outage] = []
        self.router = Router(RouterLimits(wait_s=LIMIT_S), resume, lambda target: None)
        spawn: Any = ForkedEngine
        self.supervisor = Supervisor(Version(online=commands), sockets, spawn, self.router, outages=self.outages.append)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Serving]:
        task = asyncio.create_task(self.supervisor.run())
        try:
            yield self
        finally:
            self.supervisor.stop()
            await task

    async def answer(
        self, prompt: str, count: int, disturb: Callable[[int], Coroutine[Any, Any, None]] | None = None
    ) -> tuple[list[int], str]:
        """Tokens and text; ``disturb`` is called with the number of each piece."""
        ids: list[int] = []
        text = ""
        async for event in self.router.answer(wire.Generate(prompt=prompt, max_tokens=count)):
            if isinstance(event, wire.Piece):
                ids, text = ids + event.ids, text + event.text
                if disturb is not None:
                    await disturb(len(ids))
        return ids, text

    def kill(self) -> None:
        os.kill(self.supervisor.status()["pid"], signal.SIGKILL)

    def path(self) -> str:
        recovery = self.supervisor.status()["members"][0]["recovery"]
        return str(recovery["stages"]["weights"]["path"])


def play(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * LIMIT_S):
            await work

    asyncio.run(bounded())


@pytest.mark.parametrize("resume", ["retry", "prefill"])
def test_a_stream_outlives_engine_and_keeper(
    folder: Path, alone: TransformersEngine, runtime_dir: Path, resume: Resume
) -> None:
    serving = Serving(folder, runtime_dir, resume, "--batch-sizes", "1,2")

    async def disturb(number: int) -> None:
        if number == 10:
            serving.kill()
        if number == 20:
            with KeeperClient.connect(label="test") as client:
                kill_and_wait(client.status().pid)
        if number == 30:
            serving.kill()  # the next one asks the keeper's successor

    async def work() -> None:
        async with serving.running():
            ids = alone.generate(PROMPT, COUNT)
            assert (await serving.answer(PROMPT, COUNT, disturb)) == (ids, alone.tokenizer.decode(ids))
            assert serving.path() == "attached"
            assert len(serving.outages) == 2 and all(outage.token for outage in serving.outages)
            assert serving.router.resumed == 2

    play(work())
    assert not list(runtime_dir.glob("engine-*"))


def decoded(model: TransformersModel, prompts: dict[str, int]) -> dict[str, list[int]]:
    """The answers to prompts that are all asked at once, with so many tokens each."""
    found: dict[str, list[int]] = {prompt: [] for prompt in prompts}
    jobs = {Job(model.encode(prompt), count, TextStream(model.decode)): prompt for prompt, count in prompts.items()}
    left = set(jobs)

    def deliver(events: list[tuple[Job, list[wire.Event]]]) -> None:
        for job, made in events:
            for event in made:
                if isinstance(event, wire.Piece):
                    found[jobs[job]] += event.ids
            if isinstance(made[-1], wire.Ended):
                left.discard(job)
        if not left:
            scheduler.stop()

    scheduler = Scheduler(model.rows, model.ends, deliver)
    for job in jobs:
        scheduler.submit(job)
    scheduler.run()
    return found


def test_answers_share_slots_that_move(folder: Path, alone: TransformersEngine) -> None:
    slots = TransformersEngine(folder, max_length=128, batch_sizes=(1, 2, 4))
    slots.adopt(slots.load())
    slots.load_tokenizer()
    model, single = TransformersModel(slots), TransformersModel(alone)
    assert isinstance(model.rows, SlotRows) and isinstance(single.rows, OneRow)
    prompts = {f"prompt {number}": 1 + (number * 17) % 40 for number in range(9)}
    expected = {prompt: alone.generate(prompt, count) for prompt, count in prompts.items()}
    assert decoded(model, prompts) == decoded(single, prompts) == expected
