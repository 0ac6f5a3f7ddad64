"""Graphs walked, rebuilt and read back over a pretended driver's real structures."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fer.cudagraph import archive as archives
from fer.cudagraph.archive import Archive, Content
from fer.cudagraph.build import Builder
from fer.cudagraph.graph import Graph
from fer.cudagraph.load import Binaries
from fer.cudagraph.records import Image, Tables
from fer.cudagraph.restore import Restorer
from fer.cudagraph.walk import describe, walk
from fer.errors import DriverError, FerBug, GraphRefused
from tests.support.cudagraph_driver import FakeDriver, FakeFunction, cubin
from tests.support.keeper import wait_until

LAYOUT = [(0, 8), (8, 8), (16, 4), (24, 8)]  # a gap of four bytes, as compilers leave them
PROGRAMMATIC = 1 | 1 << 16  # from port 1, type programmatic
CLUSTER = struct.pack("<III", 2, 1, 1).ljust(64, b"\0")


def captured(fake: FakeDriver) -> int:
    """A graph with all that torch's captures hold."""
    plain = fake.function("plain", LAYOUT)
    packed = fake.function("packed", [(0, 128)])
    graph = fake.graph()
    words = [struct.pack("<Q", 0x3A7B_0000_1000), struct.pack("<Q", 5), struct.pack("<I", 9), struct.pack("<d", 1.5)]
    first = fake.kernel(graph, plain, *words, grid=(4, 2, 1))
    second = fake.kernel(graph, packed, extra=bytes(range(128)), attributes={4: CLUSTER})
    third = fake.kernel(graph, packed, extra=bytes(range(128)), swapped=True)
    memset = fake.other(graph, 2, struct.pack("<QQIIQQ", 0x3A7B_0000_2000, 0, 0, 1, 64, 1))
    copy = bytearray(200)
    struct.pack_into("<I", copy, 32, 2)
    struct.pack_into("<I", copy, 120, 2)
    memcpy = fake.other(graph, 1, bytes(copy))
    empty = fake.other(graph, 5)
    inner = fake.graph()
    fake.kernel(inner, plain, *words)
    child = fake.other(graph, 4, child=inner)
    fake.graphs[graph].edges = [
        (first, second, PROGRAMMATIC),
        (second, third, 0),
        (third, memset, 0),
        (memset, memcpy, 0),
        (memcpy, empty, 0),
        (empty, child, 0),
        (first, third, PROGRAMMATIC),
    ]
    return graph


def walked(fake: FakeDriver, graph: int, name: str = "decode/4") -> tuple[Tables, list[int]]:
    tables, handles = Tables(), []

    def resolve(func: int, kern: int) -> int:
        if func not in handles:
            handles.append(func)
            data = cubin(fake.functions[func].name)
            tables.images.append(Image(data, hashlib.sha256(data).hexdigest()))
            tables.functions.append(describe(fake.cuda, func, len(tables.images) - 1))
        return handles.index(func)

    walk(fake.cuda, graph, name, tables, resolve)
    return tables, handles


def test_a_rebuilt_graph_reads_back_as_the_same() -> None:
    fake = FakeDriver()
    tables, handles = walked(fake, captured(fake))
    builder = Builder(fake.cuda, tables, handles, context=1)
    graph, nodes = builder.build(tables.graphs[0])
    assert builder.read_back(graph, nodes, tables.graphs[0]) == tables.digest(tables.graphs[0])
    kinds = [fake.nodes[node].kind for node in fake.graphs[graph].nodes]
    assert sorted(kinds) == [0, 0, 0, 1, 2, 4, 5]
    assert sorted(data for _, _, data in fake.graphs[graph].edges) == [0] * 5 + [PROGRAMMATIC] * 2


def test_an_executable_has_torchs_flags() -> None:
    fake = FakeDriver()
    tables, handles = walked(fake, captured(fake))
    made = Builder(fake.cuda, tables, handles, context=1).make(tables.graphs[0])
    assert fake.execs == {made: 9}


def test_gaps_between_parameters_are_zeros() -> None:
    fake = FakeDriver()
    tables, _ = walked(fake, captured(fake))
    assert tables.graphs[0].params[20:24].tobytes() == bytes(4)
    assert tables.graphs[0].params[24:32].tobytes() == struct.pack("<d", 1.5)


def test_a_lost_attribute_is_noticed() -> None:
    fake = FakeDriver()
    tables, handles = walked(fake, captured(fake))
    fake.lose_attribute = 4
    with pytest.raises(GraphRefused, match="read-back"):
        Builder(fake.cuda, tables, handles, context=1).make(tables.graphs[0])
    assert not fake.execs


def test_a_changed_parameter_changes_the_digest() -> None:
    fake = FakeDriver()
    tables, _ = walked(fake, captured(fake))
    before = tables.digest(tables.graphs[0])
    tables.graphs[0].params[0] ^= 1
    assert tables.digest(tables.graphs[0]) != before


def test_an_unreadable_attribute_is_recorded_and_never_set() -> None:
    fake = FakeDriver()
    fake.unreadable = {11}
    tables, handles = walked(fake, captured(fake))
    builder = Builder(fake.cuda, tables, handles, context=1)
    builder.make(tables.graphs[0])
    assert all(11 not in node.attributes for node in fake.nodes.values())


def test_a_refused_node_names_its_kernel_and_leaves_nothing() -> None:
    fake = FakeDriver()
    tables, handles = walked(fake, captured(fake))
    tables.graphs[0].nodes = tables.graphs[0].nodes.copy()
    tables.graphs[0].nodes["shared"][0] = 1 << 20
    before = len(fake.graphs)
    with pytest.raises(GraphRefused, match="plain"):
        Builder(fake.cuda, tables, handles, context=1).make(tables.graphs[0])
    assert len(fake.graphs) == before


def prepared(fake: FakeDriver, tmp_path: Path) -> Archive:
    """The archive of one captured graph, read back from disk by a process that has none of its functions."""
    tables, _ = walked(fake, captured(fake))
    path = tmp_path / "a.fergraph"
    digests = {graph.name: tables.digest(graph) for graph in tables.top()}
    archives.write(path, Archive(tables, {"outputs": {}, "digests": digests}, [Content("scratch/0", 0, b"x")]))
    for function in tables.functions:
        fake.layouts[function.name] = FakeFunction(function.name, list(function.layout), [7] * 8 + [0] + [7] * 7)
    return archives.read(path)


def restored(fake: FakeDriver, archive: Archive) -> tuple[Restorer, dict[str, Graph]]:
    graphs: dict[str, Graph] = {}
    restorer = Restorer(archive, fake.cuda, graphs.__setitem__, order=["decode/4"], context=1)
    restorer.start()
    assert restorer.wait(60)
    return restorer, graphs


def test_an_archive_becomes_graphs_that_replay(tmp_path: Path) -> None:
    fake = FakeDriver()
    restorer, graphs = restored(fake, prepared(fake, tmp_path))
    assert not restorer.progress.failed
    graph = graphs["decode/4"]
    graph.stream = lambda: 0
    graph.replay()
    assert fake.launched == [graph.executable]
    graph.reset()
    with pytest.raises(FerBug):
        graph.replay()
    assert not fake.execs


@pytest.mark.parametrize(("device", "entered"), [(None, []), (0, []), (1, [1])])
def test_a_graph_is_launched_on_its_own_gpu(
    monkeypatch: pytest.MonkeyPatch, device: int | None, entered: list[int]
) -> None:
    fake, seen, current = FakeDriver(), list[int](), [0]

    @contextmanager
    def on(number: int) -> Iterator[None]:
        seen.append(number)
        current.append(number)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=70 + current[-1]))
    monkeypatch.setattr(fake.cuda, "launch", lambda executable, stream: seen.append(stream))
    Graph("decode/4", 1, fake.cuda, device=device).replay()
    assert seen == [*entered, 70 + (device or 0)]


def test_dynamic_shared_memory_is_raised_and_never_lowered(tmp_path: Path) -> None:
    fake = FakeDriver()
    archive = prepared(fake, tmp_path)
    fake.layouts["packed"].attributes[8] = 100
    binaries = Binaries(fake.cuda, archive.tables)
    binaries.need([0, 1])
    found = [fake.functions[handle] for handle in binaries.handles]
    assert [(f.name, f.attributes[8]) for f in found] == [("plain", 7), ("packed", 100)]


def test_another_build_of_a_function_fails_its_graph_alone(tmp_path: Path) -> None:
    fake = FakeDriver()
    archive = prepared(fake, tmp_path)
    fake.layouts["plain"].attributes[4] = 99  # registers
    restorer, graphs = restored(fake, archive)
    assert not graphs
    assert "is not what it was" in restorer.progress.failed["decode/4"]


def test_a_damaged_binary_fails_its_graph(tmp_path: Path) -> None:
    fake = FakeDriver()
    archive = prepared(fake, tmp_path)
    for index, image in enumerate(archive.tables.images):
        archive.tables.images[index] = Image(bytes(image.data) + b"!", image.digest)
    restorer, _ = restored(fake, archive)
    assert "damaged" in restorer.progress.failed["decode/4"]


def test_module_variables_are_written(tmp_path: Path) -> None:
    fake = FakeDriver()
    archive = prepared(fake, tmp_path)
    image = archive.tables.images[0]
    archive.tables.images[0] = Image(image.data, image.digest, (("scale", b"\x01\x02\x03\x04"),))
    binaries = Binaries(fake.cuda, archive.tables)
    with pytest.raises(GraphRefused):  # the pretended library has no such variable
        binaries.need([0])
    value = bytearray(4)
    fake.variables.update({(handle, "scale"): value for handle in range(0x1000, 0x4000, 0x10)})
    again = Binaries(fake.cuda, archive.tables)
    again.need([0])
    assert bytes(value) == b"\x01\x02\x03\x04"


def test_driver_errors_name_the_call() -> None:
    fake = FakeDriver()
    fake.refuse["cuGraphCreate"] = 2
    tables, handles = walked(fake, captured(fake))
    with pytest.raises(DriverError, match="cuGraphCreate"):
        Builder(fake.cuda, tables, handles, context=1).build(tables.graphs[0])


def test_equal_parameter_blocks_are_stored_once(tmp_path: Path) -> None:
    fake = FakeDriver()
    archive = prepared(fake, tmp_path)
    tables, _ = walked(fake, captured(fake))
    assert archive.tables.digest(archive.tables.graphs[0]) == tables.digest(tables.graphs[0])
    assert np.array_equal(archive.tables.graphs[0].params, tables.graphs[0].params)


def test_nothing_is_unloaded_under_a_restore_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fer.cudagraph.restore._LONG_S", 0.05)
    fake, entered, go_on = FakeDriver(), threading.Event(), threading.Event()

    def ready(name: str, graph: Graph) -> None:
        entered.set()
        assert go_on.wait(60)

    restorer = Restorer(prepared(fake, tmp_path), fake.cuda, ready, order=["decode/4"], context=1)
    restorer.start()
    assert entered.wait(60)
    try:
        assert not restorer.abandon()
        assert fake.execs
        assert fake.libraries
    finally:
        go_on.set()
    assert restorer.wait(60)
    assert restorer.abandon()
    assert (fake.execs, fake.libraries) == ({}, {})


@pytest.mark.parametrize("call", ["cuGraphInstantiateWithFlags", "cuLibraryLoadData", "cuGraphUpload"])
@pytest.mark.parametrize(("code", "passing"), [(2, {"decode/4"}), (1, set())])
def test_lack_of_memory_speaks_against_no_graph(tmp_path: Path, call: str, code: int, passing: set[str]) -> None:
    fake = FakeDriver()
    archive = prepared(fake, tmp_path)
    fake.refuse[call] = code
    restorer, _ = restored(fake, archive)
    assert call in restorer.progress.failed["decode/4"]
    assert restorer.progress.passing == passing


def test_what_is_cancelled_speaks_against_no_graph(tmp_path: Path) -> None:
    fake = FakeDriver()
    restorer = Restorer(prepared(fake, tmp_path), fake.cuda, lambda *_: None, order=["decode/4"], context=1)
    restorer.cancel()
    restorer.run()
    assert restorer.progress.passing == {"decode/4"} == set(restorer.progress.failed)


def test_what_follows_a_restore_and_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fake, done = FakeDriver(), []

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    restorer = Restorer(prepared(fake, tmp_path), fake.cuda, lambda *_: None, order=["decode/4"], context=1)
    restorer.after(fail)
    restorer.after(lambda: done.append(1))
    restorer.run()
    restorer.after(fail)
    assert done == [1]
    assert caplog.text.count("ZeroDivisionError: a bug") == 2


@pytest.mark.parametrize("call", ["cuCtxPushCurrent_v2", "start"])
def test_a_restore_that_cannot_begin_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    fake = FakeDriver()
    restorer = Restorer(prepared(fake, tmp_path), fake.cuda, lambda *_: None, order=["decode/4"], context=1)
    if call == "start":

        def none_left(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            restorer.start()
    else:
        fake.refuse[call] = 201
        restorer.start()
    assert restorer.wait(60)
    if call != "start":
        assert call in restorer.progress.failed["decode/4"]
        assert restorer.progress.passing == {"decode/4"}
    assert restorer.abandon()


def test_who_wants_stillness_has_it_after_the_graph_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, names = FakeDriver(), [*(f"decode/{100 + number}" for number in range(20)), "decode/4"]
    restorer = Restorer(prepared(fake, tmp_path), fake.cuda, lambda *_: None, order=names, context=1)
    build, built, seen = restorer._build, [], []

    def hold() -> None:
        with restorer.still():
            seen.append(len(built))
            threading.Event().wait(0.05)  # in which nobody builds
            seen.append(len(built))

    holder = threading.Thread(target=hold)

    def counted(name: str) -> int:
        if not built:
            holder.start()
            wait_until(lambda: restorer._holds > 0, "somebody wants stillness")
        built.append(name)
        return build(name)

    monkeypatch.setattr(restorer, "_build", counted)
    restorer.start()
    assert restorer.wait(60)
    holder.join(60)
    assert seen == [1, 1], "not after all the others"
    assert built == names and set(restorer.progress.ready) == {"decode/4"}


class Counted:
    """A restore of many graphs that rests after two: which of them were begun."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, rest_s: float = 60.0) -> None:
        monkeypatch.setattr("fer.cudagraph.restore.REST_S", rest_s)
        fake, self.begun = FakeDriver(), list[str]()
        self.names = [*(f"decode/{100 + number}" for number in range(5)), "decode/4"]
        self.restorer = Restorer(
            prepared(fake, tmp_path), fake.cuda, lambda *_: None, order=self.names, context=1, rest_after=2
        )
        build = self.restorer._build

        def counted(name: str) -> int:
            self.begun.append(name)
            return build(name)

        monkeypatch.setattr(self.restorer, "_build", counted)
        self.restorer.start()
        assert self.restorer.wait(60, count=2)
        assert not self.restorer.wait(0), "who only asks has nobody hurry"


@pytest.mark.parametrize("by", ["go_on", "wait", "wait for more", "still", "cancel"])
def test_a_restore_that_rests_goes_on_when_it_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    counted = Counted(tmp_path, monkeypatch)
    restorer = counted.restorer
    with restorer.still():
        threading.Event().wait(0.05)
        assert counted.begun == counted.names[:2]
    if by == "still":
        threading.Event().wait(0.05)
        assert counted.begun == counted.names[:2], "it was not stillness that it waited for"
    if by == "wait for more":
        assert restorer.wait(60, count=3)
    elif by in ("go_on", "cancel"):
        getattr(restorer, by)()
    assert restorer.wait(60)
    assert counted.begun == (counted.names if by != "cancel" else counted.names[:2])


def test_who_wants_one_graph_waits_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(tmp_path, monkeypatch)
    restorer, finish = counted.restorer, threading.Event()
    assert restorer.wait_for("decode/77", 60) and restorer.wait_for("decode/101", 60), "it was never to come, or failed"
    threading.Event().wait(0.05)
    assert counted.begun == counted.names[:2], "for which nobody has to hurry"
    finished = restorer._finish

    def late(name: str, handle: int) -> None:
        assert finish.wait(60)
        finished(name, handle)

    monkeypatch.setattr(restorer, "_finish", late)
    # The others fail before it is ready.
    assert not restorer.wait_for("decode/4", 0.2)
    finish.set()
    assert restorer.wait_for("decode/4", 60) and "decode/4" in restorer.progress.ready


def test_what_is_cancelled_in_stillness_is_built_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(tmp_path, monkeypatch)
    with counted.restorer.still():
        counted.restorer.go_on()
        threading.Event().wait(0.05)
        counted.restorer.cancel()
    assert counted.restorer.wait(60)
    assert counted.begun == counted.names[:2]
    assert counted.restorer.progress.passing == set(counted.names[2:]), "nothing speaks against them"


def test_and_in_the_end_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(tmp_path, monkeypatch, rest_s=0.05)
    wait_until(lambda: counted.restorer.wait(0), "an end of the restore")
    assert counted.begun == counted.names


def test_a_graph_that_is_not_there_fails_alone(tmp_path: Path) -> None:
    fake, graphs = FakeDriver(), {}
    restorer = Restorer(
        prepared(fake, tmp_path), fake.cuda, graphs.__setitem__, order=["decode/9", "decode/4"], context=1
    )
    restorer.run()
    assert (list(graphs), list(restorer.progress.failed)) == (["decode/4"], ["decode/9"])
