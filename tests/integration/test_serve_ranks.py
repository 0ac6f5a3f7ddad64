"""Engines of two processes: whichever dies or stands still, and whenever, both end, others answer, nothing is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.keeper import Keeper, wait_until
from tests.support.processes import Children, halt, kill_and_wait, with_variable
from tests.support.serve_engine import expected
from tests.support.serving import Service

Start = Callable[..., Service]


@pytest.fixture
def start(children: Children, tmp_path: Path, keeper: Keeper) -> Start:
    def made(standbys: int = 0, fault: str = "", **asked: Any) -> Service:
        (tmp_path / "fault").write_text(fault)
        service = Service(children, tmp_path, engine="tests.support.rank_engine", standbys=standbys, tp=2, **asked)
        all_ready(service, standbys)
        return service

    return made


def all_ready(service: Service, standbys: int = 0) -> dict[str, Any]:
    """Wait until one engine serves and the others stand by without memory, each with both ranks."""
    wanted = ["active"] + standbys * ["standby"]

    def holds(status: dict[str, Any]) -> bool:
        members = status["members"]
        whole = all(len(member["processes"]) == 2 for member in members)
        parked = all(member["parked"] == (member["role"] == "standby") for member in members)
        return whole and parked and sorted(member["role"] for member in members) == wanted

    return service.until_status("one serves, the others are parked", holds)


def ranks(service: Service, role: str = "active") -> list[int]:
    """Pids of the ranks of the first engine in a role."""
    member = next(m for m in service.status()["members"] if m["role"] == role)
    return [process["pid"] for process in member["processes"]]


def holders(keeper: Keeper) -> list[int]:
    return [process.pid for service in keeper.status().services for process in service.processes]


def all_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"{pids} have ended")


def nothing_is_left(service: Service, keeper: Keeper) -> None:
    folder = next(Path(os.environ["FER_RUNTIME_DIR"]).glob("serve-*"))
    engines = [m["name"] for m in service.status()["members"]]
    meeting = [path.name for path in folder.iterdir() if path.name.endswith(".ranks")]
    stores = [path.name for path in folder.iterdir() if path.name.endswith(".store")]
    assert not meeting and len(stores) == len(engines), "of each living engine, and of no dead one"
    assert service.end() == 0, service.log.read_text()
    wait_until(lambda: keeper.status().services == [], "the keeper knows of no service")
    assert {*with_variable("FER_RUNTIME_DIR", os.environ["FER_RUNTIME_DIR"])} <= {keeper.pid, keeper.minder.pid}
    assert not folder.exists()


def test_both_ranks_answer_and_hold_the_service(start: Start, keeper: Keeper) -> None:
    service = start()
    assert service.complete("hello", 30).text == expected("hello", 30)
    streams = [service.stream(f"together {number}", 40 + 20 * number) for number in range(4)]  # rows move
    for number, stream in enumerate(streams):
        assert stream.rest().text == expected(f"together {number}", 40 + 20 * number)
    assert holders(keeper) == ranks(service)
    nothing_is_left(service, keeper)


@pytest.mark.parametrize(("rank", "standbys"), [(0, 0), (1, 1)])
def test_the_death_of_a_rank_is_the_engines(start: Start, keeper: Keeper, rank: int, standbys: int) -> None:
    service = start(standbys)
    before = ranks(service)
    stream = service.stream("once", 120).read(20)
    kill_and_wait(before[rank])
    assert stream.rest().text == expected("once", 120)
    all_gone(before)
    service.until_status("it is started again", lambda status: status["restarts"] == 1)
    status = all_ready(service, standbys)
    assert status["requests"]["resumed"] == 1
    assert (status["last_outage"]["path"] == "standby") == bool(standbys)
    assert holders(keeper) == ranks(service) and not {*holders(keeper)} & {*before}
    nothing_is_left(service, keeper)


def test_a_rank_that_stands_still_is_ended_with_the_others(start: Start, keeper: Keeper) -> None:
    service = start(standbys=1, stall_s=1.0)
    before = ranks(service)
    stream = service.stream("once", 120).read(20)
    halt(before[1])
    assert stream.rest().text == expected("once", 120)
    all_gone(before)
    assert "said nothing" in service.log.read_text()
    all_ready(service, 1)
    nothing_is_left(service, keeper)


def test_a_keeper_killed_meanwhile_has_a_successor_that_knows_both_ranks(start: Start, keeper: Keeper) -> None:
    service = start(standbys=1)
    before = ranks(service)
    keeper.kill()
    stream = service.stream("once", 120).read(20)
    kill_and_wait(before[1])
    assert stream.rest().text == expected("once", 120)
    all_gone(before)
    service.until_status("it is started again", lambda status: status["restarts"] == 1)
    all_ready(service, 1)
    assert holders(keeper) == ranks(service)
    nothing_is_left(service, keeper)


def test_the_keeper_ends_what_is_left_where_nobody_else_can(start: Start, keeper: Keeper) -> None:
    service = start()
    before = ranks(service)
    halt(service.process.pid)
    halt(before[1])
    kill_and_wait(before[0])
    wait_until(lambda: not _runs(before[1]), "the keeper has ended the rank that stood still")
    wait_until(lambda: holders(keeper) == [], "it has seen their end as well")
    os.kill(service.process.pid, signal.SIGCONT)
    assert service.complete("hello", 20).text == expected("hello", 20)
    all_ready(service)
    nothing_is_left(service, keeper)


def _runs(pid: int) -> bool:
    """Whether a process has not ended; one that its parent has not asked for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_while_it_starts_is_started_again_with_the_others(
    start: Start, keeper: Keeper, rank: int
) -> None:
    service = start(fault=f"start_once {rank}")
    assert service.status()["restarts"] == 1
    assert f"rank {rank}: killed by SIGKILL" in service.log.read_text()
    assert service.complete("hello", 20).text == expected("hello", 20)
    nothing_is_left(service, keeper)


def test_lack_of_memory_in_one_ranks_warm_up_leaves_the_other_in_no_step(start: Start, keeper: Keeper) -> None:
    service = start(fault="step_once 1")
    assert service.status()["restarts"] == 1
    assert "rank 1: a step of 4 rows needs more memory than this rank has" in service.log.read_text()
    nothing_is_left(service, keeper)


def test_a_parked_rank_that_dies_is_replaced_and_nobody_notices(start: Start, keeper: Keeper) -> None:
    service = start(standbys=1)
    active, parked = ranks(service), ranks(service, "standby")
    stream = service.stream("once", 120).read(10)
    kill_and_wait(parked[1])
    assert stream.rest().text == expected("once", 120)
    service.until_status("a new one", lambda status: status["restarts"] == 1)
    all_ready(service, 1)
    assert ranks(service) == active == holders(keeper)
    all_gone(parked)
    nothing_is_left(service, keeper)


def test_a_parked_rank_that_stands_still_is_found_out_when_it_is_needed(start: Start, keeper: Keeper) -> None:
    service = start(standbys=1)
    active, parked = ranks(service), ranks(service, "standby")
    stream = service.stream("once", 120).read(10)
    halt(parked[1])
    kill_and_wait(active[0])
    assert stream.rest().text == expected("once", 120)
    all_gone([*active, *parked])
    assert f"rank 1, process {parked[1]}, does not answer" in service.log.read_text()
    all_ready(service, 1)
    nothing_is_left(service, keeper)


def test_a_rank_that_dies_while_it_is_promoted_is_followed_by_the_next_engine(start: Start, keeper: Keeper) -> None:
    service = start(standbys=2)
    stream = service.stream("once", 120).read(10)
    service.fault.write_text("die_once 1")
    kill_and_wait(ranks(service)[1])
    assert stream.rest().text == expected("once", 120)
    service.until_status("both are started again", lambda status: status["restarts"] == 2)
    all_ready(service, 2)
    assert holders(keeper) == ranks(service)
    nothing_is_left(service, keeper)


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_rank_lacks_memory_all_stay_parked(start: Start, keeper: Keeper, rank: int) -> None:
    service = start(standbys=1)
    parked = ranks(service, "standby")
    service.fault.write_text(f"memory {rank}")
    reply = service.admin("POST", "/admin/switch")
    service.fault.write_text("")
    message = reply.json["error"]["message"]
    assert reply.status == 409 and f"rank {rank}: the cache does not fit" in message and "3 bytes" in message
    said = service.fault.with_name("memory").read_text().splitlines()
    for pid in parked:
        assert [line.split()[0] for line in said if line.endswith(f" {pid}")][-1:] in ([], ["parked"])
    service.until("active")
    assert service.complete("hello", 20).text == expected("hello", 20)
    all_ready(service, 1)
    next_ones = ranks(service, "standby")
    assert service.admin("POST", "/admin/switch").status == 200, "there is memory now"
    assert all_ready(service, 1)["restarts"] == 0
    assert ranks(service) == next_ones == holders(keeper)
    assert service.complete("again", 20).text == expected("again", 20)
    nothing_is_left(service, keeper)


def test_ranks_that_make_different_tokens_do_not_go_on(start: Start, keeper: Keeper) -> None:
    service = start()
    service.fault.write_text("other_once 1")
    assert service.complete("hello", 40).text == expected("hello", 40)
    assert "different tokens" in service.log.read_text()
    assert all_ready(service)["restarts"] == 1
    nothing_is_left(service, keeper)


def test_ranks_end_with_the_service_however_it_ends(start: Start) -> None:
    service = start(standbys=1)
    pids = [*ranks(service), *ranks(service, "standby")]
    service.process.send_signal(signal.SIGKILL)
    all_gone(pids)
