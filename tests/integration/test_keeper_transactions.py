"""Publishing: begin, add slabs, commit; and a publisher that dies at each step."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from fer.errors import ProtocolError, Refused
from fer.memory.fd import Fd
from fer.memory.seal import read_sealed, sealed_bytes
from fer.weights.client import SlabInfo
from fer.weights.keeper import offsets
from fer.weights.keeper.records import PAYLOADS
from tests.support.keeper import PAGE, Keeper, begin, engine_at, gpu_slab, key, publish, slab, wait_until
from tests.support.processes import WAIT_S, Children


def test_an_edition_comes_back_as_it_was_given(keeper: Keeper, no_fd_leak: None) -> None:
    with keeper.client() as client:
        transaction = client.begin(key(), fields=b"fields", checkpoint=b"identity", total=3 * PAGE).transaction
        for byte in (b"a", b"b", b"c"):
            with slab(byte) as fd:
                client.add_slabs(transaction, [(SlabInfo("host", PAGE), fd)])
        edition = client.commit(transaction, b"the manifest", wait_s=1).edition
    with keeper.client() as client:
        found = client.find(key())
        assert [(c.edition, c.checkpoint, c.digests) for c in found.candidates] == [(edition, b"identity", False)]
        with client.lease(edition) as leased:
            assert leased.manifest == b"the manifest"
            assert leased.checkpoint == b"identity"
            assert leased.digests is None
            assert [read_sealed(fd, PAGE)[:1] for _, fd in leased.slabs] == [b"a", b"b", b"c"]
            assert [info for info, _ in leased.slabs] == [SlabInfo("host", PAGE)] * 3


def test_more_slabs_than_one_message_carries(keeper: Keeper, no_fd_leak: None) -> None:
    with keeper.client() as client:
        edition = publish(client, key(), slabs=600)
        with client.lease(edition) as leased:
            assert len(leased.slabs) == 600
        assert client.status().editions[0].bytes == 600 * PAGE


def test_nothing_is_visible_before_commit(keeper: Keeper) -> None:
    with keeper.client() as client, keeper.client() as other:
        transaction = begin(client, key())
        assert other.find(key()).candidates == []
        assert [pending.begun for pending in other.status().pending] == [["tp0/1"]]
        with pytest.raises(Refused):
            other.lease(transaction)
        with pytest.raises(Refused):
            other.commit(transaction, b"m", wait_s=1)


def test_an_aborted_transaction_leaves_nothing(keeper: Keeper) -> None:
    with keeper.client() as client:
        before = keeper.descriptors()
        client.abort(begin(client, key()))
        assert keeper.descriptors() == before
        status = client.status()
        assert (status.pending, status.claims, status.editions) == ([], [], [])
        publish(client, key())


def test_the_same_edition_is_not_kept_twice(keeper: Keeper) -> None:
    with keeper.client() as client:
        publish(client, key())
        with pytest.raises(Refused) as caught:
            begin(client, key())
        assert caught.value.fields["code"] == "exists"


def test_another_checkpoint_under_the_same_key_lives_beside_it(keeper: Keeper) -> None:
    with keeper.client() as client:
        editions = {publish(client, key(), checkpoint=content) for content in (b"base", b"fine-tune")}
        found = client.find(key()).candidates
        assert {candidate.edition for candidate in found} == editions
        assert {candidate.checkpoint for candidate in found} == {b"base", b"fine-tune"}


def test_near_misses_are_told(keeper: Keeper) -> None:
    with keeper.client() as client:
        other_gpu = publish(client, key(gpu="GPU-1"))
        other_group = publish(client, key(group="h"))
        publish(client, key(group="h", gpu="GPU-1"))
        found = client.find(key())
        assert found.candidates == []
        assert {(n.edition, n.gpu, n.fields) for n in found.near} == {
            (other_gpu, "GPU-1", b"fields of g"),
            (other_group, "host", b"fields of h"),
        }


def test_offsets_of_one_gpu_do_not_overlap(keeper: Keeper) -> None:
    with keeper.client() as client:
        first = client.begin(key("a", gpu="GPU-1"), fields=b"", checkpoint=b"", total=3 << 20)
        second = client.begin(key("b", gpu="GPU-1"), fields=b"", checkpoint=b"", total=1)
        elsewhere = client.begin(key("c", gpu="GPU-2"), fields=b"", checkpoint=b"", total=1)
        on_host = client.begin(key("d"), fields=b"", checkpoint=b"", total=1)
        assert [b.offset for b in (first, second, elsewhere, on_host)] == [0, 2 * offsets.ALIGNMENT, 0, 0]
        client.abort(first.transaction)
        again = client.begin(key("e", gpu="GPU-1"), fields=b"", checkpoint=b"", total=4 << 20)
        assert again.offset == 0


def test_annotations_replace_what_was_there(keeper: Keeper, no_fd_leak: None) -> None:
    with keeper.client() as client:
        edition = publish(client, key(), checkpoint=b"stat only")
        before = len(keeper.descriptors())
        client.annotate(edition, checkpoint=b"with digest")
        client.annotate(edition, digests=b"sha256 of all")
        client.annotate(edition, digests=b"once more")
        client.annotate(edition)
        assert len(keeper.descriptors()) == before + 1
        with client.lease(edition) as leased:
            assert (leased.checkpoint, leased.digests) == (b"with digest", b"once more")
        assert client.find(key()).candidates[0].digests
        with pytest.raises(Refused):
            begin(client, key(), checkpoint=b"with digest")


def test_a_lost_edition_is_dropped_with_its_group(keeper: Keeper) -> None:
    with keeper.client("reader") as client, keeper.client() as other:
        edition = publish(client, key())
        other.lease(edition).close()
        other.report_lost(edition, "the driver was reloaded")
        other.report_lost(edition, "the driver was reloaded")
        assert client.find(key()).candidates == []
        client.release(edition)
        with pytest.raises(Refused) as caught:
            client.lease(edition)
        assert caught.value.fields["code"] == "unknown_edition"
    [lost] = keeper.events("lost")
    assert "the driver was reloaded" in lost
    assert "reader" in lost


def test_only_who_has_a_lease_speaks_about_an_edition(keeper: Keeper, no_fd_leak: None) -> None:
    with keeper.client() as client, keeper.client() as other:
        edition = publish(client, key(), checkpoint=b"as loaded")
        before = len(keeper.descriptors())
        for call in (
            lambda: other.annotate(edition, checkpoint=b"forged"),
            lambda: other.annotate(edition, digests=b"forged"),
            lambda: other.report_lost(edition, "it is mine no more"),
        ):
            with pytest.raises(Refused) as caught:
                call()
            assert caught.value.fields["code"] == "not_leased"
        [found] = other.find(key()).candidates
        assert (found.edition, found.checkpoint, found.digests) == (edition, b"as loaded", False)
        assert len(keeper.descriptors()) == before
        other.lease(edition).close()
        other.annotate(edition, digests=b"compared")
        other.release(edition)
        with pytest.raises(Refused):
            other.annotate(edition, digests=b"forged")


def test_an_exporter_takes_its_memory_back_over_any_connection(keeper: Keeper, children: Children) -> None:
    with keeper.client("exporter") as exporter, keeper.client() as again:
        transaction = exporter.begin(key(gpu="GPU-1"), fields=b"", checkpoint=b"", total=1 << 30).transaction
        with sealed_bytes("handle", b"legacy handle") as fd:
            exporter.add_slabs(transaction, [(SlabInfo("cuda-ipc", 1 << 30), fd)])
        edition = exporter.commit(transaction, b"manifest", wait_s=1).edition
        stranger = children.python(_REPORT, str(keeper.directory), edition)
        assert stranger.communicate(timeout=WAIT_S) == ("not_leased\n", "")
        again.report_lost(edition, "this process ends")
        assert again.status().editions == []


_REPORT = """
import sys
from pathlib import Path
from fer.errors import Refused
from fer.weights.client import KeeperClient
try:
    KeeperClient.connect(Path(sys.argv[1])).report_lost(sys.argv[2], "a stranger says so")
except Refused as error:
    print(error.fields["code"])
"""


def test_memory_that_lives_with_its_exporter_goes_with_it(keeper: Keeper) -> None:
    with keeper.client("reader") as reader:
        with keeper.client("exporter") as exporter:
            transaction = exporter.begin(key(gpu="GPU-1"), fields=b"", checkpoint=b"", total=1 << 30).transaction
            with sealed_bytes("handle", b"legacy handle") as fd:
                exporter.add_slabs(transaction, [(SlabInfo("cuda-ipc", 1 << 30), fd)])
            edition = exporter.commit(transaction, b"manifest", wait_s=1).edition
            exporter.release(edition)
            reader.lease(edition).close()
            assert reader.status().editions[0].transport == "cuda-ipc"
        assert reader.status().editions == []
    [lost] = keeper.events("lost")
    assert "exporter" in lost


@pytest.mark.parametrize("size", [1, 3])
def test_slabs_stay_within_what_was_announced(keeper: Keeper, size: int) -> None:
    with keeper.client() as client, gpu_slab() as fd:
        of = key(gpu="GPU-1")
        transaction = client.begin(of, fields=b"", checkpoint=b"", total=2 * offsets.ALIGNMENT).transaction
        infos = [(SlabInfo("cuda", offsets.ALIGNMENT), fd)] * size
        if size == 1:
            client.add_slabs(transaction, infos)
        else:
            with pytest.raises(Refused) as caught:
                client.add_slabs(transaction, infos)
            assert caught.value.fields["code"] == "too_big"


def test_descriptors_of_all_kinds_are_counted(keeper: Keeper) -> None:
    with keeper.client() as client, slab() as fd:
        publish(client, key("first"), slabs=10)
        resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (144, 144))  # half of what lies above 64, less the peers
        transaction = client.begin(key("second"), fields=b"", checkpoint=b"", total=64 * PAGE).transaction
        held = 10 + 2 * len(PAYLOADS)
        room = (144 - 64) // 2 - 1 - held
        with pytest.raises(Refused, match="descriptors") as caught:
            client.add_slabs(transaction, [(SlabInfo("host", PAGE), fd)] * (room + 1))
        assert caught.value.fields["code"] == "too_many_descriptors"
        client.add_slabs(transaction, [(SlabInfo("host", PAGE), fd)] * room)
        with pytest.raises(Refused) as caught:
            client.begin(key("third"), fields=b"", checkpoint=b"", total=PAGE)
        assert caught.value.fields["code"] == "too_many_descriptors"
        edition = client.commit(transaction, b"manifest", wait_s=1).edition
        client.annotate(edition, digests=b"counted from the start")
        with pytest.raises(Refused) as caught:
            client.add_slabs(edition, [(SlabInfo("host", PAGE), fd)])
        assert caught.value.fields["code"] == "unknown_transaction"


@pytest.mark.parametrize("kind", ["unsealed", "wrong size", "file", "pipe", "wrong kind"])
def test_what_is_no_slab_ends_the_connection(keeper: Keeper, kind: str, tmp_path: Path, no_fd_leak: None) -> None:
    before = keeper.descriptors()
    with keeper.client() as client:
        transaction = client.begin(key(), fields=b"", checkpoint=b"", total=PAGE).transaction
        info = SlabInfo("cuda" if kind == "wrong kind" else "host", PAGE + (kind == "wrong size"))
        if kind == "unsealed":
            fd = Fd(os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(fd.fileno(), PAGE)
        elif kind == "file":
            (tmp_path / "file").write_bytes(bytes(PAGE))
            fd = Fd(os.open(tmp_path / "file", os.O_RDONLY | os.O_CLOEXEC))
        elif kind == "pipe":
            read, write = os.pipe()
            os.close(write)
            fd = Fd(read)
        else:
            fd = slab()
        with fd, pytest.raises(ProtocolError) as caught:
            client.add_slabs(transaction, [(info, fd)])
        assert caught.value.fields["code"] == "not_a_slab"
    wait_until(lambda: keeper.descriptors() == before, "the keeper's descriptors are those of before")
    assert keeper.status().pending == []


@pytest.mark.parametrize("step", ["connect", "find", "claim", "begin", "add", "commit"])
def test_a_publisher_killed_at_any_step_leaves_nothing_unfinished(
    keeper: Keeper, children: Children, step: str
) -> None:
    with keeper.client() as observer:
        observer.status()
        before, stored = keeper.descriptors(), keeper.stored()
        child = engine_at(children, keeper, step, key())
        children.kill(child)
        status = observer.status()
        assert (status.pending, status.claims, len(status.connections)) == ([], [], 1)
        if step == "commit":
            [edition] = status.editions
            assert edition.holders == []
            observer.evict(edition.edition)
        assert observer.status().editions == []
        assert keeper.descriptors() == before
        assert keeper.stored() == stored
        publish(observer, key())


def test_the_next_engine_takes_over_from_a_killed_one(keeper: Keeper, children: Children) -> None:
    child = engine_at(children, keeper, "add", key())
    with keeper.client() as client:
        claim = client.claim(key(launch="next"), wait_s=0)
        assert (claim.outcome, claim.holder.label if claim.holder else "") == ("timeout", "victim")
        children.kill(child)
        assert client.claim(key(launch="next"), wait_s=20).outcome == "claimed"


def test_a_waiting_claim_is_answered_by_what_is_published(keeper: Keeper) -> None:
    with keeper.client() as loader, keeper.client() as waiter:
        assert loader.claim(key(), wait_s=0).outcome == "claimed"
        waiter.find(key(launch="other"))
        outcomes: list[str] = []
        thread = threading.Thread(
            target=lambda: outcomes.append(waiter.claim(key(launch="other"), wait_s=20).outcome), daemon=True
        )
        thread.start()
        wait_until(lambda: len(keeper.status().waiting) == 1, "it waits")
        edition = publish(loader, key())
        thread.join(20)
        assert outcomes == ["look_again"]
        assert [c.edition for c in waiter.find(key(launch="other")).candidates] == [edition]
