"""The batch engine: it answers what can wait, gives way to whoever serves online, and loses no answer over that."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_standby import both, holders, nothing_is_left, pids
from tests.support.cli import fer
from tests.support.descriptors import open_descriptors
from tests.support.keeper import Keeper, wait_until
from tests.support.pretended_room import Room
from tests.support.processes import Children, kill_and_wait
from tests.support.serve_engine import expected
from tests.support.serving import LIMIT_S, Reply, Service

Start = Callable[..., Service]


@pytest.fixture
def start(children: Children, tmp_path: Path, keeper: Keeper) -> Start:
    def made(standbys: int = 1, **asked: Any) -> Service:
        service = Service(
            children, tmp_path, engine="tests.support.standby_engine", standbys=standbys, batch=True, **asked
        )
        both(service, standbys)
        batch(service)
        return service

    return made


def batch(service: Service) -> dict[str, Any]:
    """Wait until the batch engine answers; its status."""
    return dict(service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")["batch"])


def batch_pid(service: Service) -> int:
    return int(batch(service)["processes"][0]["pid"])


def later(service: Service, prompt: str, count: int, **more: Any) -> Callable[[], Reply]:
    """Ask in a thread; what is returned waits for the reply."""
    found: list[Reply] = []
    thread = threading.Thread(target=lambda: found.append(service.complete(prompt, count, **more)), daemon=True)
    thread.start()

    def reply() -> Reply:
        thread.join(LIMIT_S)
        return found[0]

    return reply


def test_flex_goes_to_the_batch_engine_and_the_rest_does_not(start: Start, keeper: Keeper) -> None:
    service = start(standbys=0)
    os.kill(batch_pid(service), signal.SIGSTOP)
    for tier in ("auto", "default", "priority", None):  # the stopped one is not needed for these
        reply = service.complete("hello", 20, service_tier=tier)
        assert reply.text == expected("hello", 20)
        assert reply.json.get("service_tier") == (None if tier is None else "default")
    asked = later(service, "hello", 20, service_tier="flex")
    service.until_status("it is there", lambda status: status["batch"]["in_flight"] == 1)
    os.kill(batch_pid(service), signal.SIGCONT)
    assert asked().text == expected("hello", 20) and asked().json["service_tier"] == "flex"
    stream = service.stream("once", 20, service_tier="flex").rest()
    assert stream.text == expected("once", 20) and '"service_tier":"flex"' in stream.lines[0]
    assert len(holders(keeper)) == 1, "the batch engine claims nothing"
    assert service.complete("hello", 1, service_tier="fast").status == 400
    nothing_is_left(service, keeper)


def test_without_a_batch_engine_flex_is_served_and_said_to_be_default(children: Children, tmp_path: Path) -> None:
    service = Service(children, tmp_path)
    service.until("active")
    reply = service.complete("hello", 20, service_tier="flex")
    assert reply.text == expected("hello", 20) and reply.json["service_tier"] == "default"
    refused = service.admin("POST", "/admin/batch/pause")
    assert refused.status == 409 and "--batch" in refused.json["error"]["message"]
    assert service.end() == 0


def test_killed_while_it_answers_it_is_back_and_every_answer_is_right(start: Start, keeper: Keeper) -> None:
    service = start()
    online = service.status()["pid"]
    stream = service.stream("once", 160, service_tier="flex").read(20)
    whole = [later(service, f"prompt {number}", 100, service_tier="flex") for number in range(6)]
    service.until_status("all there", lambda status: status["batch"]["in_flight"] == 7)
    kill_and_wait(batch_pid(service))
    assert stream.rest().text == expected("once", 160)
    assert [asked().text for asked in whole] == [expected(f"prompt {number}", 100) for number in range(6)]
    status = batch(service)
    assert status["restarts"] == 1 and status["back_s"] > 0 and status["resumed"] >= 1 and status["differed"] == 0
    assert service.status()["pid"] == online
    assert "fer_batch_back_seconds_count 1.0" in service.ask("/metrics").body.decode()
    nothing_is_left(service, keeper)


def test_many_preemptions_are_no_fault_of_a_request(start: Start, keeper: Keeper) -> None:
    service = start(standbys=0, drain_s=0.5)
    stream = service.stream("once", 200, service_tier="flex").read(5)
    for number in range(1, 5):  # more than the engines that may die under a request
        assert service.admin("POST", "/admin/batch/pause").status == 200
        assert service.status()["batch"]["role"] == "paused"
        assert not any(_alive(process["pid"]) for process in service.status()["batch"]["processes"])
        assert service.admin("POST", "/admin/batch/resume").status == 200
        stream.read(5)
        assert batch(service)["preempted"] == {"order": number}
    assert stream.rest().text == expected("once", 200)
    nothing_is_left(service, keeper)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_what_waits_too_long_is_failed_cleanly(start: Start, keeper: Keeper) -> None:
    service = start(standbys=0, batch_wait_s=0.3)
    stream = service.stream("once", 200, service_tier="flex").read(5)
    assert fer("batch", "pause", "--json").json["role"] == "paused"
    stream.rest()
    assert stream.error is not None and stream.error["code"] == "engine_unavailable"
    assert service.complete("hello", 5, service_tier="flex").status == 503
    assert service.complete("hello", 5).text == expected("hello", 5), "the online one is not concerned"
    assert fer("batch", "resume", "--json").code == 0
    batch(service)
    assert service.complete("hello", 5, service_tier="flex").text == expected("hello", 5)
    nothing_is_left(service, keeper)


def test_the_death_of_the_online_engine_leaves_the_batch_engine_alone(start: Start, keeper: Keeper) -> None:
    service = start()
    before = batch_pid(service)
    slow, quick = (service.stream("once", 160, service_tier=tier).read(10) for tier in ("flex", "default"))
    service.kill_worker()
    assert quick.rest().text == slow.rest().text == expected("once", 160)
    both(service)
    assert batch_pid(service) == before and batch(service)["preempted"] == {}
    nothing_is_left(service, keeper)


def test_it_gives_way_to_a_promotion_that_lacks_memory(start: Start, keeper: Keeper, room: Room) -> None:
    room.grow(3)  # the weights, and the caches of two
    service = start()
    before = batch_pid(service)
    slow = service.stream("once", 160, service_tier="flex").read(10)
    room.grow(2)  # somebody else takes the rest
    quick = service.stream("once", 160).read(10)
    service.kill_worker()
    assert quick.rest().text == expected("once", 160)
    status = both(service)
    assert not _alive(before) and status["batch"]["preempted"] == {"memory": 1}
    assert status["last_outage"]["path"] == "standby" and status["last_outage"]["failed"] == {}
    assert 'fer_batch_preemptions_total{why="memory"} 1.0' in service.ask("/metrics").body.decode()
    service.until_status("it waits", lambda status: "pretended card is full" in status["batch"]["last_error"])
    starts = service.status()["batch"]["restarts"]
    room.grow(3)
    assert slow.rest().text == expected("once", 160), "it waited, and was completed"
    assert batch(service)["restarts"] == starts <= 2, "it stood by without memory, and was not started over and over"
    nothing_is_left(service, keeper)


def test_it_gives_way_to_a_start_that_lacks_memory(start: Start, keeper: Keeper, room: Room) -> None:
    room.grow(3)
    service = start(standbys=0)
    room.grow(2)
    service.kill_worker()
    assert service.complete("hello", 20).text == expected("hello", 20)
    service.until("active")
    assert service.status()["batch"]["preempted"] == {"memory": 1}
    room.grow(3)
    assert service.complete("hello", 20, service_tier="flex").text == expected("hello", 20)
    nothing_is_left(service, keeper)


def _only_online_starts(status: dict[str, Any]) -> bool:
    waits = status["batch"]["role"] in ("starting", "ending", "paused")
    return bool(status["members"][0]["role"] == "starting" and waits)


def test_it_is_not_started_before_an_online_engine_is_active(start: Start, keeper: Keeper) -> None:
    service = start(standbys=0)
    fault = service.fault.with_name("tiny.fault")
    fault.write_text("slow")  # of the online one's start as well as of its own
    for pid in (service.status()["pid"], batch_pid(service)):
        kill_and_wait(int(pid))
    seen = service.until_status("both ends are seen", _only_online_starts)
    assert not any(_alive(process["pid"]) for process in seen["batch"]["processes"])
    fault.unlink()
    service.until("active")
    batch(service)
    nothing_is_left(service, keeper)


def test_cycles_leave_nothing_behind(start: Start, keeper: Keeper) -> None:
    service = start(standbys=0)
    kill_and_wait(batch_pid(service))
    assert service.complete("first", 20, service_tier="flex").text == expected("first", 20)

    def held() -> list[int]:
        return [len(open_descriptors(service.process.pid)), keeper.status().descriptors, len(keeper.descriptors())]

    counted = held()
    for number in range(5):
        stream = service.stream(f"cycle {number}", 60, service_tier="flex").read(5)
        kill_and_wait(batch_pid(service))
        assert stream.rest().text == expected(f"cycle {number}", 60)
        batch(service)
        stream.close()

    def settled() -> bool:
        return all(now <= before for now, before in zip(held(), counted, strict=True))

    wait_until(settled, f"as many descriptors as before: {counted}, {held()}", 5.0)
    assert len(pids(service)) == 1
    nothing_is_left(service, keeper)
