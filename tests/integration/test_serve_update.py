"""Updates to another model: no request fails, no answer is of two models, and what fails leaves the old one serving."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_standby import both, holders, nothing_is_left
from tests.support.cli import fer
from tests.support.descriptors import open_descriptors
from tests.support.keeper import Keeper, wait_until
from tests.support.pretended_room import Room
from tests.support.processes import Children, kill_and_wait
from tests.support.serve_engine import expected
from tests.support.serving import LIMIT_S, Reply, Service

Start = Callable[..., Service]
SALT = 5


@pytest.fixture
def start(children: Children, tmp_path: Path, keeper: Keeper) -> Start:
    def made(standbys: int = 0, **asked: Any) -> Service:
        service = Service(children, tmp_path, engine="tests.support.standby_engine", standbys=standbys, **asked)
        both(service, standbys)
        return service

    return made


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The folder of another model."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"salt": {SALT}}}')
    return folder


def update(service: Service, model: Path, **more: Any) -> Reply:
    return service.admin("POST", "/admin/update", {"model": str(model), **more})


def meanwhile(service: Service, model: Path, **more: Any) -> Callable[[], Reply]:
    """Update in a thread; what is returned waits for the reply."""
    found: list[Reply] = []
    thread = threading.Thread(target=lambda: found.append(update(service, model, **more)), daemon=True)
    thread.start()

    def reply() -> Reply:
        thread.join(LIMIT_S)
        return found[0]

    return reply


def at_step(service: Service, step: str) -> dict[str, Any]:
    return service.until_status(f"the update is {step}", lambda status: status["update"]["step"] == step)


def pid_of(service: Service, role: str, version: int) -> int:
    def found(status: dict[str, Any]) -> list[int]:
        members = [m for m in status["members"] if m["role"] == role and m["version"] == version]
        return [process["pid"] for member in members for process in member["processes"]]

    return found(service.until_status(f"one of version {version} is {role}", found))[0]


def serves(service: Service, version: int, standbys: int = 0) -> None:
    """One engine of this version is active, the others stand by, and all answer as that model does."""
    status = both(service, standbys)
    assert {member["version"] for member in status["members"]} == {version} == {status["version"]}
    assert status["update"]["step"] == ""
    assert service.complete("hello", 20).text == expected("hello", 20, SALT if version > 1 else 0)


def test_under_load_no_request_fails_and_each_answer_is_of_one_model(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(standbys=1, batch=True)
    service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")
    found: dict[str, str] = {}
    ends = threading.Event()

    def ask(name: str) -> None:
        number = 0
        while not ends.is_set():
            prompt, number = f"{name} {number}", number + 1
            if name == "stream":
                stream = service.stream(prompt, 30).rest()
                found[prompt] = stream.text if stream.error is None else str(stream.error)
            else:
                reply = service.complete(prompt, 30, service_tier="flex" if name == "flex" else "auto")
                found[prompt] = reply.text if reply.status == 200 else f"status {reply.status}: {reply.body!r}"

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in ("whole", "stream", "flex")]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(found) > 3, "answers of the old one")
    reply = update(service, other)
    assert reply.status == 200, reply.body
    counted = len(found)
    wait_until(lambda: len(found) > counted + 6, "answers of the new one")
    ends.set()
    for thread in threads:
        thread.join(20)
    by_model = {salt: {p for p, text in found.items() if text == expected(p, 30, salt)} for salt in (0, SALT)}
    assert by_model[0] | by_model[SALT] == {*found}, {
        p: t for p, t in found.items() if p not in by_model[0] | by_model[SALT]
    }
    assert by_model[0] and by_model[SALT]
    serves(service, 2, standbys=1)
    status = service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")
    assert status["batch"]["version"] == 2 and status["restarts"] == 0, "the standby and the batch engine moved"
    assert service.complete("hello", 20, service_tier="flex").text == expected("hello", 20, SALT)
    assert holders(keeper) == [status["pid"]]
    assert reply.json["evicted"] == ["tiny-0"] and reply.json["kept"] == {} and reply.json["waiting"] == []
    assert {*reply.json["seconds"]} == {"starting", "switching", "trial", "moving", "evicting"}
    assert 'fer_updates_total{result="done"} 1.0' in service.ask("/metrics").body.decode()
    service.kill_worker()  # what is started again is the new model, under the old name
    serves(service, 2, standbys=1)
    nothing_is_left(service, keeper)


def test_a_streamed_answer_ends_where_it_began(start: Start, keeper: Keeper, other: Path) -> None:
    service = start()
    stream = service.stream("once", 200).read(10)
    done = meanwhile(service, other)
    at_step(service, "switching")
    waiting = service.stream("next", 30)  # its first line comes with the new engine
    assert stream.rest().text == expected("once", 200)
    assert waiting.rest().text == expected("next", 30, SALT)
    assert done().status == 200, done().body
    assert service.status()["requests"]["resumed"] == 0
    nothing_is_left(service, keeper)


def test_one_that_outlasts_the_drain_keeps_the_old_model(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(drain_s=0.1)
    stream = service.stream("once", 200).read(10)
    reply = update(service, other)
    assert reply.status == 409 and "--cut" in reply.json["error"]["message"]
    assert stream.rest().text == expected("once", 200)
    serves(service, 1)
    nothing_is_left(service, keeper)


def test_cut_streams_end_with_an_error_and_whole_answers_are_begun_again(
    start: Start, keeper: Keeper, other: Path
) -> None:
    service = start(drain_s=0.1)
    stream = service.stream("once", 250).read(10)
    whole: list[Reply] = []
    asking = threading.Thread(target=lambda: whole.append(service.complete("whole", 250)), daemon=True)
    asking.start()
    service.until_status("both are there", lambda status: status["requests"]["in_flight"] == 2)
    assert update(service, other, cut=True).status == 200
    stream.rest()
    assert stream.error is not None and stream.error["code"] == "model_updated"
    assert expected("once", 250).startswith(stream.text)
    asking.join(LIMIT_S)
    assert whole[0].text == expected("whole", 250, SALT), "nobody had seen any of it"
    assert whole[0].json["usage"]["completion_tokens"] == 250
    nothing_is_left(service, keeper)


def test_whole_answers_alone_keep_no_model(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(drain_s=0.1)
    whole: list[Reply] = []
    asking = threading.Thread(target=lambda: whole.append(service.complete("whole", 250)), daemon=True)
    asking.start()
    service.until_status("it is there", lambda status: status["requests"]["in_flight"] == 1)
    assert update(service, other).status == 200
    asking.join(LIMIT_S)
    assert whole[0].text == expected("whole", 250, SALT)
    nothing_is_left(service, keeper)


FAULTS = {
    "usage": ("CheckpointError", "the model folder is damaged"),
    "library": ("OutOfMemory", "an array of 1 TiB"),
    "die": ("RequestError", "killed by SIGKILL"),
    "die-promote": ("RequestError", "killed by SIGKILL"),
    "memory-promote": ("OutOfMemory", "3 bytes are free"),
}


def test_a_new_model_that_cannot_serve_leaves_the_old_one(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(standbys=1)
    for number, (fault, (kind, says)) in enumerate(FAULTS.items(), 1):
        other.with_suffix(".fault").write_text(fault)
        before = service.status()["pid"]
        stream = service.stream("once", 60).read(5)
        reply = update(service, other)
        message = reply.json["error"]["message"]
        assert reply.status == 409 and reply.json["fer"]["kind"] == kind and says in message
        assert "version 1 (tiny) serves as before" in message
        assert stream.rest().text == expected("once", 60)
        serves(service, 1, standbys=1)
        assert service.status()["pid"] == before or "promote" in fault, "only a switch ever changes who serves"
        assert service.status()["update"]["failed"] == number
        assert says in service.admin("GET", "/status").json["update"]["last_error"]
    other.with_suffix(".fault").unlink()
    assert update(service, other).status == 200, "and the next attempt succeeds"
    serves(service, 2 + len(FAULTS), standbys=1)
    nothing_is_left(service, keeper)


def test_a_new_model_that_dies_before_its_first_token_is_rolled_back(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(settle_s=20.0)
    other.with_suffix(".fault").write_text("die-token")
    done = meanwhile(service, other)
    at_step(service, "trial")
    assert service.complete("hello", 20).text == expected("hello", 20), "the old one answers what the new one died of"
    assert done().status == 409 and "before its first token" in done().json["error"]["message"]
    serves(service, 1)
    assert service.status()["restarts"] == 0, "it stood by"
    nothing_is_left(service, keeper)


def test_without_a_folder_or_with_one_of_no_model_nothing_is_begun(
    start: Start, keeper: Keeper, tmp_path: Path
) -> None:
    service = start()
    for name, config in (("empty", None), ("torn", "{"), ("list", "[]"), ("short", '{"max_position_embeddings": 512}')):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(config)
    for name in ("nowhere", "empty", "torn", "list", "short"):
        reply = update(service, tmp_path / name)
        kind = "OptionError" if name == "short" else "CheckpointError"
        assert reply.status == 409 and reply.json["fer"]["kind"] == kind, reply.body
    assert service.admin("POST", "/admin/update", {"folder": "x"}).status == 400
    assert service.status()["update"]["failed"] == 0
    serves(service, 1)
    nothing_is_left(service, keeper)


def test_the_command_updates_and_its_exit_code_says_what_went_wrong(start: Start, keeper: Keeper, other: Path) -> None:
    service = start()
    other.with_suffix(".fault").write_text("memory-promote")
    lacking = fer("update", other, "--json")
    assert lacking.code == 6 and lacking.json["error"]["fields"] == {"needed": 8, "free": 3}
    other.with_suffix(".fault").unlink()
    missing = fer("update", other.with_name("nowhere"), "--json")
    assert missing.code == 2 and missing.json["error"]["kind"] == "CheckpointError"
    done = fer("update", other, "--keep-old")
    assert done.code == 0, done.err
    assert f"version 3 of {other}" in done.out and "kept: tiny-0: --keep-old" in done.out
    serves(service, 3)
    nothing_is_left(service, keeper)
    assert fer("update", other).code == 2, "no service runs any more"


def test_where_memory_is_short_the_batch_engine_gives_way(
    start: Start, keeper: Keeper, other: Path, room: Room
) -> None:
    room.grow(3)  # the weights, and two caches
    service = start(batch=True)
    service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")
    slow = service.stream("once", 100, service_tier="flex").read(5)
    whole: list[Reply] = []
    asking = threading.Thread(target=lambda: whole.append(service.complete("w", 100, service_tier="flex")), daemon=True)
    asking.start()
    service.until_status("both are there", lambda status: status["batch"]["in_flight"] == 2)
    assert update(service, other).status == 200
    slow.rest()
    assert slow.error is not None and slow.error["code"] == "model_updated", "its engine had to end before the answer"
    asking.join(LIMIT_S)
    assert whole[0].text == expected("w", 100, SALT)
    status = service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")
    assert status["batch"]["preempted"] == {"memory": 1}
    serves(service, 2)
    nothing_is_left(service, keeper)


def test_where_there_is_no_room_to_publish_the_batch_engine_gives_way_too(
    start: Start, keeper: Keeper, other: Path, room: Room
) -> None:
    room.grow(4)  # both models' weights and two caches, and no slab beside
    service = start(batch=True)
    service.until_status("batch answers", lambda status: status["batch"]["role"] == "batch")
    other.with_suffix(".fault").write_text("publish")
    reply = update(service, other)
    assert reply.status == 200 and reply.json["evicted"] == ["tiny-0"], reply.body
    assert service.status()["batch"]["preempted"] == {"memory": 1}
    (stage,) = service.admin("GET", "/status").json["members"][0]["recovery"]["stages"].values()
    assert stage["path"] == "attached", "the second start had the room"
    serves(service, 2)
    nothing_is_left(service, keeper)


def test_without_memory_an_update_is_refused_with_figures(
    start: Start, keeper: Keeper, other: Path, room: Room
) -> None:
    room.grow(2)
    service = start()
    reply = update(service, other)
    assert reply.status == 409 and reply.json["fer"]["kind"] == "OutOfMemory"
    assert reply.json["fer"]["fields"] == {"needed": 1, "free": 0}
    serves(service, 1)
    nothing_is_left(service, keeper)


def test_one_at_a_time(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(standbys=1)
    other.with_suffix(".fault").write_text("slow")
    done = meanwhile(service, other)
    at_step(service, "starting")
    second = update(service, other)
    assert second.status == 409 and second.json["error"]["code"] == "update_runs"
    assert service.admin("POST", "/admin/switch").status == 409
    other.with_suffix(".fault").unlink()
    assert done().status == 200
    serves(service, 2, standbys=1)
    nothing_is_left(service, keeper)


@pytest.mark.parametrize("step", ["starting", "switching", "trial"])
def test_the_death_of_the_old_engine_in_the_middle(start: Start, keeper: Keeper, other: Path, step: str) -> None:
    service = start(standbys=1, settle_s=1.0)
    stream = service.stream("once", 250).read(10)
    if step == "starting":
        other.with_suffix(".fault").write_text("slow")
    done = meanwhile(service, other)
    if step == "trial":
        stream.rest()
    at_step(service, step)
    role = {"starting": "active", "switching": "draining", "trial": "standby"}[step]
    kill_and_wait(pid_of(service, role, 1))
    other.with_suffix(".fault").unlink(missing_ok=True)
    assert stream.rest().text == expected("once", 250), "an engine with the same weights went on with it"
    assert done().status == 200, done().body
    serves(service, 2, standbys=1)
    nothing_is_left(service, keeper)


def test_the_death_of_the_new_engine_while_answers_end(start: Start, keeper: Keeper, other: Path) -> None:
    service = start()
    stream = service.stream("once", 200).read(10)
    done = meanwhile(service, other)
    at_step(service, "switching")
    kill_and_wait(pid_of(service, "standby", 2))
    assert stream.rest().text == expected("once", 200)
    assert done().status == 409
    serves(service, 1)
    nothing_is_left(service, keeper)


def test_the_death_of_the_new_engine_after_its_first_token(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(settle_s=20.0)
    done = meanwhile(service, other)
    at_step(service, "trial")
    stream = service.stream("once", 200).read(5)
    service.kill_worker()
    assert stream.rest().text == expected("once", 200, SALT), "the new model is the service's"
    assert done().status == 200
    serves(service, 2)
    nothing_is_left(service, keeper)


def test_the_keeper_killed_in_the_middle(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(standbys=1)
    stream = service.stream("once", 200).read(10)
    done = meanwhile(service, other)
    at_step(service, "switching")
    keeper.kill()
    assert stream.rest().text == expected("once", 200)
    assert done().status == 200, done().body
    serves(service, 2, standbys=1)
    assert holders(keeper) == [service.status()["pid"]]
    nothing_is_left(service, keeper)


def test_while_the_service_recovers_the_new_model_is_the_cure(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(first_delay_s=20.0)
    other.with_name("tiny.fault").write_text("die")  # the old model's engines do not start any more
    service.kill_worker()
    service.until("backoff")
    waiting = meanwhile(service, other)
    assert waiting().status == 200, waiting().body
    assert service.complete("hello", 20).text == expected("hello", 20, SALT)
    serves(service, 2)
    nothing_is_left(service, keeper)


def test_files_changed_in_place_never_complete_an_answer_of_those_before(start: Start, keeper: Keeper) -> None:
    service = start()
    stream = service.stream("once", 200).read(10)
    (service.fault.with_name("tiny") / "config.json").write_text(f'{{"salt": {SALT}}}')
    service.kill_worker()
    stream.rest()
    assert stream.error is not None and stream.error["code"] == "model_updated"
    assert expected("once", 200).startswith(stream.text)
    nothing_is_left(service, keeper)


def test_the_end_of_the_service_ends_an_update(start: Start, keeper: Keeper, other: Path) -> None:
    service = start()
    other.with_suffix(".fault").write_text("slow")
    done = meanwhile(service, other)
    at_step(service, "starting")
    nothing_is_left(service, keeper)
    assert done().status == 503


def test_updates_leave_nothing_behind(start: Start, keeper: Keeper, other: Path) -> None:
    service = start(standbys=1)
    old = other.with_name("tiny")
    assert update(service, other, keep_old=True).json["kept"] == {"tiny-0": "--keep-old"}
    serves(service, 2, standbys=1)
    back = update(service, old)
    assert back.json["evicted"] == [f"other-{SALT}"] and back.json["version"] == 3
    assert both(service, 1) and service.complete("hello", 20).text == expected("hello", 20)

    def held() -> list[int]:
        return [len(open_descriptors(service.process.pid)), keeper.status().descriptors, len(keeper.descriptors())]

    counted = held()
    for model in (other, old):
        assert update(service, model).status == 200
        both(service, 1)

    def settled() -> bool:
        return all(now <= before for now, before in zip(held(), counted, strict=True))

    wait_until(settled, f"as many descriptors as before: {counted}, {held()}", 5.0)
    nothing_is_left(service, keeper)
