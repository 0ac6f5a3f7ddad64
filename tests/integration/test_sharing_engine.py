"""One card shared, with TransformersEngine: batch and online on the same weights, updates from edition to edition."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fer.engines.transformers import TransformersEngine
from fer.errors import FerError
from fer.standby import wire
from fer.standby.life import SupervisorLimits
from fer.standby.process import Command
from fer.standby.router import Router, RouterLimits
from fer.standby.supervisor import Supervisor
from fer.standby.version import Commands, Version
from fer.weights.client import EditionInfo, KeeperClient
from tests.integration.test_serve_engine import COUNT, LIMIT_S, PROMPT, play
from tests.support import engine_models, serve_models
from tests.support.forked_engine import ForkedEngine

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that differ in their weights only."""
    base = tmp_path_factory.mktemp("sharing")
    return [
        serve_models.add_tokenizer(engine_models.llama(base / f"seed{seed}", seed=seed, eos_token_id=None))
        for seed in (3, 4)
    ]


@pytest.fixture(scope="module")
def answers(models: list[Path]) -> list[list[int]]:
    """What each of them answers."""
    found = []
    for folder in models:
        engine = TransformersEngine(folder, max_length=128)
        engine.adopt(engine.load())
        engine.load_tokenizer()
        found.append(engine.generate(PROMPT, COUNT))
    assert found[0] != found[1]
    return found


class Sharing:
    """A service with a batch engine, in this process; engines in others."""

    def __init__(self, model: Path, sockets: Path, *, max_length: int = 128) -> None:
        self._length, self._number = max_length, 0
        self.online = Router(RouterLimits(wait_s=LIMIT_S), "retry", lambda target: None)
        self.batch = Router(RouterLimits(wait_s=LIMIT_S), "retry", lambda target: None)
        spawn: Any = ForkedEngine
        self.supervisor = Supervisor(
            self.version(model),
            sockets,
            spawn,
            self.online,
            batch=self.batch,
            limits=SupervisorLimits(settle_s=0.2),
        )

    def version(self, model: Path) -> Version:
        self._number += 1
        return Version(
            model=model,
            number=self._number,
            online=self._commands(model, "--max-length", str(self._length)),
            batch=self._commands(model, "--max-length", "96"),
        )

    @staticmethod
    def _commands(model: Path, *more: str) -> Commands:
        def commands(path: Path) -> Sequence[Command]:
            arguments = ["python", "-m", "fer.standby.worker", "--socket", str(path), "--model", str(model)]
            return [Command(arguments=(*arguments, "--device", "cpu", *more))]

        return commands

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Sharing]:
        task = asyncio.create_task(self.supervisor.run())
        try:
            yield self
        finally:
            self.supervisor.stop()
            await task

    async def batch_answers(self) -> int:
        """Wait until the batch engine answers; its pid."""
        assert self.supervisor.batch is not None
        member = self.supervisor.batch.member
        await member.until(lambda: member.role == "batch")
        assert member.group is not None
        return member.group.first.pid


async def ask(router: Router, *, kill: int = 0) -> list[int]:
    """The tokens of an answer; in its middle a process is killed."""
    ids: list[int] = []
    async for event in router.answer(wire.Generate(prompt=PROMPT, max_tokens=COUNT)):
        if isinstance(event, wire.Piece):
            ids += event.ids
            if kill and len(ids) >= 10:
                os.kill(kill, signal.SIGKILL)
                kill = 0
    return ids


def editions() -> list[EditionInfo]:
    with KeeperClient.connect(label="test") as client:
        return client.status().editions


def unservable(models: list[Path], folder: Path) -> list[Path]:
    """Folders that an engine ends of, each at another point of its start."""
    odd, torn = folder / "odd", folder / "torn"
    odd.mkdir()
    (odd / "config.json").write_text(json.dumps({"model_type": "none_that_is_known"}))
    torn.mkdir()
    for file in models[1].iterdir():
        data = file.read_bytes()
        (torn / file.name).write_bytes(data[:200] if file.suffix == ".safetensors" else data)
    # Without a tokenizer it cannot serve, which is seen after it was published.
    return [odd, torn, engine_models.llama(folder / "mute", seed=6, eos_token_id=None)]


def test_batch_and_updates_on_one_set_of_weights(
    models: list[Path], answers: list[list[int]], runtime_dir: Path, tmp_path: Path
) -> None:
    sharing = Sharing(models[0], runtime_dir)

    async def work() -> None:
        async with sharing.running():
            assert await ask(sharing.online) == answers[0]
            pid = await sharing.batch_answers()
            (first,) = await asyncio.to_thread(editions)
            assert len(first.holders) == 2, "one edition, used by both"
            assert await ask(sharing.batch, kill=pid) == answers[0], "it came back, and went on with the same bits"
            assert sharing.batch.resumed == 1 and sharing.batch.differed == 0

            for folder in unservable(models, tmp_path):
                with pytest.raises(FerError, match=r"the update failed: .*version 1 \(seed3\) serves as before"):
                    await sharing.supervisor.update.to(sharing.version(folder))
            assert [info.edition for info in await asyncio.to_thread(editions)] == [first.edition]
            assert await ask(sharing.online) == answers[0] and sharing.supervisor.restarts == 1

            during = asyncio.create_task(ask(sharing.online))
            done = await sharing.supervisor.update.to(sharing.version(models[1]))
            assert await during == answers[0], "an answer ends at the model that began it"
            assert await ask(sharing.online) == await ask(sharing.batch) == answers[1]
            (second,) = await asyncio.to_thread(editions)
            assert done["evicted"] == [first.edition] and second.edition != first.edition
            assert len(second.holders) == 2

    play(work())
    assert not list(runtime_dir.glob("engine-*")) and not list(runtime_dir.glob("batch-*"))
