"""Deaths under ``fer serve``: clients get the undisturbed answer or a clear error, and nothing is left over."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.descriptors import open_descriptors
from tests.support.keeper import wait_until
from tests.support.processes import Children, kill_and_wait, with_variable
from tests.support.serve_engine import expected
from tests.support.serving import LIMIT_S, Service

Start = Callable[..., Service]


@pytest.fixture
def start(children: Children, tmp_path: Path) -> Start:
    def made(**asked: Any) -> Service:
        return Service(children, tmp_path, **asked)

    return made


def others() -> list[int]:
    """Processes of this test beside itself."""
    return list(with_variable("FER_RUNTIME_DIR", os.environ["FER_RUNTIME_DIR"]))


def nothing_is_left(service: Service) -> None:
    assert service.end() == 0, service.log.read_text()
    assert not others()
    assert not list(Path(os.environ["FER_RUNTIME_DIR"]).iterdir())


def test_an_engine_killed_while_idle_is_started_again(start: Start) -> None:
    service = start()
    service.until("active")
    first = service.kill_worker()
    assert service.complete("hello", 20).text == expected("hello", 20)  # waits for the next engine
    status = service.until("active")
    assert status["pid"] != first and status["restarts"] == 1
    assert "SIGKILL" in status["last_error"]
    assert {"spawned", "begun", "ready", "active"} <= set(status["last_outage"])
    nothing_is_left(service)


@pytest.mark.parametrize("resume", ["retry", "prefill"])
def test_a_stream_goes_on_where_its_engine_died(start: Start, resume: str) -> None:
    service = start(resume=resume)
    service.until("active")
    undisturbed = service.stream("once", 140).rest()
    disturbed = service.stream("once", 140).read(20)
    service.kill_worker()
    disturbed.read(30)
    service.until("active")
    disturbed.read(1)
    service.kill_worker()  # and twice in a row
    disturbed.rest()
    assert disturbed.text == undisturbed.text == expected("once", 140)
    assert disturbed.reason == undisturbed.reason == "length"
    status = service.status()
    assert status["requests"]["resumed"] == 2 and status["last_outage"]["token"] > 0
    assert "fer_death_to_token_seconds_count 2.0" in service.ask("/metrics").body.decode()
    nothing_is_left(service)


def test_whole_answers_survive_as_well(start: Start) -> None:
    service = start()
    service.until("active")
    found: dict[str, str] = {}

    def ask(prompt: str) -> None:
        found[prompt] = service.complete(prompt, 100).text

    prompts = [f"prompt {number}" for number in range(6)]  # more than there are rows
    askers = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for asker in askers:
        asker.start()
    service.until_status("all requests under way", lambda status: status["requests"]["in_flight"] == len(prompts))
    service.kill_worker()
    for asker in askers:
        asker.join(LIMIT_S)
    assert found == {prompt: expected(prompt, 100) for prompt in prompts}
    nothing_is_left(service)


def test_with_resume_off_a_begun_answer_ends_with_an_error(start: Start) -> None:
    service = start(resume="fail")
    service.until("active")
    stream = service.stream("once", 140).read(20)
    service.kill_worker()
    stream.rest()
    assert stream.error is not None and stream.error["code"] == "engine_died"
    assert expected("once", 140).startswith(stream.text)
    assert "[DONE]" not in stream.lines
    assert service.complete("after", 5).text == expected("after", 5)


def test_a_request_that_kills_every_engine_is_given_up(start: Start) -> None:
    service = start()
    service.until("active")
    reply = service.complete("poison", 5)
    assert reply.status == 502 and reply.json["error"]["code"] == "engine_died"
    assert service.complete("hello", 5).text == expected("hello", 5)
    assert service.status()["restarts"] == 3


def test_an_engine_whose_step_fails_ends_and_says_why(start: Start) -> None:
    service = start()
    service.until("active")
    assert service.complete("raise", 5).status == 502
    status = service.until("active")
    assert "exit status 1: RuntimeError: the device has fallen off the bus" in status["last_error"]


def test_a_hung_engine_is_ended(start: Start) -> None:
    service = start(stall_s=0.3)
    service.until("active")
    assert service.complete("hang", 5).status == 502
    assert "said nothing" in service.status()["last_error"]
    assert service.complete("hello", 5).text == expected("hello", 5)


def test_a_crash_loop_backs_off_and_shows_the_error(start: Start) -> None:
    service = start(wait_s=0.2, first_delay_s=60.0)
    service.until("active")
    service.fault.write_text("import")
    service.kill_worker()
    status = service.until("backoff")
    assert "ImportError: libmissing.so.1" in status["last_error"]
    assert status["members"][0]["failures"] == 3
    assert "ImportError" in service.log.read_text()
    assert "tail" not in status["members"][0]
    assert "Traceback" in service.admin("GET", "/status").json["members"][0]["tail"]
    # Live, neither ready nor active; requests wait their time and are told when to come again.
    assert [service.ask(f"/health/{what}").status for what in ("live", "ready", "active")] == [200, 503, 503]
    reply = service.complete("hello", 5)
    assert reply.status == 503 and int(reply.headers["Retry-After"]) > 0
    nothing_is_left(service)


def test_a_wrong_model_ends_the_service_with_its_error(start: Start, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("usage")
    service = start()
    assert service.process.wait(LIMIT_S) == 2
    assert "the model folder is damaged" in service.log.read_text()
    assert not others()


def test_a_start_that_takes_too_long_is_ended(start: Start, tmp_path: Path) -> None:
    (tmp_path / "fault").write_text("silent")
    service = start(start_s=1.0)
    service.until_status("a failed start", lambda status: "not ready after 1 s" in status["last_error"])
    service.fault.unlink()
    service.until("active")


def test_a_standby_takes_over_at_once_and_the_dead_one_stands_by(start: Start) -> None:
    service = start(standbys=1)
    service.until_status("a standby", lambda s: sorted(m["role"] for m in s["members"]) == ["active", "standby"])
    stream = service.stream("once", 140).read(20)
    service.kill_worker()
    stream.rest()
    assert stream.text == expected("once", 140)
    assert service.status()["last_outage"]["path"] == "standby"
    service.until_status("two again", lambda s: sorted(m["role"] for m in s["members"]) == ["active", "standby"])
    nothing_is_left(service)


def test_a_planned_switch_fails_no_request(start: Start) -> None:
    service = start(standbys=1)
    service.until_status("a standby", lambda s: sorted(m["role"] for m in s["members"]) == ["active", "standby"])
    before = service.status()
    stream = service.stream("once", 120).read(10)
    reply = service.admin("POST", "/admin/switch")
    assert reply.status == 200 and reply.json["active"] != before["active"]
    assert stream.rest().text == expected("once", 120)
    after = service.status()
    assert after["pid"] != before["pid"] and after["restarts"] == 0 and after["requests"]["resumed"] == 0
    assert service.ask("/admin/switch", {}).status == 404  # not at the public address
    nothing_is_left(service)


def test_without_a_standby_there_is_nothing_to_switch_to(start: Start) -> None:
    service = start()
    service.until("active")
    assert service.admin("POST", "/admin/switch").status == 409


def test_sigterm_lets_answers_end_and_takes_no_more(start: Start) -> None:
    service = start()
    service.until("active")
    stream = service.stream("once", 140).read(5)
    service.process.terminate()
    service.until("draining")
    assert service.complete("late", 5).status == 503
    assert stream.rest().text == expected("once", 140)
    assert service.process.wait(LIMIT_S) == 0
    assert not others()


def test_a_second_sigterm_does_not_wait(start: Start) -> None:
    service = start(drain_s=60.0)
    service.until("active")
    stream = service.stream("hang on, this is", 5)  # never answered
    service.process.terminate()
    service.until("draining")
    service.process.terminate()
    assert service.process.wait(LIMIT_S) == 0
    assert "Traceback" not in service.log.read_text()
    stream.close()
    assert not others()


def test_what_is_cut_off_at_the_end_is_told_so(start: Start) -> None:
    service = start(drain_s=0.2)
    service.until("active")
    stream = service.stream("once", 480).read(5)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(service.complete, "hang on, this is", 5)
        wait_until(lambda: service.status()["requests"]["in_flight"] == 2, "both are under way", LIMIT_S)
        service.process.terminate()
        assert stream.rest().error["code"] == "engine_unavailable"
        reply = whole.result(LIMIT_S)
    assert reply.status == 503 and reply.json["error"]["code"] == "engine_unavailable", reply.body
    assert service.process.wait(LIMIT_S) == 0
    assert "Traceback" not in service.log.read_text()
    assert not others()


def test_engines_end_with_a_killed_supervisor_and_its_folder_goes_at_the_next_start(start: Start) -> None:
    service = start()
    pid = service.until("active")["pid"]
    pidfd = os.pidfd_open(pid)
    kill_and_wait(service.process.pid)
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(LIMIT_S * 1000)
    os.close(pidfd)
    assert list(Path(os.environ["FER_RUNTIME_DIR"]).glob("serve-*"))
    nothing_is_left(start())


def test_a_taken_port_is_an_error_of_the_user(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        service = start(port=taken.getsockname()[1])
        assert service.process.wait(LIMIT_S) == 2
        assert "cannot be listened at" in service.log.read_text()
    assert not others()


def test_the_service_manager_is_told(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(Path(os.environ["FER_RUNTIME_DIR"]).parent / "n"))
        manager.settimeout(LIMIT_S)
        service = start(env={"NOTIFY_SOCKET": manager.getsockname()})
        said = ""
        while "READY=1" not in said:
            said += manager.recv(4096).decode() + "\n"
        assert service.end() == 0
        while "STOPPING=1" not in said:
            said += manager.recv(4096).decode() + "\n"
    assert "STATUS=active" in said


def test_many_deaths_leave_nothing_behind(start: Start) -> None:
    service = start()
    service.until("active")

    def held() -> int:
        return len(open_descriptors(service.process.pid))

    def die() -> None:
        stream = service.stream("once", 60).read(5)
        service.kill_worker()
        assert stream.rest().text == expected("once", 60)
        stream.close()
        service.until("active")

    die()
    wait_until(lambda: service.status()["requests"]["in_flight"] == 0, "quiet", LIMIT_S)
    before = held()
    for _ in range(2):
        die()
    wait_until(lambda: held() <= before, "descriptors given back", LIMIT_S)
    assert len(others()) == 2  # the supervisor and its engine
    os.kill(service.process.pid, signal.SIGINT)
    assert service.process.wait(LIMIT_S) == 0
    assert not others()


def test_engines_that_answered_are_started_again_at_once_however_often_they_die(start: Start) -> None:
    service = start(first_delay_s=60.0)
    service.until("active")
    for _ in range(5):
        assert service.complete("hello", 3).text == expected("hello", 3)
        service.kill_worker()
    assert service.complete("hello", 3).text == expected("hello", 3)
    status = service.status()
    assert status["restarts"] == 5 and status["members"][0]["failures"] == 1
