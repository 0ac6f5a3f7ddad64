"""Hot standbys: whoever dies, and whenever, one engine serves, every answer is right, and nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fer import paths
from fer.weights.keeper.sockets import LOCK
from tests.support.descriptors import open_descriptors
from tests.support.keeper import Keeper, wait_until
from tests.support.processes import Children, halt, kill_and_wait, with_variable
from tests.support.serve_engine import expected
from tests.support.serving import Service

Start = Callable[..., Service]
READY = ["active", "standby"]


@pytest.fixture
def start(children: Children, tmp_path: Path, keeper: Keeper) -> Start:
    def made(standbys: int = 1, **asked: Any) -> Service:
        service = Service(children, tmp_path, engine="tests.support.standby_engine", standbys=standbys, **asked)
        both(service, standbys)
        return service

    return made


def both(service: Service, standbys: int = 1) -> dict[str, Any]:
    """Wait until one serves and the others stand by without memory."""
    wanted = ["active"] + standbys * ["standby"]

    def holds(status: dict[str, Any]) -> bool:
        members = status["members"]
        parked = all(member["parked"] == (member["role"] == "standby") for member in members)
        return parked and sorted(member["role"] for member in members) == wanted

    return service.until_status("one serves, the others are parked", holds)


def pids(service: Service) -> dict[str, int]:
    return {m["name"]: m["processes"][0]["pid"] for m in service.status()["members"] if m["processes"]}


def holders(keeper: Keeper) -> list[int]:
    return [process.pid for service in keeper.status().services for process in service.processes]


def nothing_is_left(service: Service, keeper: Keeper) -> None:
    assert service.end() == 0, service.log.read_text()
    wait_until(lambda: keeper.status().services == [], "the keeper knows of no service")
    assert {*with_variable("FER_RUNTIME_DIR", os.environ["FER_RUNTIME_DIR"])} <= {keeper.pid, keeper.minder.pid}
    assert not list(Path(os.environ["FER_RUNTIME_DIR"]).glob("serve-*"))


def test_a_standby_is_promoted_when_the_idle_active_one_dies(start: Start, keeper: Keeper) -> None:
    service = start()
    before = pids(service)
    killed = service.kill_worker()
    assert service.complete("hello", 20).text == expected("hello", 20)
    status = both(service)
    assert status["pid"] in before.values() and status["pid"] != killed
    assert holders(keeper) == [status["pid"]]
    outage = status["last_outage"]
    assert outage["path"] == "standby" and outage["failed"] == {}
    assert {*outage["promotion"]} == {"claim", "fence", "backing", "self_test"}
    assert 'fer_promotion_seconds_count{part="backing"} 1.0' in service.ask("/metrics").body.decode()
    assert 'fer_members{role="standby"} 1.0' in service.ask("/metrics").body.decode()
    nothing_is_left(service, keeper)


def test_a_stream_goes_on_through_two_deaths_in_a_row(start: Start, keeper: Keeper) -> None:
    service = start(standbys=2)
    stream = service.stream("once", 160).read(20)
    first = service.kill_worker()
    service.until_status("the second", lambda status: status["pid"] not in (None, first))
    service.kill_worker()
    assert stream.rest().text == expected("once", 160)
    assert service.status()["last_outage"]["path"] == "standby"
    both(service, 2)
    nothing_is_left(service, keeper)


def test_whoever_dies_while_it_is_promoted_is_followed_by_the_next(start: Start, keeper: Keeper) -> None:
    service = start(standbys=2)
    service.fault.write_text("slow")
    stream = service.stream("once", 120).read(10)
    service.kill_worker()
    promoting = [m for m in service.until_status("one promotes", _promoting)["members"] if m["role"] == "promoting"]
    kill_and_wait(promoting[0]["processes"][0]["pid"])
    service.fault.unlink()
    assert stream.rest().text == expected("once", 120)
    both(service, 2)
    assert len(holders(keeper)) == 1
    nothing_is_left(service, keeper)


def _promoting(status: dict[str, Any]) -> bool:
    return any(member["role"] == "promoting" for member in status["members"])


def test_both_killed_means_a_normal_start(start: Start, keeper: Keeper) -> None:
    service = start()
    stream = service.stream("once", 120).read(10)
    for pid in pids(service).values():
        os.kill(pid, signal.SIGKILL)
    assert stream.rest().text == expected("once", 120)
    assert both(service)["last_outage"]["path"] != "standby"
    nothing_is_left(service, keeper)


def test_a_standby_that_dies_is_replaced_and_nobody_notices(start: Start, keeper: Keeper) -> None:
    service = start()
    active = service.status()["pid"]
    stream = service.stream("once", 120).read(10)
    (standby,) = (pid for pid in pids(service).values() if pid != active)
    kill_and_wait(standby)
    assert stream.rest().text == expected("once", 120)
    service.until_status("a new one", lambda status: status["restarts"] == 1)
    assert both(service)["pid"] == active
    nothing_is_left(service, keeper)


def test_the_keeper_killed_in_the_middle_changes_nothing(start: Start, keeper: Keeper) -> None:
    service = start()
    service.fault.write_text("slow")
    stream = service.stream("once", 120).read(10)
    first = service.kill_worker()
    service.until_status("one promotes", _promoting)
    keeper.kill()
    service.fault.unlink()
    assert stream.rest().text == expected("once", 120)
    status = both(service)
    assert status["pid"] != first and holders(keeper) == [status["pid"]]
    nothing_is_left(service, keeper)


def test_a_keeper_stopped_at_the_death_is_waited_for(start: Start, keeper: Keeper) -> None:
    service = start()
    halt(keeper.minder.pid)  # so that no keeper is there
    keeper.kill()
    stream = service.stream("once", 60).read(5)
    service.kill_worker()
    service.until_status("one asks", _promoting)
    os.kill(keeper.minder.pid, signal.SIGCONT)
    assert stream.rest().text == expected("once", 60)
    assert holders(keeper) == [both(service)["pid"]]
    nothing_is_left(service, keeper)


def test_deleted_paths_of_the_keeper_make_no_second_active(start: Start, keeper: Keeper) -> None:
    service = start()
    for name in (paths.SOCKET, LOCK):
        (keeper.directory / name).unlink()
    stream = service.stream("once", 120).read(10)
    first = service.kill_worker()  # the standby finds no keeper, and starts one that knows nothing
    assert stream.rest().text == expected("once", 120)
    assert both(service)["pid"] != first
    assert service.end() == 0


def test_a_standby_without_memory_stays_parked_and_can_be_tried_again(start: Start, keeper: Keeper) -> None:
    service = start(standbys=2)
    service.fault.write_text("memory")
    killed = service.kill_worker()
    service.until_status("it is seen", lambda status: status["pid"] not in (None, killed))
    status = both(service, 2)
    assert status["last_outage"]["path"] != "standby", "the dead one was started again, to serve"
    assert status["pid"] != killed and holders(keeper) == [status["pid"]]
    assert len(status["last_outage"]["failed"]) == 2, "each was tried"
    assert all("3 bytes are free" in why for why in status["last_outage"]["failed"].values())
    service.fault.unlink()
    service.kill_worker()
    assert service.complete("hello", 20).text == expected("hello", 20)
    assert both(service, 2)["last_outage"]["path"] == "standby", "there is memory now"
    nothing_is_left(service, keeper)


def test_a_planned_switch_under_load_fails_no_request(start: Start, keeper: Keeper) -> None:
    service = start()
    found: dict[str, str] = {}
    ends = threading.Event()

    def ask(name: str) -> None:
        number = 0
        while not ends.is_set():
            prompt = f"{name} {number}"
            reply = service.complete(prompt, 30)
            found[prompt] = reply.text if reply.status == 200 else f"status {reply.status}"
            number += 1

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in "abc"]
    for thread in threads:
        thread.start()
    for _ in range(3):
        before = both(service)
        reply = service.admin("POST", "/admin/switch")
        assert reply.status == 200, reply.body
        after = both(service)
        assert after["active"] == reply.json["active"] != before["active"]
        assert holders(keeper) == [after["pid"]]
    ends.set()
    for thread in threads:
        thread.join(20)
    assert found == {prompt: expected(prompt, 30) for prompt in found} and len(found) > 3
    status = service.status()
    assert status["switches"] == 3 and status["restarts"] == 0 and status["requests"]["resumed"] == 0
    nothing_is_left(service, keeper)


def test_the_command_switches(start: Start, keeper: Keeper) -> None:
    service = start()
    before = service.status()["active"]
    done = subprocess.run(
        [sys.executable, "-m", "fer", "switch", "--json"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["active"] == both(service)["active"] != before
    nothing_is_left(service, keeper)


def test_an_answer_longer_than_the_drain_goes_on_at_the_new_one(start: Start, keeper: Keeper) -> None:
    service = start(drain_s=0.1)
    stream = service.stream("once", 160).read(5)
    assert service.admin("POST", "/admin/switch").status == 200
    assert stream.rest().text == expected("once", 160)
    assert service.status()["requests"]["resumed"] == 1
    nothing_is_left(service, keeper)


def test_switches_under_an_answer_are_no_deaths(start: Start, keeper: Keeper) -> None:
    service = start(drain_s=0.05)
    stream = service.stream("once", 400).read(5)
    for number in range(4):  # one more than the deaths that a request is given up after
        assert service.admin("POST", "/admin/switch").status == 200
        stream.read(10)
        assert both(service)["switches"] == number + 1
    answer = stream.rest()
    assert answer.text == expected("once", 400), answer
    assert service.status()["requests"]["resumed"] == 4 and service.status()["restarts"] == 0
    nothing_is_left(service, keeper)


def test_where_answers_may_not_be_cut_off_a_switch_is_refused(start: Start, keeper: Keeper) -> None:
    service = start(drain_s=0.1, resume="fail")
    stream = service.stream("once", 160).read(5)
    reply = service.admin("POST", "/admin/switch")
    assert reply.status == 409 and "did not end" in reply.json["error"]["message"]
    assert stream.rest().text == expected("once", 160)
    assert service.status()["switches"] == 0
    nothing_is_left(service, keeper)


def test_a_switch_to_one_without_memory_leaves_the_former_one_serving(start: Start, keeper: Keeper) -> None:
    service = start()
    before = service.status()["active"]
    service.fault.write_text("memory")
    reply = service.admin("POST", "/admin/switch")
    service.fault.unlink()
    assert reply.status == 409 and "3 bytes are free" in reply.json["error"]["message"], reply.body
    service.until("active")
    assert service.complete("hello", 20).text == expected("hello", 20)
    both(service)
    assert service.status()["restarts"] == 0 and before
    nothing_is_left(service, keeper)


def test_many_deaths_leave_nothing_behind(start: Start, keeper: Keeper) -> None:
    service = start()
    service.kill_worker()
    assert service.complete("first", 20).text == expected("first", 20)
    both(service)

    def held() -> list[Counter[str]]:
        """Kinds of descriptors of service and keeper, and how many of each."""
        status = keeper.status()
        pids = service.process.pid, status.pid
        kept = Counter({"kept for others": status.descriptors})
        return [kept, *(Counter(re.sub(r"\d+", "N", what) for what in open_descriptors(pid).values()) for pid in pids)]

    counted = held()
    for number in range(5):
        stream = service.stream(f"cycle {number}", 60).read(5)
        service.kill_worker()
        assert stream.rest().text == expected(f"cycle {number}", 60)
        both(service)
        stream.close()

    left = counted

    def settled() -> bool:
        nonlocal left
        left = [now - before for now, before in zip(held(), counted, strict=True)]
        return not any(left)

    try:
        wait_until(settled, "no more descriptors than before", 15.0)
    except AssertionError as error:
        raise AssertionError(
            f"more than before: {left}; {service.status()}; {service.log.read_text()[-2000:]}"
        ) from error
    nothing_is_left(service, keeper)
