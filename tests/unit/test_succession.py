"""Who serves next, and what of the engine before it is trusted and waited for; engines are made up."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fer.standby import wire
from fer.standby.life import SupervisorLimits
from fer.standby.member import Member
from fer.standby.router import Router, RouterLimits, Target
from fer.standby.succession import Succession
from fer.standby.version import Version

VERSION = Version(online=lambda path: [])


def succession() -> Succession:
    async def nobody(why: str, member: Member) -> bool:
        return False

    lives: Any = SimpleNamespace()
    router = Router(RouterLimits(), "retry", lambda target: None)
    limits = SupervisorLimits(drain_s=30.0)
    return Succession(VERSION, router, lives, limits, tell=lambda: None, outages=lambda outage: None, relief=nobody)


def died(status: int) -> Any:
    async def tell() -> int:
        return status

    return SimpleNamespace(died=1, pid=1, status=tell)


@pytest.mark.parametrize(
    ("ends", "trusted"),
    [
        ([-signal.SIGKILL], True),
        ([-signal.SIGTERM, -signal.SIGKILL], True),
        ([1], False),
        ([-signal.SIGSEGV, -signal.SIGKILL], False),
        ([-signal.SIGKILL, 1], False),
    ],
)
def test_one_error_since_somebody_served_is_enough_to_distrust_the_cache(ends: list[int], trusted: bool) -> None:
    async def work() -> None:
        made = succession()
        assert await made._trusts()
        for number, status in enumerate(ends):
            member = Member(name=f"engine-{number}", version=VERSION, role="promoting" if number else "active")
            made.leave(member, died(status))
        assert await made._trusts() == trusted

    asyncio.run(work())


@pytest.mark.parametrize(("weights", "left"), [("same", 1), ("others", 0)])
def test_answers_are_cut_off_at_once_only_where_the_next_one_goes_on_with_them(weights: str, left: int) -> None:
    async def work() -> None:
        made, streams = succession(), []
        target = Target("old", Path("old"), weights="same")

        async def ask(order: wire.Order) -> wire.Parked:
            streams.append(target.streams)
            return wire.Parked(0, True)

        group: Any = SimpleNamespace(first=SimpleNamespace(orders=True, ask=ask))
        old = Member(name="old", version=VERSION, role="active", target=target, group=group)
        new = Member(name="new", version=VERSION, role="standby", target=Target("new", Path("new"), weights=weights))
        made.keeps, target.streams = True, 1

        async def answer() -> None:
            await asyncio.sleep(0.05)
            target.streams = 0
            made._router._fewer()

        await asyncio.gather(made._relieve(old, new, finish=False), answer())
        assert streams == [left] and old.role == "standby" and target.dismissed

    asyncio.run(work())
