"""From an archive to graphs that replay, in a background thread, the batch sizes with most traffic first."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fer.cudagraph.archive import Archive
from fer.cudagraph.build import Builder, instantiate
from fer.cudagraph.graph import Graph
from fer.cudagraph.load import Binaries
from fer.errors import FerError, GraphRefused, IntegrityError, MappingError

if TYPE_CHECKING:
    from fer.cudagraph.audit import Owner
    from fer.cudagraph.libcuda import Cuda
    from fer.memory.ranges import Ranges

_log = logging.getLogger("fer.cudagraph")

_LONG_S = 120.0

Ready = Callable[[str, Graph], None]


@dataclass
class Progress:
    """What became of each graph, with the second (since the restore began) it was ready."""

    ready: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, step: str, begin: float) -> None:
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - begin


def verify_owners(recorded: Sequence[Sequence[Any]], now: Sequence[Owner]) -> list[str]:
    """Names of owners that are missing, moved or smaller than when the graphs were saved; none means all is in place.

    Owners named ``scratch/…`` belong to nobody here: their memory is mapped and filled by the restore itself.
    """
    places = {owner.name: owner for owner in now}
    wrong = []
    for name, address, size in recorded:
        if str(name).startswith("scratch/"):
            continue
        owner = places.get(str(name))
        if owner is None:
            wrong.append(f"owner missing: {name}")
        elif owner.address != address or owner.size < size:
            wrong.append(f"owner moved: {name} from {address:#x} to {owner.address:#x}, {size} to {owner.size} bytes")
    return wrong


def place(archive: Archive, cuda: Cuda, ranges: Ranges) -> None:
    """Map scratch and pool as they were and write the contents that kernels read; all or nothing.

    Raises:
        OutOfMemory: the device has not enough memory for the pool.
        MappingError: the recorded addresses are not those of this process.
    """
    try:
        _place(archive, cuda, ranges)
    except BaseException:
        ranges.scratch.close()
        ranges.pool.close()
        raise


def _place(archive: Archive, cuda: Cuda, ranges: Ranges) -> None:
    for each in (ranges.scratch, ranges.pool):
        recorded = archive.facts["ranges"][each.name]
        if recorded["address"] != each.address:
            raise MappingError(f"the range {each.name} lies at {each.address:#x}, was at {recorded['address']:#x}")
        each.map(recorded["used"], chunk=max(recorded["used"], 1))
    for content in archive.scratch:
        data = ctypes.create_string_buffer(content.data, len(content.data))
        cuda.call("to_device", content.address, ctypes.addressof(data), len(content.data))


class Restorer:
    """Restores an archive's graphs. :meth:`run` does it here, :meth:`start` in a thread of its own.

    Args:
        archive: read with binaries.
        ready: called with name and graph as each becomes usable, from the thread that restores.
        order: names, most important first.
        context: the ``CUcontext`` to work in.
        verify: check every binary's digest before it is loaded.
    """

    def __init__(
        self,
        archive: Archive,
        cuda: Cuda,
        ready: Ready,
        *,
        order: Sequence[str],
        context: int,
        pool_id: Any = None,
        keep: Sequence[Any] = (),
        verify: bool = True,
    ) -> None:
        self.archive, self.progress = archive, Progress()
        self._cuda, self._ready, self._order = cuda, ready, list(order)
        self._context, self._pool_id = context, pool_id
        self._binaries = Binaries(cuda, archive.tables, verify=verify)
        self._builder = Builder(cuda, archive.tables, self._binaries.handles, context)
        self._keep = [archive, self._binaries, *keep]
        self._made: list[Graph] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._begin = time.perf_counter()

    def start(self) -> None:
        """Begin in the background."""
        self._thread = threading.Thread(target=self.run, name="fer-graphs", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """Stop after the graph at hand."""
        self._stop.set()

    def abandon(self) -> None:
        """Stop, and unload what was restored; nothing of it may be in use."""
        self.cancel()
        self.wait(_LONG_S)
        for graph in self._made:
            graph.reset()
        self._made.clear()
        self._binaries.close()

    def wait(self, timeout: float | None = None) -> bool:
        """True once every graph is ready or failed."""
        if self._thread is not None:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def run(self) -> None:
        """Restore all graphs, one after another; a failure concerns its graph alone."""
        self._begin = time.perf_counter()
        self._cuda.push_context(self._context)
        try:
            names = {graph.name: graph for graph in self.archive.tables.top()}
            self._binaries.check_ahead(
                index
                for name in self._order
                if name in names
                for index in self.archive.tables.functions_of(names[name])
            )
            for name in self._order:
                if self._stop.is_set():
                    self.progress.failed.setdefault(name, "was cancelled")
                    continue
                try:
                    graph = self._restore(name)
                    self._made.append(graph)
                    self._ready(name, graph)
                    self.progress.ready[name] = time.perf_counter() - self._begin
                except (FerError, KeyError, StopIteration) as error:
                    _log.warning("graph %s is not restored: %s", name, error)
                    self.progress.failed[name] = str(error) or repr(error)
                except Exception as error:  # whatever it is, the engine captures this graph and goes on
                    _log.exception("restoring graph %s failed", name)
                    self.progress.failed[name] = f"bug in FER, please report: {error!r}"
        finally:
            out = ctypes.c_uint64()
            self._cuda.pop_context(ctypes.byref(out))

    def _restore(self, name: str) -> Graph:
        tables, progress = self.archive.tables, self.progress
        recorded = self.archive.graph(name)
        begin = time.perf_counter()
        self._binaries.need(tables.functions_of(recorded))
        progress.add("binaries", begin)
        begin = time.perf_counter()
        handle, nodes = self._builder.build(recorded)
        progress.add("build", begin)
        try:
            begin = time.perf_counter()
            wanted = self.archive.facts["digests"].get(name)
            if self._builder.read_back(handle, nodes, recorded) != wanted:
                raise GraphRefused(
                    f"graph {name} did not become what was recorded", why="read-back differs", graph=name
                )
            progress.add("read back", begin)
            begin = time.perf_counter()
            executable = instantiate(self._cuda, handle)
            progress.add("instantiate", begin)
        finally:
            self._cuda.graph_destroy(handle)
        begin = time.perf_counter()
        self._cuda.check("upload", self._cuda.upload(executable, None))
        progress.add("upload", begin)
        return Graph(name, executable, self._cuda, self._pool_id, self._keep)


def outputs_of(archive: Archive, name: str, device: str, ranges: Ranges) -> Mapping[str, Any]:
    """A graph's output tensors, over the addresses it writes to.

    Raises:
        IntegrityError: an output lies outside the pool.
    """
    import torch

    from fer.memory import torch_private

    found = {}
    pool = ranges.pool
    for label, facts in archive.facts["outputs"][name].items():
        dtype = getattr(torch, facts["dtype"])
        reach = 1 + sum((count - 1) * step for count, step in zip(facts["shape"], facts["stride"], strict=True))
        nbytes = max(reach, 0) * dtype.itemsize
        if not pool.address <= facts["address"] <= pool.address + pool.mapped - nbytes:
            raise IntegrityError(f"output {label} of {name} lies outside the pool")
        storage = torch_private.storage_over(facts["address"], device, nbytes, pool)
        found[label] = torch_private.tensor_over(storage, dtype, facts["shape"], facts["stride"], 0)
    return found
