"""Saving and restoring from end to end, on the CPU: tensors are real, the driver's graphs pretended."""

from __future__ import annotations

import ctypes
import gc
import math
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fer.cudagraph import archive as archives
from fer.cudagraph import images
from fer.cudagraph import save as saving
from fer.cudagraph.archive import Archive, Content
from fer.cudagraph.audit import Owner
from fer.cudagraph.capture import Captured, baseline, frozen
from fer.cudagraph.cupti import Seen
from fer.cudagraph.probe import PATTERN, fill_pattern, judge, replay_digest, text_of
from fer.cudagraph.records import Tables
from fer.cudagraph.restore import Restorer, outputs_of, place
from fer.cudagraph.save import Saved, save, tensors
from fer.engines.graphs import SHALLOW
from fer.errors import IntegrityError, MappingError
from tests.support.cudagraph_driver import FakeDriver, FakeFunction, cubin
from tests.support.cudagraph_engine import ToyGraphs


class FakeRange:
    def __init__(self, name: str, address: int = 0, used: int = 0) -> None:
        self.name, self.address, self.used, self.mapped = name, address, used, used
        self.pool = SimpleNamespace(id=(0, len(name)))

    def map(self, size: int, chunk: int = 0) -> None:
        self.mapped = max(self.mapped, size)

    def map_parts(self, parts: list[tuple[int, int]]) -> None:
        self.parts = parts

    def close(self) -> None:
        self.mapped = 0


class Native:
    """What stands for torch's graph: it runs the step into the captured outputs."""

    def __init__(self, graphs: ToyGraphs, size: int, handle: int) -> None:
        self.graphs, self.size, self.handle = graphs, size, handle
        self.outputs = {"y": torch.zeros(size, 4)}

    def raw_cuda_graph(self) -> int:
        return self.handle

    def replay(self) -> None:
        self.outputs["y"].copy_(self.graphs.step(self.size)["y"])


class World:
    """An engine whose two graphs were captured with a pretended driver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        self.fake, self.graphs, self.path = FakeDriver(), ToyGraphs(), path
        self.graphs.allocate()
        self.seen = Seen()
        data = cubin("linear")
        self.seen.by_handle[0x500] = images.Loaded("elf", 0, len(data), data)
        self.function = self.fake.function("linear", [(0, 8), (8, 8), (16, 8)], module=0x500)
        self.captured = Captured()
        self.offset = 0
        for size in (4, 8):
            self.captured.graphs[size] = Native(self.graphs, size, self.capture(size))
        outputs = {size: graph.outputs for size, graph in self.captured.graphs.items()}
        self.captured.outputs = outputs
        places = [o["y"].data_ptr() for o in outputs.values()]
        low = min(places)
        pool = FakeRange("pool", low, max(places) + 8 * 16 - low)
        self.workspace = torch.arange(16, dtype=torch.uint8)
        owned = [*self.graphs.weights().values(), self.graphs.x, self.workspace, *(o["y"] for o in outputs.values())]
        addresses = [tensor.data_ptr() for tensor in owned]
        span = (min(addresses), max(addresses) + 1024)
        self.ranges: Any = SimpleNamespace(
            kv=FakeRange("kv"), static=FakeRange("static"), scratch=FakeRange("scratch"), pool=pool, span=span
        )
        self.ranges.all = (self.ranges.kv, self.ranges.static, self.ranges.scratch, pool)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        generator = SimpleNamespace(get_offset=lambda: self.offset)
        monkeypatch.setattr(torch.cuda, "default_generators", (generator,))

    def snapshot(self) -> list[dict[str, Any]]:
        blocks = [{"size": 16, "state": "active_allocated"}, {"size": 512, "state": "inactive"}]
        address = self.workspace.data_ptr()
        return [
            {"segment_pool_id": self.ranges.scratch.pool.id, "address": address, "blocks": blocks},
            {"segment_pool_id": (9, 9), "address": 1, "blocks": blocks},
        ]

    def capture(self, size: int, *more: int) -> int:
        graph = self.fake.graph()
        words = [*more, self.graphs.x.data_ptr(), self.graphs.linear.weight.data_ptr(), size]
        self.fake.kernel(graph, self.function, *(struct.pack("<Q", word) for word in words[:3]))
        return graph

    def weights(self) -> list[Owner]:
        named = self.graphs.weights().items()
        return [Owner(f"weight/{n}", t.data_ptr(), t.untyped_storage().nbytes()) for n, t in named]

    def save(self) -> Saved:
        facts = {"order": ["decode/4", "decode/8"]}
        return save(
            self.path,
            self.fake.cuda,
            self.seen,
            self.captured,
            self.graphs,
            self.ranges,
            self.weights(),
            facts,
            "seed 0",
        )


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(monkeypatch, tmp_path / "a.fergraph")


def test_what_is_saved_is_restored_with_its_outputs(world: World) -> None:
    saved = world.save()
    assert (saved.kept, saved.refused, saved.nodes) == (["decode/4", "decode/8"], {}, 2)
    archive = archives.read(world.path)
    assert [(c.name, c.data) for c in archive.scratch] == [("scratch/0", bytes(range(16)))]
    assert {c.name.rpartition("/")[2] for c in archive.probes} == {"x"}
    world.workspace.zero_()
    place(archive, world.fake.cuda, world.ranges)
    assert world.workspace.tolist() == list(range(16))
    assert world.ranges.scratch.parts == [(world.workspace.data_ptr(), 16)]
    world.fake.layouts["linear"] = FakeFunction("linear", [(0, 8), (8, 8), (16, 8)])
    ready: dict[str, Any] = {}
    restorer = Restorer(archive, world.fake.cuda, ready.__setitem__, order=archive.facts["order"], context=1)
    restorer.run()
    assert not restorer.progress.failed
    assert list(restorer.progress.ready) == ["decode/4", "decode/8"]
    for name, size in (("decode/4", 4), ("decode/8", 8)):
        outputs = outputs_of(archive, name, "cpu", world.ranges)
        assert outputs["y"].data_ptr() == world.captured.outputs[size]["y"].data_ptr()
        replay: Callable[[], None] = world.captured.graphs[size].replay
        with torch.inference_mode():
            shallow = replay_digest(world.graphs, size, SHALLOW, replay, outputs)
            assert archive.facts["golden"]["seed 0"][name] == ["", shallow]
    restorer.abandon()
    assert (world.fake.execs, world.fake.libraries) == ({}, {})


def test_a_graph_that_draws_random_numbers_is_refused_alone(world: World) -> None:
    graph = world.captured.graphs[8]
    plain = graph.replay

    def replay() -> None:
        world.offset += 4
        plain()

    graph.replay = replay
    saved = world.save()
    assert (saved.kept, saved.refused) == (["decode/4"], {"decode/8": "uses random-number state"})
    archive = archives.read(world.path)
    assert [graph.name for graph in archive.tables.top()] == ["decode/4"]
    assert not [content for content in archive.probes if "decode/8" in content.name]


def test_a_graph_whose_replays_differ_is_compared_by_samples(world: World) -> None:
    graph, noise = world.captured.graphs[4], iter(range(100))
    graph.replay = lambda: graph.outputs["y"].fill_(8 + next(noise) / 64)
    world.save()
    archive = archives.read(world.path)
    golden = archive.facts["golden"]["seed 0"]
    assert golden["decode/4"] == ["", ""]
    assert len(golden["decode/8"][1]) == 64
    assert archive.facts["unlike"] == {"decode/4": {"0": 1 / 64}}
    assert [each.name for each in archive.contents if each.name.startswith("sample/")] == [
        "sample/decode/4/0/y", "sample/decode/8/0/y",
    ]  # fmt: skip


class Replays:
    """Outputs that take these values one after another, the last one for ever."""

    def __init__(self, *values: float) -> None:
        self.values, self.count = list(values), 0
        self.outputs = {"y": torch.zeros(4, 4)}

    def __call__(self) -> None:
        self.outputs["y"].fill_(self.values[min(self.count, len(self.values) - 1)])
        self.count += 1


@pytest.mark.parametrize(
    ("values", "recorded", "verdict"),
    [
        ([8.0], 8.0, ""),
        ([8.25, 8.0], 8.0, ""),  # not reproducible, and right
        ([8.25, 8.5], 8.0, "0.5 away"),  # never the recorded bits, and not near either
        ([8.25, 8.125], 8.0, ""),
        ([8.125], 8.0, "not the recorded ones"),  # reproducible, so the bits must be right
        ([8.125, 8.25], None, ""),  # native replays differed too
        ([9.0], None, "1 away"),
        ([math.nan], None, "nan away"),
    ],
)
def test_a_graph_is_right_by_its_bits_or_not_reproducible_and_near(
    values: list[float], recorded: float | None, verdict: str
) -> None:
    sample = Content("sample/decode/4/0/y", 0, struct.pack("<16f", *[8.0] * 16))
    archive = Archive(Tables(), {"unlike": {"decode/4": {"0": 0.05}}}, [sample])
    replays = Replays(*values)
    wanted = "" if recorded is None else text_of({"y": torch.full((4, 4), recorded)})
    found = judge(archive, "decode/4", SHALLOW, wanted, replays.outputs, replays)
    assert (verdict in found) if verdict else found == ""
    assert replays.count <= 8


@pytest.mark.parametrize(("value", "spread", "right"), [(9.0, 0.25, True), (1.0, 8.0, False), (1.0, math.inf, False)])
def test_graphs_that_never_do_the_same_prove_nothing_by_that(value: float, spread: float, right: bool) -> None:
    sample = Content("sample/decode/4/0/y", 0, struct.pack("<16f", *[8.0] * 16))
    archive = Archive(Tables(), {"unlike": {"decode/4": {"0": spread}}}, [sample])
    replays = Replays(8.5, value)
    assert (judge(archive, "decode/4", SHALLOW, "", replays.outputs, replays) == "") is right


def test_nothing_to_compare_is_not_right() -> None:
    archive = Archive(Tables(), {"unlike": {}})
    assert "no output" in judge(archive, "decode/4", SHALLOW, "", Replays(1.0, 2.0).outputs, Replays(1.0, 2.0))


def test_unowned_pointers_refuse_their_graph_alone(world: World) -> None:
    foreign = 0x1234_0000_0000
    world.fake.device_memory = [(foreign, 4)]
    world.captured.graphs[8].handle = world.capture(8, foreign)
    saved = world.save()
    assert saved.kept == ["decode/4"]
    assert "kernel linear, parameter 0 points to memory outside the arena" in saved.refused["decode/8"]


def test_a_buffer_that_points_out_of_the_arena_refuses_the_graphs_that_use_it(world: World) -> None:
    foreign = 0x1234_0000_0000
    world.captured.graphs[8].handle = world.capture(8, world.workspace.data_ptr())
    world.workspace.view(torch.int64)[1] = foreign
    assert world.save().kept == ["decode/4", "decode/8"], "what looks like an address is none"
    world.fake.device_memory = [(foreign, 4)]
    saved = world.save()
    assert saved.kept == ["decode/4"]
    assert "scratch/" in saved.refused["decode/8"] and "holds an address of device memory" in saved.refused["decode/8"]


def test_a_size_that_was_not_captured_is_said(world: World) -> None:
    del world.captured.graphs[8], world.captured.outputs[8]
    world.captured.troubles[8] = "CUDA out of memory"
    assert world.save().refused == {"decode/8": "CUDA out of memory"}


def test_other_addresses_are_refused_before_anything_is_mapped(world: World) -> None:
    world.save()
    archive = archives.read(world.path)
    world.ranges.pool.address += 4096
    with pytest.raises(MappingError, match="range pool lies"):
        place(archive, world.fake.cuda, world.ranges)
    assert world.ranges.pool.mapped == 0


def test_an_output_outside_the_pool_is_never_read(world: World) -> None:
    world.save()
    archive = archives.read(world.path)
    archive.facts["outputs"]["decode/4"]["y"]["address"] = 64
    with pytest.raises(IntegrityError, match="outside the pool"):
        outputs_of(archive, "decode/4", "cpu", world.ranges)


def test_owners_name_tensors_by_storage(world: World) -> None:
    assert [(o.name, o.address, o.size) for o in tensors(world.graphs)] == [
        ("tensor/x", world.graphs.x.data_ptr(), world.graphs.x.nbytes)
    ]


@pytest.mark.parametrize("where", ["nothing", "walk", "digests", "pattern"])
def test_the_cache_is_empty_again_whatever_happens(world: World, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    memory = (ctypes.c_ubyte * PATTERN)()
    world.ranges.kv = FakeRange("kv", ctypes.addressof(memory), PATTERN)
    world.ranges.all = (world.ranges.kv, *world.ranges.all[1:])
    monkeypatch.setattr(saving, "_slab", lambda graphs, ranges: PATTERN)
    dirty = []

    def fail(*_: Any, **__: Any) -> Any:
        dirty.append(any(memory))
        raise ZeroDivisionError("a bug")

    if where == "walk":
        monkeypatch.setattr(saving, "walk", fail)
    elif where == "digests":
        monkeypatch.setattr(saving.Native, "digests", fail)
    elif where == "pattern":
        plain = fill_pattern
        monkeypatch.setattr(saving, "fill_pattern", lambda *arguments: (plain(*arguments), fail()))
    with nullcontext() if where == "nothing" else pytest.raises(ZeroDivisionError):
        world.save()
    assert dirty == ([] if where == "nothing" else [True])
    assert not any(memory)
    assert world.fake.calls.index("cuCtxSynchronize") < len(world.fake.calls) - 1 - world.fake.calls[::-1].index(
        "cuMemsetD8_v2"
    )


def test_contents_are_written_to_their_own_buffers_alone(world: World) -> None:
    world.save()
    archive = archives.read(world.path)
    (first,) = archive.scratch
    for content in (
        Content("scratch/0", world.graphs.linear.weight.data_ptr(), first.data),
        Content("scratch/0", first.address, first.data * 2),
        Content("scratch/9", first.address, first.data),
    ):
        archive.contents = [content]
        before = world.fake.calls.count("cuMemcpyHtoD_v2")
        with pytest.raises(IntegrityError, match="not for where it lies"):
            place(archive, world.fake.cuda, world.ranges)
        assert world.fake.calls.count("cuMemcpyHtoD_v2") == before
        assert world.ranges.pool.mapped == 0


def test_a_baseline_is_never_the_time_of_a_capture_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Captured(troubles={4: "CUDA out of memory"}, capture_s=0.5)
    monkeypatch.setattr("fer.cudagraph.capture.capture", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match="out of memory"):
        baseline(ToyGraphs())


@pytest.mark.parametrize("before", [False, True])
def test_a_frozen_collector_is_left_as_it_was(before: bool) -> None:
    gc.unfreeze()
    if before:
        gc.freeze()
    try:
        with frozen():
            assert not gc.isenabled()
            assert gc.get_freeze_count()
        assert gc.isenabled()
        assert bool(gc.get_freeze_count()) is before
    finally:
        gc.unfreeze()
