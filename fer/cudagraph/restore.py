"""From an archive to graphs that replay, in a background thread, the batch sizes with most traffic first."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from fer.cudagraph.archive import Archive
from fer.cudagraph.build import Builder, instantiate
from fer.cudagraph.graph import Graph
from fer.cudagraph.load import Binaries
from fer.errors import FerError, GraphRefused, IntegrityError, MappingError
from fer.memory.patience import lacks_memory
from fer.turns import short_turns

if TYPE_CHECKING:
    from fer.cudagraph.audit import Owner
    from fer.cudagraph.libcuda import Cuda
    from fer.memory.ranges import Ranges

_log = logging.getLogger("fer.cudagraph")

REST_S: Final = 1.0
"""Seconds for which a restore rests at most: an engine that nobody has serve has time for all of it."""

_LONG_S = 120.0
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING

Ready = Callable[[str, Graph], None]


class _Cancelled(GraphRefused):
    """The restore was ended; nothing is wrong with the graph."""


@dataclass
class Progress:
    """What became of each graph, with the second (since the restore began) it was ready.

    Attributes:
        passing: those that failed for something that speaks against no graph: lack of memory, or a restore that was
            ended. Another start may have them.
    """

    ready: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    passing: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ready) + len(self.failed)

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add to a step's seconds; steps of the two threads overlap."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - begin


def verify_owners(recorded: Sequence[Sequence[Any]], now: Sequence[Owner]) -> dict[str, str]:
    """Owners that are missing, moved or smaller than when the graphs were saved, with what is wrong; none: all is well.

    Owners named ``scratch/…`` belong to nobody here: their memory is mapped and filled by the restore itself.
    """
    places = {owner.name: owner for owner in now}
    wrong = {}
    for name, address, size in recorded:
        if str(name).startswith("scratch/"):
            continue
        owner = places.get(str(name))
        if owner is None:
            wrong[str(name)] = f"owner missing: {name}"
        elif owner.address != address or owner.size < size:
            wrong[str(name)] = (
                f"owner moved: {name} from {address:#x} to {owner.address:#x}, {size} to {owner.size} bytes"
            )
    return wrong


def touched(facts: Mapping[str, Any], wrong: Mapping[str, str]) -> dict[str, str]:
    """Graphs that use any of the owners that :func:`verify_owners` named, each with the first such reason."""
    names = [str(name) for name, _, _ in facts["owners"]]
    found = {}
    for graph in facts["order"]:
        used = [names[index] for index in facts["uses"].get(graph, range(len(names)))]
        reason = next((wrong[name] for name in used if name in wrong), "")
        if reason:
            found[str(graph)] = reason
    return found


def place(archive: Archive, cuda: Cuda, ranges: Ranges) -> None:
    """Map scratch and pool as they were and write the contents that kernels read; all or nothing.

    Raises:
        OutOfMemory: the device has not enough memory for the pool.
        MappingError: the recorded addresses are not those of this process.
        IntegrityError: contents lie outside of the scratch buffers they are recorded for.
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
    # Of scratch memory only what libraries still hold: what warm-ups used beside it is nobody's.
    parts = {str(name): (at, size) for name, at, size in archive.facts["owners"] if str(name).startswith("scratch/")}
    for content in archive.scratch:
        if parts.get(content.name) != (content.address, len(content.data)):
            raise IntegrityError(f"the contents of {content.name} are not for where it lies")
    ranges.scratch.map_parts(list(parts.values()))
    used = archive.facts["ranges"]["pool"]["used"]
    ranges.pool.map(used, chunk=max(used, 1))
    for content in archive.scratch:
        data = ctypes.create_string_buffer(content.data, len(content.data))
        cuda.call("to_device", content.address, ctypes.addressof(data), len(content.data))


class Outlet:
    """Graphs as they become ready: kept until somebody takes them, from then on passed on at once.

    Attributes:
        graphs: all that became ready, by name.
    """

    def __init__(self) -> None:
        self.graphs: dict[str, Graph] = {}
        self._lock = threading.Lock()
        self._take: Ready | None = None

    def put(self, name: str, graph: Graph) -> None:
        """A graph became ready; called by the thread that restores."""
        with self._lock:
            self.graphs[name] = graph
            if self._take is not None:
                self._take(name, graph)

    def open(self, take: Ready) -> None:
        """Call ``take`` with every graph, those that are ready now and those that will be."""
        with self._lock:
            for name, graph in self.graphs.items():
                take(name, graph)
            self._take = take


class Restorer:
    """Restores an archive's graphs. :meth:`run` does it here, :meth:`start` in a thread of its own.

    While one graph is built and read back, the one before it is instantiated and uploaded by a second thread: the
    driver's part of that takes about as long as ours of this.

    Args:
        archive: read with binaries.
        ready: called with name and graph as each becomes usable, from a thread of the restorer's.
        order: names, most important first.
        context: the ``CUcontext`` to work in.
        binaries: the archive's, where they are being checked already.
        rest_after: after so many graphs begin no other one until :meth:`go_on`, or until somebody waits for more of
            them, but for :data:`REST_S` at most. A start that these are enough for has the processor to itself.
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
        binaries: Binaries | None = None,
        rest_after: int | None = None,
    ) -> None:
        self.archive, self.progress = archive, Progress()
        self._cuda, self._ready, self.order = cuda, ready, list(order)
        self._context, self._pool_id = context, pool_id
        self._binaries = binaries if binaries is not None else Binaries(cuda, archive.tables)
        self._builder = Builder(cuda, archive.tables, self._binaries.handles, context)
        self._keep = [archive, self._binaries, *keep]
        self._made: list[Graph] = []
        self._stop = threading.Event()
        self._moved = threading.Condition()
        self._building, self._finishing = threading.Lock(), threading.Lock()
        self._holds = 0  # who wants stillness, or has it
        self._rest_after, self._awake = rest_after, rest_after is None
        self._ended = False
        self._stream = 0
        self._after: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._begin = time.perf_counter()

    def start(self) -> None:
        """Begin in the background. Raises RuntimeError: the system gives no thread."""
        self._thread = threading.Thread(target=self.run, name="fer-graphs", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._ended = True  # nobody shall wait for it
            raise

    def cancel(self) -> None:
        """Stop after the graph at hand."""
        self._stop.set()
        self.go_on()

    def go_on(self) -> None:
        """Rest no more."""
        with self._moved:
            self._awake = True
            self._moved.notify_all()

    def _rest(self) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._awake, REST_S)

    def abandon(self) -> bool:
        """Stop, and unload what was restored; nothing of it may be in use.

        Returns:
            False where the restore does not come to its end: all of it stays, since a call of the driver is under way.
        """
        self.cancel()
        if not self.wait(_LONG_S):
            _log.warning("graphs: the restore did not end within %.0f s; what it holds stays", _LONG_S)
            return False
        for graph in self._made:
            graph.reset()
        self._made.clear()
        self._binaries.close()
        return True

    def wait(self, timeout: float | None = None, *, count: int | None = None) -> bool:
        """True once every graph is ready or failed; with ``count``, once that many are."""
        wanted = len(self.order) if count is None else min(count, len(self.order))
        if timeout != 0 and self._rest_after is not None and (count is None or wanted > self._rest_after):
            self.go_on()
        with self._moved:
            return self._moved.wait_for(
                lambda: self._ended or (count is not None and len(self.progress) >= wanted), timeout
            )

    def wait_for(self, name: str, timeout: float) -> bool:
        """True once this graph is ready, or none that this restore makes; False where it takes longer."""

        def settled() -> bool:
            return self._ended or name not in self.order or name in {*self.progress.ready, *self.progress.failed}

        with self._moved:
            if settled():
                return True
        self.go_on()
        with self._moved:
            return self._moved.wait_for(settled, timeout)

    @contextmanager
    def still(self) -> Iterator[None]:
        """Within, no node is being made: the driver refuses one that names an address with nothing behind it.

        It begins after the graphs at hand: who is engaged in the next one takes a lock again at once, and would go on
        to the last one before anybody else had it.
        """
        with self._moved:
            self._holds += 1
        try:
            with self._building, self._finishing:
                yield
        finally:
            with self._moved:
                self._holds -= 1
                self._moved.notify_all()

    @contextmanager
    def _turn(self, at: threading.Lock) -> Iterator[None]:
        """Around the making of nodes, after all who want stillness."""
        with self._moved:
            self._moved.wait_for(lambda: not self._holds)
        with at:
            if self._stop.is_set():  # perhaps by who had stillness, since there is no memory behind addresses now
                raise _Cancelled("was cancelled")
            yield

    def after(self, call: Callable[[], None]) -> None:
        """Call once everything is ready or failed: at once if it is, else from the thread that restores.

        What the call raises is logged there, and concerns nobody.
        """
        with self._moved:
            if not self._ended:
                self._after.append(call)
                return
        _quietly(call)

    def run(self) -> None:
        """Restore all graphs, one after another; a failure concerns its graph alone, or all that were still to come."""
        self._begin = time.perf_counter()
        try:
            with (
                short_turns(),
                self._in_context(),
                ThreadPoolExecutor(1, thread_name_prefix="fer-graphs-exec") as finisher,
            ):
                self._run(finisher)
        except Exception as error:  # not of one graph: no context, no thread
            for name in self.order:
                if name not in self.progress.ready:
                    self._failed(name, error, passing=True)
        finally:
            if self._stream:
                self._cuda.stream_destroy(self._stream)
            with self._moved:
                self._ended = True
                self._moved.notify_all()
            for call in self._after:
                _quietly(call)

    def _run(self, finisher: ThreadPoolExecutor) -> None:
        self._binaries.load_ahead(self.order)
        for number, name in enumerate(self.order):
            if number == self._rest_after:
                self._rest()
            try:
                with self._turn(self._building):
                    handle = self._build(name)
            except _Cancelled as error:
                self._failed(name, error, passing=True)
            except Exception as error:  # whatever it is, the engine captures this graph and goes on
                self._failed(name, error)
            else:
                finisher.submit(self._finish, name, handle)

    def _build(self, name: str) -> int:
        """A ``CUgraph`` that the driver gives back as it was recorded."""
        tables, progress = self.archive.tables, self.progress
        recorded = self.archive.graph(name)
        with progress.timed("binaries"):
            self._binaries.need(tables.functions_of(recorded))
        with progress.timed("build"):
            handle, nodes = self._builder.build(recorded)
        try:
            with progress.timed("read back"):
                if self._builder.read_back(handle, nodes, recorded) != self.archive.facts["digests"].get(name):
                    raise GraphRefused(
                        f"graph {name} did not become what was recorded", why="read-back differs", graph=name
                    )
        except BaseException:
            self._cuda.graph_destroy(handle)
            raise
        return handle

    def _finish(self, name: str, handle: int) -> None:
        """From a ``CUgraph`` to a graph that replays."""
        progress = self.progress
        try:
            with self._turn(self._finishing), self._in_context():
                with progress.timed("instantiate"):
                    executable = instantiate(self._cuda, handle)
                with progress.timed("upload"):
                    self._upload(executable)
            graph = Graph(name, executable, self._cuda, self._pool_id, self._keep)
            self._made.append(graph)
            self._ready(name, graph)
            with self._moved:
                progress.ready[name] = time.perf_counter() - self._begin
                self._moved.notify_all()
        except _Cancelled as error:
            self._failed(name, error, passing=True)
        except Exception as error:  # as above
            self._failed(name, error)
        finally:
            self._cuda.graph_destroy(handle)

    def _upload(self, executable: int) -> None:
        """On a stream of its own: the default stream would wait for the engine's work, and the engine's for it."""
        if not self._stream:
            self._stream = self._cuda.value("stream_create", _NON_BLOCKING, first=True)
        self._cuda.call("upload", executable, self._stream)
        self._cuda.call("stream_synchronize", self._stream)

    def _failed(self, name: str, error: Exception, *, passing: bool = False) -> None:
        if isinstance(error, (FerError, KeyError)):
            _log.warning("graph %s is not restored: %s", name, error)
            why = str(error) or repr(error)
        else:
            _log.error("restoring graph %s failed", name, exc_info=error)
            why = f"bug in FER, please report: {error!r}"
        with self._moved:
            self.progress.failed.setdefault(name, why)
            if passing or lacks_memory(error):
                self.progress.passing.add(name)
            self._moved.notify_all()

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        self._cuda.call("push_context", self._context)
        try:
            yield
        finally:
            self._cuda.pop_context(ctypes.byref(ctypes.c_uint64()))


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception:  # an engine serves already: it has lost nothing but a line of its report
        _log.exception("what follows a restore failed")


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
