"""Native capture into FER's ranges, with the garbage collector frozen: alone it makes capture several times faster."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fer.cudagraph.audit import Owner
from fer.errors import OutOfMemory, PeerRankFailed

if TYPE_CHECKING:
    import torch

    from fer.engines.graphs import DecodeGraphs
    from fer.memory.ranges import Ranges


@dataclass
class Captured:
    """Graphs captured in this process.

    Attributes:
        graphs: torch's graphs by batch size, instantiated, their ``CUgraph`` kept.
        outputs: what each step returned.
        troubles: why a batch size has no graph.
    """

    graphs: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    troubles: dict[int, str] = field(default_factory=dict)
    warm_up_s: float = 0.0
    capture_s: float = 0.0
    instantiate_s: float = 0.0
    stream: Any = None


@contextmanager
def frozen() -> Iterator[None]:
    """No garbage collection, and nothing of what exists now is looked at again by one that torch asks for."""
    enabled, others = gc.isenabled(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not others:  # whoever had frozen objects before (a process that was forked) keeps them so
            gc.unfreeze()
        if enabled:
            gc.enable()


def on(device: str) -> AbstractContextManager[object]:
    """The engine's GPU as torch's current one: streams and generators are asked for without naming a device."""
    import torch

    return torch.cuda.device(device) if torch.cuda.is_available() else nullcontext()


def capture(
    graphs: DecodeGraphs,
    sizes: Sequence[int],
    ranges: Ranges | None,
    *,
    freeze: bool = True,
    keep: bool = True,
    agree: Callable[[bool], bool] | None = None,
) -> Captured:
    """Warm up and capture these batch sizes, largest first, as engines do, so that they share the pool.

    Args:
        ranges: place scratch buffers and the pool there; None leaves both to torch, as for native captures beside
            restored graphs, whose pool must not be written over.
        keep: keep the ``CUgraph`` for reading it.
        agree: whether all ranks say so, where there are several: a graph that one lacks none keeps.

    Raises:
        RuntimeError: a step of an engine of one rank failed, for lack of memory above all.
        OutOfMemory, PeerRankFailed: of several ranks, this one lacks memory for a step, or another one failed. Those
            that did not fail have begun collectives that nobody will end: what is left is to end the process.
    """
    import torch

    from fer.memory import torch_private

    made = Captured(stream=torch.cuda.Stream())
    ordered = sorted(sizes, reverse=True)
    if torch_private.captured_for_good():
        why = "torch's cudaMallocAsync keeps what graphs allocate for good, so none is captured twice in a process"
        return Captured(stream=made.stream, troubles=dict.fromkeys(ordered, why))
    with torch.inference_mode(), frozen() if freeze else nullcontext():
        begin = time.perf_counter()
        with torch.cuda.stream(made.stream), ranges.scratch.place() if ranges else nullcontext():
            for size in ordered:
                for _ in range(graphs.warm_ups):
                    _warm_up(graphs, size, agree)
        torch.cuda.synchronize()
        made.warm_up_s = time.perf_counter() - begin
        pool = ranges.pool.pool.id if ranges else torch.cuda.graph_pool_handle()
        begin = time.perf_counter()
        for size in ordered:
            graph = torch.cuda.CUDAGraph(keep_graph=True) if keep else torch.cuda.CUDAGraph()
            try:
                # The outer context gives the current stream back, which torch's own does not after a failure. What
                # other threads ask of the driver meanwhile is no concern of this capture.
                with (
                    torch.cuda.stream(made.stream),
                    torch.cuda.graph(graph, pool=pool, stream=made.stream, capture_error_mode="thread_local"),
                ):
                    outputs = graphs.step(size)
            except RuntimeError as error:  # torch's word for all that can go wrong, lack of memory included
                made.troubles[size] = _reason(error)
                torch_private.end_failed_capture(pool, graph)
                pool = ranges.pool.renew().id if ranges else torch.cuda.graph_pool_handle()
            else:
                torch_private.keep_captured(graph, outputs)
            # Nothing has run yet, so that no rank waits for another on its GPU.
            if agree is not None and not agree(size not in made.troubles):
                made.troubles.setdefault(size, "another rank of this launch could not capture it")
            if size not in made.troubles:
                made.graphs[size], made.outputs[size] = graph, outputs
        made.capture_s = time.perf_counter() - begin
        begin = time.perf_counter()
        for graph in made.graphs.values() if keep else ():
            graph.instantiate()
        made.instantiate_s = time.perf_counter() - begin
    return made


def _warm_up(graphs: DecodeGraphs, size: int, agree: Callable[[bool], bool] | None) -> None:
    """One step. Ranks vote after each, on the host: one that failed leaves the others in a collective for ever."""
    if agree is None:
        graphs.step(size)
        return
    import torch

    trouble: RuntimeError | None = None
    try:
        graphs.step(size)
    except RuntimeError as error:  # torch's word for all that can go wrong, lack of memory included
        trouble = error
    if agree(trouble is None):
        return
    if trouble is None:
        raise PeerRankFailed(
            f"another rank of this launch failed in a step of {size} rows",
            why="the ranks' collectives do not fit each other any more",
            fix="See that rank's error; the ranks have to be started again together",
        )
    if not isinstance(trouble, torch.OutOfMemoryError):
        raise trouble
    raise OutOfMemory(
        f"a step of {size} rows needs more memory than this rank has, before its graph was captured",
        why=_reason(trouble),
        fix="Lower --batch-sizes or --max-length, or end what else uses the GPU; ranks are started again together",
    ) from trouble


def _reason(error: BaseException) -> str:
    """What went wrong first: the end of a failed capture fails too, and hides it."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).splitlines() or [repr(error)])[0]


@dataclass(frozen=True)
class Baseline:
    """Seconds that capturing one graph takes natively, warm-ups not counted.

    Attributes:
        default_gc: with the garbage collector as the engine has it.
        frozen_gc: with it frozen, as FER captures.
    """

    size: int
    default_gc: float
    frozen_gc: float


def baseline(graphs: DecodeGraphs) -> Baseline:
    """Capture the first batch size twice more, into memory that is given back: what FER's own captures compare with.

    Raises:
        RuntimeError: there is no memory for that, it would not be given back, or the step cannot be captured.
    """
    from fer.memory import torch_private

    if torch_private.captures_for_good():
        raise RuntimeError("torch's cudaMallocAsync keeps what graphs allocate for good")
    size = graphs.batch_sizes[0]
    default = capture(graphs, [size], None, freeze=False, keep=False)
    quick = capture(graphs, [size], None, keep=False)
    for each in (default, quick):
        if size in each.troubles:
            raise RuntimeError(each.troubles[size])  # how long it took to fail is no baseline
    return Baseline(size, default.capture_s, quick.capture_s)


def blocks_of(pool_id: tuple[int, int], name: str) -> list[Owner]:
    """Live allocations in one of torch's pools, in order of address."""
    import torch

    found = []
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment.get("segment_pool_id", ())) != tuple(pool_id):
            continue
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"].startswith("active"):
                found.append((address, int(block["size"])))
            address += int(block["size"])
    return [Owner(f"{name}/{number}", start, size) for number, (start, size) in enumerate(sorted(found))]
