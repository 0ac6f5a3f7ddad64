"""Router and a worker's answers on a real socket: what is waited for, what is not, and what ends with its client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from fer.errors import RequestError
from fer.standby import router as routing
from fer.standby import wire
from fer.standby.answers import Answers, listen
from fer.standby.router import Router, RouterLimits, Target
from tests.support.serve_engine import ArithmeticModel, expected

WAIT_S = 20.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def play(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await work

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def worker(path: Path, serve: Serve) -> AsyncIterator[Target]:
    """A worker that does with each request whatever the test wants."""

    busy: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        busy.add(task)
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async with await asyncio.start_unix_server(handle, sock=listen(path)):
        yield Target("worker", path)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)  # or sockets are left to the garbage collector


async def text_of(router: Router, request: wire.Generate) -> str:
    return "".join([event.text async for event in router.answer(request) if isinstance(event, wire.Piece)])


PIECES = b"".join(wire.line(message) for message in (wire.Began(1), wire.Piece([1], "a"), wire.Piece([2], "b")))
END = wire.line(wire.Ended("stop"))


def test_a_slow_client_does_not_make_its_worker_a_hung_one(runtime_dir: Path) -> None:
    stalled: list[Target] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(PIECES + END)

    async def work() -> None:
        router = Router(RouterLimits(stall_s=0.05), "retry", stalled.append)
        async with worker(runtime_dir / "w", serve) as target:
            router.activate(target)
            text = ""
            async for event in router.answer(wire.Generate(prompt="x")):
                await asyncio.sleep(0.1)  # longer than a worker may be silent
                text += event.text if isinstance(event, wire.Piece) else ""
            assert text == "ab"

    play(work())
    assert not stalled


def test_a_silent_worker_is_reported(runtime_dir: Path) -> None:
    stalled: list[Target] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(PIECES)
        await reader.read()  # until the router turns away

    async def work() -> None:
        router = Router(RouterLimits(stall_s=0.05, attempts=1), "retry", stalled.append)
        async with worker(runtime_dir / "w", serve) as target:
            router.activate(target)
            with pytest.raises(RequestError, match="died 1 times"):
                await text_of(router, wire.Generate(prompt="x"))
            assert stalled == [target]

    play(work())


@pytest.mark.parametrize("nonsense", [b"", b"what?\n", b'{"type":"piece"}\n', PIECES[:-5]])
def test_a_worker_that_breaks_off_is_asked_again_and_then_given_up(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, nonsense: bytes
) -> None:
    monkeypatch.setattr(routing, "NOTICE_S", 0.01)
    asked: list[wire.Generate] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(wire.request(await reader.readline()))
        writer.write(nonsense)

    async def work() -> None:
        router = Router(RouterLimits(), "retry", lambda target: None)
        async with worker(runtime_dir / "w", serve) as target:
            router.activate(target)
            with pytest.raises(RequestError) as caught:
                await text_of(router, wire.Generate(prompt="x"))
            assert caught.value.fields["status"] == 502
        assert not router.in_flight and not target.streams

    play(work())
    assert len(asked) == RouterLimits().attempts


def test_nobody_active_is_an_error_after_a_bounded_wait(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "NOTICE_S", 0.01)

    async def work() -> None:
        router = Router(RouterLimits(wait_s=0.05), "retry", lambda target: None)
        with pytest.raises(RequestError) as caught:
            await text_of(router, wire.Generate(prompt="x"))
        assert caught.value.fields["status"] == 503 and caught.value.fields["retry_after"]
        router.activate(Target("gone", runtime_dir / "nothing"))  # and one whose socket is not there
        with pytest.raises(RequestError):
            await asyncio.wait_for(text_of(router, wire.Generate(prompt="x")), WAIT_S)

    play(work())


@contextlib.asynccontextmanager
async def answers(path: Path) -> AsyncIterator[tuple[Answers, Router]]:
    """The worker's own side, with its engine in a thread."""
    made = Answers(ArithmeticModel(2))
    engine = threading.Thread(target=made.scheduler.run, daemon=True)
    engine.start()
    serving = asyncio.create_task(made._serve(listen(path)))
    router = Router(RouterLimits(), "retry", lambda target: None)
    router.activate(Target("worker", path))
    try:
        yield made, router
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        made.scheduler.stop()
        await asyncio.to_thread(engine.join, WAIT_S)
        assert not engine.is_alive()


def test_a_client_that_leaves_frees_its_row(runtime_dir: Path, no_fd_leak: None) -> None:
    async def work() -> None:
        async with answers(runtime_dir / "w") as (worker, router):
            for _ in range(3):  # more than there are rows
                events = router.answer(wire.Generate(prompt="gone", max_tokens=450))
                async for event in events:
                    if isinstance(event, wire.Piece):
                        break
                await events.aclose()
            text = await text_of(router, wire.Generate(prompt="hello", max_tokens=5))
            assert text == expected("hello", 5)
            while worker.scheduler._running:
                await asyncio.sleep(0.01)
            assert not worker._open and not router.in_flight

    play(work())


def test_an_answer_whose_last_word_was_lost_ends_at_once(runtime_dir: Path) -> None:
    async def work() -> None:
        async with answers(runtime_dir / "w") as (_, router):
            known = list(expected("hello", 5).encode())
            asked = wire.Generate(prompt="hello", max_tokens=5, known=known, replay=True)
            assert [event async for event in router._ask(router.active, asked)] == [wire.Began(5), wire.Ended("length")]  # type: ignore[arg-type]

    play(work())
