"""Kill, starve and break every step; nothing is lost, nothing leaks, the engine serves what is right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fer.weights.keeper.start import start_keeper
from tests.support import recovery_model
from tests.support.keeper import wait_until
from tests.support.processes import WAIT_S, Children, kill_and_wait, with_variable
from tests.support.recovery import EngineProcess, keeper, keeper_descriptors, wait_for_digests

PUBLISH = ["find", "claim", "load", "prepare", "begin", "create", "move", "seal", "add_slabs", "commit"]
ATTACH = ["find", "lease", "map-one", "map", "check", "bind"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recovery_model.make_checkpoint(tmp_path / "model")


def start(children: Children, folder: Path, **asked: Any) -> EngineProcess:
    return EngineProcess(children, folder, **asked)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", PUBLISH)
def test_an_engine_killed_while_publishing_leaves_nothing(
    children: Children, folder: Path, step: str, when: str
) -> None:
    start_keeper()
    empty = keeper_descriptors()
    victim = start(children, folder, fault={"at": step, "when": when, "do": "kill-self"})
    assert victim.row() == {"fired": step}
    victim.wait()
    with keeper() as client:
        status = client.status()
        committed = (step, when) == ("commit", "after")
        assert len(status.editions) == committed
        assert not status.pending
        assert not status.claims
        if committed:
            client.evict()
    assert keeper_descriptors() == empty
    row = start(children, folder).result()
    assert row["path"] == "loaded"
    assert row["details"]["published"]
    assert row["answer"] == recovery_model.expected(folder)


@pytest.mark.parametrize("step", ATTACH)
def test_an_engine_killed_while_attaching_leaves_the_edition_as_it_was(
    children: Children, folder: Path, step: str
) -> None:
    first = start(children, folder)
    right = first.result()["answer"]
    first.kill()
    before = keeper_descriptors()
    victim = start(children, folder, fault={"at": step, "when": "after", "do": "kill-self"})
    assert victim.row() == {"fired": step}
    victim.wait()
    assert keeper_descriptors() == before
    with keeper() as client:
        (info,) = client.status().editions
        assert not info.holders
    row = start(children, folder, options={"verify": "full"}).result()
    assert (row["path"], row["answer"]) == ("attached", right)


@pytest.mark.parametrize("step", ["find", "claim", "load", "begin", "move", "seal", "add_slabs", "commit"])
def test_a_keeper_killed_while_an_engine_publishes_is_not_noticed(children: Children, folder: Path, step: str) -> None:
    start_keeper()
    engine = start(children, folder, fault={"at": step, "when": "before", "do": "kill-keeper"})
    row = engine.result()
    assert row["fired"]
    assert row["path"] == "loaded"
    assert row["details"]["published"], row
    again = start(children, folder).result()
    assert (again["path"], again["answer"]) == ("attached", row["answer"])


@pytest.mark.parametrize("step", ["find", "lease", "map", "bind"])
def test_a_keeper_killed_while_an_engine_attaches_is_not_noticed(children: Children, folder: Path, step: str) -> None:
    first = start(children, folder)
    right = first.result()["answer"]
    second = start(children, folder, fault={"at": step, "when": "before", "do": "kill-keeper"})
    row = second.result()
    assert row["fired"]
    assert (row["path"], row["answer"]) == ("attached", right)
    with keeper() as client:
        (info,) = client.status().editions
        assert {holder.pid for holder in info.holders} == {first.process.pid, second.process.pid}
    assert first.ask("answer")["answer"] == right


@pytest.mark.parametrize("skip", [0, 1])
def test_no_room_for_a_slab_leaves_the_engine_running(children: Children, folder: Path, skip: int) -> None:
    fault = {"at": "create", "when": "before", "do": "no-room", "skip": skip}
    row = start(children, folder, fault=fault, options={"slab_bytes": 65536}).result()
    assert row["fired"]
    assert row["path"] == "loaded"
    assert not row["details"]["published"]
    assert "OutOfMemory" in row["why"]
    assert row["answer"] == recovery_model.expected(folder)
    with keeper() as client:
        assert not client.status().editions
        assert not client.status().pending


def test_a_bug_of_ours_in_publish_does_not_take_the_engine_down(children: Children, folder: Path) -> None:
    row = start(children, folder, fault={"at": "seal", "when": "after", "do": "bug"}).result()
    assert row["path"] == "loaded"
    assert "please report" in row["why"]
    assert row["answer"] == recovery_model.expected(folder)


def test_a_descriptor_that_no_longer_imports_drops_its_edition(children: Children, folder: Path) -> None:
    start(children, folder).result()
    row = start(children, folder, fault={"at": "map-one", "when": "before", "do": "slab-lost"}).result()
    assert row["fired"]
    assert row["path"] == "loaded"
    assert "does not import" in row["why"]
    assert row["answer"] == recovery_model.expected(folder)
    assert start(children, folder).result()["path"] == "attached"


@pytest.mark.parametrize(
    ("step", "deed"),
    [
        ("map-one", "no-room"),
        ("check", "no-room-for-torch"),
        ("check", "no-room-for-a-kernel"),
        ("bind", "no-room-for-torch"),
    ],
)
def test_memory_that_comes_in_a_moment_is_waited_for(children: Children, folder: Path, step: str, deed: str) -> None:
    first = start(children, folder)
    published = first.result()
    first.kill()
    before = keeper_descriptors()
    again = start(children, folder, fault={"at": step, "when": "before", "do": deed, "times": 3})
    row = again.result()
    assert row["fired"]
    assert (row["path"], row["answer"]) == ("attached", published["answer"])
    assert row["details"]["edition"] == published["details"]["edition"]
    with keeper() as client:
        (info,) = client.status().editions
        assert [holder.pid for holder in info.holders] == [again.process.pid], "one lease, whatever was tried before"
    again.kill()
    wait_until(lambda: keeper_descriptors() == before, "no lease is left")


@pytest.mark.parametrize("deed", ["no-room", "no-room-for-torch"])
def test_an_edition_is_not_given_up_for_want_of_memory(children: Children, folder: Path, deed: str) -> None:
    first = start(children, folder)
    kept = first.result()["details"]["edition"]
    first.kill()
    lacking = start(children, folder, fault={"at": "bind", "when": "before", "do": deed, "times": 1 << 30})
    row = lacking.result()
    assert (row["path"], row["answer"]) == ("loaded", recovery_model.expected(folder))
    assert "could not be attached" in row["why"] and not row["details"]["published"], "it is kept once already"
    with keeper() as client:
        (info,) = client.status().editions
        assert info.edition == kept and not info.holders
    assert start(children, folder).result()["details"]["edition"] == kept


def both(
    children: Children, folder: Path, launch: str, fault: dict[str, Any] | None = None, **asked: Any
) -> list[EngineProcess]:
    """Two ranks of a launch; the second one has the fault."""
    store = str(folder.parent / f"store-{launch}")
    engines = []
    for rank in range(2):
        place = {"tp_size": 2, "tp_rank": rank, "local_size": 2, "launch": launch}
        engines.append(start(children, folder, ranks=place, store=store, fault=fault if rank else None, **asked))
    return engines


def test_ranks_wait_for_one_that_lacks_memory_and_lose_no_edition(children: Children, folder: Path) -> None:
    lacks = {"at": "bind", "when": "before", "do": "no-room"}
    editions: set[str] = set()
    for launch, fault, path in [
        ("first", None, "loaded"),
        ("a-moment", {**lacks, "times": 3}, "attached"),
        ("for-good", {**lacks, "times": 1 << 30}, "loaded"),
        ("last", None, "attached"),
    ]:
        engines = both(children, folder, launch, fault)
        rows = [engine.result() for engine in engines]
        assert [row["path"] for row in rows] == [path] * 2, (launch, rows)
        assert all(row["answer"] == recovery_model.expected(folder) for row in rows)
        with keeper() as client:
            now = {info.edition for info in client.status().editions}
        editions = editions or now
        assert len(now) == 2 and now == editions, launch
        for engine in engines:
            engine.kill()


def test_ranks_of_which_one_has_to_give_way_all_the_same_are_kept_anew(children: Children, folder: Path) -> None:
    room = int(2.6 * _size(folder))
    fault = {"at": "bind", "when": "before", "do": "no-room", "times": 1 << 30}
    for launch, lacks, path in (("first", None, "loaded"), ("lacking", fault, "loaded"), ("last", None, "attached")):
        engines = both(children, folder, launch, lacks, room=room)
        rows = [engine.result() for engine in engines]
        assert [row["path"] for row in rows] == [path] * 2, (launch, rows)
        assert path == "attached" or all(row["details"]["published"] for row in rows), (launch, rows)
        assert all(row["answer"] == recovery_model.expected(folder) for row in rows)
        for engine in engines:
            engine.kill()


def test_one_that_has_to_give_way_all_the_same_is_kept_anew(children: Children, folder: Path) -> None:
    room = int(1.3 * _size(folder))
    first = start(children, folder, room=room)
    kept = first.result()["details"]["edition"]
    first.kill()
    fault = {"at": "bind", "when": "before", "do": "no-room", "times": 1 << 30}
    lacking = start(children, folder, room=room, fault=fault)
    row = lacking.result()
    assert row["path"] == "loaded" and row["details"]["evicted"] == [kept] and row["details"]["published"], row
    lacking.kill()
    assert start(children, folder, room=room).result()["path"] == "attached"


def test_a_checkpoint_that_changes_while_it_is_loaded_is_not_published(children: Children, folder: Path) -> None:
    shard = str(folder / "model-00001-of-00002.safetensors")
    row = start(children, folder, fault={"at": "load", "when": "after", "do": "append", "file": shard}).result()
    assert row["path"] == "loaded"
    assert "changed while it was loaded" in row["why"]
    with keeper() as client:
        assert not client.status().editions


def test_a_changed_fingerprint_evicts_what_is_in_the_way(children: Children, folder: Path) -> None:
    room = int(2.5 * _size(folder))
    first = start(children, folder, room=room)
    assert first.result()["details"]["published"]
    first.kill()
    for revision in ("b", "c", "d"):
        engine = start(children, folder, room=room, engine={"revision": revision})
        row = engine.result()
        assert row["path"] == "loaded", row
        assert row["details"]["published"], row
        engine.kill()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def test_where_only_leased_editions_are_left_the_error_says_who_and_how_much(children: Children, folder: Path) -> None:
    room = int(1.8 * _size(folder))
    holder = start(children, folder, room=room)
    holder.result()
    row = start(children, folder, room=room, engine={"revision": "b"}).result()
    error = row["error"]
    assert error["kind"] == "OutOfMemory"
    assert error["fields"]["needed"] > error["fields"]["free"]
    assert str(holder.process.pid) in error["why"]
    assert "fer evict" in error["fix"]
    with keeper() as client:
        assert len(client.status().editions) == 1


def test_the_keeper_and_its_parent_die_and_the_engine_goes_on(
    children: Children, folder: Path, runtime_dir: Path
) -> None:
    first = start(children, folder)
    right = first.result()["answer"]
    for pid in with_variable("FER_RUNTIME_DIR", str(runtime_dir)):
        if pid != first.process.pid:
            kill_and_wait(pid)
    assert first.ask("answer")["answer"] == right
    row = start(children, folder).result()
    assert row["path"] == "loaded"
    assert row["details"]["published"]
    assert row["answer"] == right


def test_many_starts_and_kills_leave_everything_flat(children: Children, folder: Path, runtime_dir: Path) -> None:
    start(children, folder).result()
    wait_for_digests()
    before = keeper_descriptors()
    for _ in range(5):
        engine = start(children, folder)
        assert engine.result()["path"] == "attached"
        engine.kill()
    assert keeper_descriptors() == before


def test_an_engine_ends_though_its_checkpoint_is_still_being_hashed(children: Children, folder: Path) -> None:
    module, file = "tests.support.digests_child", folder / "model-00001-of-00002.safetensors"
    engine = children.spawn([sys.executable, "-m", module, file])
    assert engine.communicate(timeout=3 * WAIT_S) == ("ends\n", "")
    assert engine.returncode == 0


def test_an_edition_of_another_structure_stays_for_those_who_use_it(children: Children, folder: Path) -> None:
    holder = start(children, folder)
    right = holder.result()["answer"]
    odd = {"at": "bind", "when": "after", "do": "structure"}
    row = start(children, folder, fault=odd).result()
    assert row["fired"]
    assert (row["path"], row["answer"]) == ("loaded", right)
    assert "fer evict" in row["why"]
    with keeper() as client:
        held = {held.pid for info in client.status().editions for held in info.holders}
        assert holder.process.pid in held
    assert start(children, folder).result()["path"] == "attached"


def test_an_unused_edition_that_cannot_be_attached_makes_way_for_the_new_one(children: Children, folder: Path) -> None:
    first = start(children, folder)
    old = first.result()["details"]["edition"]
    first.kill()
    row = start(children, folder, fault={"at": "bind", "when": "after", "do": "structure"}).result()
    assert row["path"] == "loaded"
    assert row["details"]["published"], row
    assert row["details"]["edition"] != old
    assert start(children, folder).result()["details"]["edition"] == row["details"]["edition"]


@pytest.mark.parametrize("step", ["find", "claim", "load", "begin", "add_slabs", "commit"])
def test_a_keeper_stopped_for_good_leaves_an_engine_that_loads(children: Children, folder: Path, step: str) -> None:
    start_keeper()
    engine = start(children, folder, fault={"at": step, "when": "before", "do": "stop-keeper"})
    row = engine.result()
    assert row["fired"]
    assert row["path"] == "loaded", row
    assert not row["details"]["published"]
    assert row["answer"] == recovery_model.expected(folder)
    assert engine.ask("answer")["answer"] == row["answer"]


@pytest.mark.parametrize("step", ["lease", "map", "bind"])
def test_a_keeper_stopped_while_an_engine_attaches_fails_no_start(children: Children, folder: Path, step: str) -> None:
    first = start(children, folder)
    right = first.result()["answer"]
    row = start(children, folder, fault={"at": step, "when": "before", "do": "stop-keeper"}).result()
    assert row["fired"]
    assert row["answer"] == right
    assert first.ask("answer")["answer"] == right


def test_a_waiter_whose_keeper_is_stopped_loads_for_itself(children: Children, folder: Path) -> None:
    loader = start(children, folder, fault={"at": "load", "when": "before", "do": "hang"})
    assert loader.row() == {"fired": "load"}
    waiter = start(children, folder)
    with keeper() as client:
        wait_until(lambda: bool(client.status().waiting), "the second engine waits")
        client.stop(force=True)
    row = waiter.result()
    assert (row["path"], row["answer"]) == ("loaded", recovery_model.expected(folder))


def test_no_room_for_private_copies_leaves_mutable_tensors_writable(children: Children, folder: Path) -> None:
    fault = {"at": "copies", "when": "before", "do": "no-room"}
    engine = start(children, folder, fault=fault, engine={"mutable": ["embed.weight"]})
    row = engine.result()
    assert row["fired"]
    assert not row["details"]["published"]
    assert engine.ask("write")["wrote"]


def test_full_verification_compares_the_tensors_digests(children: Children, folder: Path) -> None:
    first = start(children, folder)
    edition = first.result()["details"]["edition"]
    wait_for_digests()
    with keeper() as client, client.lease(edition) as leased:
        assert leased.digests is not None
        digests = dict.fromkeys(json.loads(leased.digests), "0" * 64)
        client.annotate(edition, digests=json.dumps(digests).encode())
    assert start(children, folder).result()["path"] == "attached"
    row = start(children, folder, options={"verify": "full"}).result()
    assert row["path"] == "loaded"
    assert "its sha256 differs" in row["why"]
    assert row["answer"] == recovery_model.expected(folder)


def test_a_device_that_cannot_be_opened_for_slabs_leaves_an_engine_that_loads(children: Children, folder: Path) -> None:
    fault = {"at": "open", "when": "before", "do": "no-driver"}
    row = start(children, folder, fault=fault).result()
    assert row["fired"]
    assert (row["path"], row["answer"]) == ("loaded", recovery_model.expected(folder))
    assert "bindings of the driver are missing" in row["why"]
    row = start(children, folder, fault=fault, options={"on_miss": "fail"}).result()
    assert row["error"]["kind"] == "Miss"
