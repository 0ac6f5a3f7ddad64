"""The cache outlives its engine: answers go on where they were, with the same bits, and nothing is made again."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fer.engines.decode import TransformersGraphs
from fer.engines.transformers import TransformersEngine
from fer.errors import MappingError
from fer.orchestrator import Recovered, recover_for_duty
from fer.standby.estate import CacheEstate
from fer.standby.scheduler import SlotRows
from fer.weights.client import KeeperClient
from fer.weights.services import Tenure, hold
from tests.integration.test_serve_engine import LIMIT_S, Serving, play
from tests.support import engine_models, serve_models
from tests.support.keeper import Keeper
from tests.support.processes import WAIT_S, kill_and_wait

pytestmark = pytest.mark.timeout(180)

SERVICE = f"kept-{os.getpid()}"
PROMPTS = [[1, 5, 9, 20, 31], [1, 7], [1, 44, 30, 8, 90, 17, 6]]
SIZES = ("--batch-sizes", "1,2,4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = engine_models.llama(tmp_path_factory.mktemp("kept") / "tiny", seed=3, eos_token_id=None)
    return serve_models.add_words(made)


class Engine:
    """An engine in this process that answers for the service, or did."""

    def __init__(self, folder: Path, keeper: Keeper, *, parked: bool = False, **more: Any) -> None:
        sizes = more.pop("batch_sizes", (1, 2, 4))
        self.engine = TransformersEngine(folder, max_length=128, batch_sizes=sizes, keep_cache=True, **more)
        self.recovered: Recovered = recover_for_duty(self.engine, parked=parked)
        decode = self.engine.graphs()
        assert decode is not None
        self.decode, self.rows = decode, SlotRows(decode)
        self.estate = CacheEstate(self.recovered, self.rows, None)
        self._connect = keeper.client

    def serve(self, *, trust: bool = True) -> Tenure:
        tenure = hold(SERVICE, connect=self._connect, wait_s=WAIT_S)
        kept = self.estate.take(tenure, trust=trust)
        self.recovered.unpark(kept)
        self.estate.settle(tenure, kept)
        if kept is not None:
            kept.close()
        return tenure

    def step(self, count: int) -> list[list[int]]:
        """So many steps of all prompts' rows."""
        made = [self.rows.advance(len(PROMPTS)) for _ in range(count)]
        return [list(tokens) for tokens in zip(*made, strict=True)]


def _must_not(*_: Any) -> int:
    raise AssertionError("a prompt is read again")


@pytest.mark.parametrize(("order", "parked"), [([0, 1, 2], True), ([2, 0, 1], True), ([1, 2, 0], False)])
def test_answers_come_back_in_any_order(
    folder: Path, keeper: Keeper, order: list[int], parked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(folder, keeper)
    tenure = first.serve()
    assert first.estate.left and keeper.status().services[0].estate > 0
    texts = [[*ids, first.rows.begin(row, ids, 50)] for row, ids in enumerate(PROMPTS)]
    for text, tokens in zip(texts, first.step(10), strict=True):
        text += tokens
    second = Engine(folder, keeper, parked=parked)
    undisturbed = Engine(folder, keeper)  # of its own memory: nobody claims anything for it
    right = [_alone(undisturbed, ids, 21) for ids in PROMPTS]
    tenure.release(pass_on=True)
    with second.serve():
        assert second.recovered.intact and second.rows.kept == {0, 1, 2}
        with monkeypatch.context() as strict:
            strict.setattr(TransformersGraphs, "prompt", _must_not)
            for row, number in enumerate(order):
                assert second.rows.resume(row, texts[number])
        found = second.step(10)
        for row, number in enumerate(order):
            assert [*texts[number], *found[row]] == [*PROMPTS[number], *right[number]]
        assert not second.rows.resume(3, [1, 2, 3, 4]), "nobody left that"
        assert second.rows.begin(0, PROMPTS[0], 5) == texts[0][len(PROMPTS[0])], "rows are used again"


def _alone(engine: Engine, ids: list[int], count: int) -> list[int]:
    return engine.engine.generate(ids, count)


@pytest.mark.parametrize(
    ("other", "why"),
    [({"dtype": "bfloat16"}, "layout"), ({"batch_sizes": (1, 2)}, "layout"), ({"revision": "another"}, "edition")],
)
def test_another_engine_gives_it_back_and_makes_its_own(
    folder: Path, keeper: Keeper, other: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Engine(folder, keeper)
    tenure = first.serve()
    first.rows.begin(0, PROMPTS[0], 5)
    second = Engine(folder, keeper, **other)
    tenure.release(pass_on=True)
    with second.serve():
        assert not second.recovered.intact and second.rows.kept == set() and second.estate.left
        assert why in caplog.text
        assert keeper.status().services[0].estate == _bytes(second)


def _bytes(engine: Engine) -> int:
    kept = engine.recovered.keep()
    assert kept is not None and engine.rows.ledger is not None
    kept.close()
    return sum(size for size, _ in kept.parts) + engine.rows.ledger.size


def test_what_an_engine_left_that_failed_is_not_gone_on_with(folder: Path, keeper: Keeper) -> None:
    first = Engine(folder, keeper)
    tenure = first.serve()
    first.rows.begin(0, PROMPTS[0], 5)
    tenure.release(pass_on=True)
    second = Engine(folder, keeper)
    with second.serve(trust=False):
        assert not second.recovered.intact and second.rows.kept == set()
        assert not any(each.any() for each in second.decode.slots.memory[0][:, 1:]), "its memory is new"  # type: ignore[union-attr]


def test_who_dies_before_it_has_proven_itself_leaves_no_row(folder: Path, keeper: Keeper) -> None:
    first = Engine(folder, keeper)
    tenure = first.serve()
    first.rows.begin(0, PROMPTS[0], 5)
    first.rows.begin(1, PROMPTS[1], 5)
    tenure.release(pass_on=True)
    second, third = Engine(folder, keeper), Engine(folder, keeper)
    tenure = hold(SERVICE, connect=keeper.client, wait_s=WAIT_S)
    kept = second.estate.take(tenure, trust=True)
    assert kept is not None
    kept.close()
    tenure.release(pass_on=True)  # as its end would
    with third.serve():
        assert third.recovered.intact and third.rows.kept == set()


def test_steps_that_a_capture_ran_over_the_rows_leave_none_of_them(
    folder: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Engine(folder, keeper)
    tenure = first.serve()
    first.rows.begin(1, PROMPTS[0], 5)
    tenure.release(pass_on=True)
    second = Engine(folder, keeper)
    monkeypatch.setattr(second.recovered._graphs, "overwrote", lambda start: True)
    with second.serve():
        assert not second.recovered.intact and second.rows.kept == set() and second.estate.left


def test_an_engine_that_cannot_leave_the_memory_on_has_the_keeper_let_it_go(
    folder: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenure = Engine(folder, keeper).serve()
    second = Engine(folder, keeper)
    tenure.release(pass_on=True)

    def no(kept: Any) -> None:
        raise MappingError("memory for the cache does not fit")

    monkeypatch.setattr(second.decode, "take", no)
    monkeypatch.setattr(second.recovered, "keep", lambda: None)
    with second.serve():
        assert not second.recovered.intact and keeper.status().services[0].estate == 0


def test_a_parked_engine_has_nothing_of_the_cache(folder: Path, keeper: Keeper) -> None:
    engine = Engine(folder, keeper)
    tenure = engine.serve()
    before = _mapped()
    assert before[0] > 0
    gc.disable()
    try:
        engine.estate.forget()
        engine.recovered.park()
        tenure.release(pass_on=True)
        after = _mapped()
    finally:
        gc.enable()
    assert after[0] == before[0] - 1 and after[1] < before[1]


def _mapped() -> tuple[int, int]:
    """Mappings and descriptors of caches in this process."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    maps = Path("/proc/self/maps").read_text()
    return maps.count("memfd:fer-cache"), sum("memfd:fer-cache" in link for link in links)


def test_memory_goes_when_the_service_ends(folder: Path, keeper: Keeper) -> None:
    before = keeper.status().descriptors
    with Engine(folder, keeper).serve():
        assert keeper.status().descriptors > before
    assert keeper.status().services == []


# --- behind the supervisor ---


def serving(folder: Path, runtime_dir: Path, *, members: int = 1) -> Serving:
    made = Serving(folder, runtime_dir, "retry", *SIZES)
    supervisor = made.supervisor
    supervisor._service = SERVICE
    for _ in range(members - 1):
        supervisor._place(supervisor.succession.version)
    return made


async def ready(made: Serving, engines: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while sum(member["role"] in ("active", "standby") for member in made.supervisor.status()["members"]) < engines:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize(("number", "kept"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_answers_go_on_after_a_death(
    folder: Path, runtime_dir: Path, members: int, number: signal.Signals, kept: bool
) -> None:
    prompts = ["w5 w7 w11", "w3 w9"]
    made = serving(folder, runtime_dir, members=members)

    async def work() -> None:
        async with made.running():
            await ready(made, members)
            right = [await made.answer(prompt, 60) for prompt in prompts]
            deaths = 0

            async def disturb(pieces: int) -> None:
                nonlocal deaths
                if pieces in (10, 30):
                    deaths += 1
                    os.kill(made.supervisor.status()["pid"], number)

            first = asyncio.create_task(made.answer(prompts[0], 60, disturb))
            second = asyncio.create_task(made.answer(prompts[1], 60))
            assert [await first, await second] == right
            assert deaths == 2 and made.router.differed == 0
            await ready(made, members)
            outage = made.supervisor.status()["last_outage"]
            assert (outage["kept_rows"] > 0) == kept, outage

    play(work())


def test_answers_go_on_after_a_planned_switch_and_a_keepers_death(folder: Path, runtime_dir: Path) -> None:
    made = serving(folder, runtime_dir, members=2)

    async def work() -> None:
        async with made.running():
            await ready(made, 2)
            right, longer = await made.answer("w5 w7", 60), await made.answer("w5 w7", 100)

            async def disturb(pieces: int) -> None:
                if pieces == 10:
                    with KeeperClient.connect(label="test") as client:
                        kill_and_wait(client.status().pid)
                    made.kill()

            assert await made.answer("w5 w7", 60, disturb) == right
            await ready(made, 2)
            assert made.supervisor.status()["last_outage"]["kept_rows"] > 0
            switches: list[asyncio.Task[str]] = []
            ended: list[float] = []

            async def switch(pieces: int) -> None:
                if pieces == 10:
                    switches.append(asyncio.create_task(made.supervisor.switch()))
                    switches[0].add_done_callback(lambda task: ended.append(asyncio.get_running_loop().time()))

            assert await made.answer("w5 w7", 100, switch) == longer
            assert ended and await switches[0], "the answer did not have to end first"
            assert made.router.resumed == 2

    play(work())


def test_switches_are_no_deaths_under_a_request(folder: Path, runtime_dir: Path) -> None:
    made = serving(folder, runtime_dir, members=2)

    async def work() -> None:
        async with made.running():
            await ready(made, 2)
            right = await made.answer("w5 w7", 100)

            async def disturb(pieces: int) -> None:
                if pieces in (10, 25, 40, 55):
                    await made.supervisor.switch()

            assert await made.answer("w5 w7", 100, disturb) == right
            assert made.supervisor.switches == 4 and made.router.resumed == 4

    play(work())
