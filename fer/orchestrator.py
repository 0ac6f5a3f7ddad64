"""The orchestrator: one start of an engine, stage by stage, every second accounted for.

The module is not called ``recover``: importing a submodule sets it as an attribute of the package, and
``fer.recover`` has to stay the function.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

from fer import stages
from fer.errors import FerError, MappingError
from fer.options import Options
from fer.report import Report, boottime_ns
from fer.turns import short_turns

if TYPE_CHECKING:
    from fer.engines.base import Engine
    from fer.memory.kept import KeptMemory

log = logging.getLogger("fer")


def recover(engine: Engine, options: Options | None = None, **overrides: Any) -> Report:
    """Start an engine, giving it what an earlier start already made.

    The phases follow each other as in any start (distributed, tokenizer, weights, kv, graphs, server); a stage that
    has something kept makes its phase short. Afterwards ``engine`` has adopted its module and has produced one token.

    Args:
        engine: the adapter; see :class:`fer.engines.base.Engine`.
        options: settings; None reads them from ``FER_*`` variables and ``fer.toml``.
        overrides: single settings that win over ``options`` and everything else, by name.

    Returns:
        The report: every phase from process start to first token, and of each stage the path it took and why.

    Raises:
        OptionError: a setting is unknown or has a bad value.
        UnsupportedQuantization: before any loading work.
        Miss: nothing fits and ``on_miss="fail"``.
        KeeperUnavailable: ``mode="client"`` and no keeper listens.
        OutOfMemory: the weights cannot fit beside what other engines hold.
    """
    return recover_for_duty(engine, options, parked=False, **overrides).report


class Recovered:
    """An engine that was recovered, and may stand by between times in which it serves.

    To be used from the thread that recovered it, while no answer is under way.

    Attributes:
        report: of the start.
        parked: the engine has no memory for its cache, and cannot serve.
        intact: memory that it was given to go on with holds what it held.
    """

    def __init__(
        self, start: stages.Start, graphs: stages.Wide, before: list[stages.Stage], *, unwarmed: bool = False
    ) -> None:
        self.intact, self._unwarmed, self._before = False, unwarmed, before
        self._start, self._graphs = start, graphs
        self.report, self.parked = start.report, start.parked
        self._unproven = False  # it has memory anew, and nothing has run on that

    def conclude(self) -> None:
        """After the first token, once: what takes time and nobody waits for."""
        before, self._before = self._before, []
        _finish(self._start, before)

    def settle(self) -> None:
        """For an engine that was to be unparked at once, and nobody has tried: warm up, and wait without memory."""
        if self._unwarmed and self.parked:
            self._unwarmed = False
            with short_turns():
                self._start.engine.warm_up()
            self.conclude()
            if self._graphs.in_place(self._start):
                self._graphs.park(self._start)

    def park(self) -> bool:
        """Give back the cache's memory; False for an engine that cannot, and keeps it."""
        self.parked = self._graphs.park(self._start)
        return self.parked

    def unpark(self, kept: KeptMemory | None = None) -> dict[str, float]:
        """Take memory for the cache and make one token, which proves that the engine serves.

        Args:
            kept: memory of an engine of the same :attr:`cache`, which this one goes on with: :attr:`intact` says
                whether it could. The descriptors stay the caller's.

        Returns:
            seconds of ``backing`` and ``self_test``.

        Raises:
            OutOfMemory: fields ``needed`` and ``free`` in bytes. The engine is parked as before; ask again later.
        """
        begin = time.perf_counter()
        with short_turns():
            self.back(kept)
            backed = time.perf_counter()
            self.prove()
        return {"backing": backed - begin, "self_test": time.perf_counter() - backed}

    def back(self, kept: KeptMemory | None = None) -> None:
        """The first half of :meth:`unpark`, which waits for no other rank: take memory for the cache.

        Raises:
            OutOfMemory: as :meth:`unpark`.
        """
        self.intact = self._unwarmed = False  # what stood for its cache may be gone, whatever comes of this
        if kept is not None:
            try:
                self.intact = self._graphs.unpark(self._start, kept)
            except MappingError as error:
                log.warning("the cache that was kept is not used: %s", error)
                self.parked = True
            else:
                self.parked, self._unproven = False, True
        if self.parked:
            self._graphs.unpark(self._start)
            self.parked, self._unproven = False, True

    def keep(self) -> KeptMemory | None:
        """The cache's memory as descriptors, the caller's; None where it ends with this process."""
        try:
            return self._graphs.keep(self._start)
        except FerError as error:
            log.warning("the cache is not kept for an engine after this one: %s", error)
            return None

    @property
    def cache(self) -> dict[str, Any] | None:
        """What must be the same in an engine that goes on with this one's cache: weights, layout, places of tensors.

        None where no engine can: answers have no rows of their own, or nobody could say that the weights are the same.
        """
        engine, edition = self._start.engine, self.report.stages["weights"].details.get("edition")
        graphs = engine.graphs()
        if graphs is None or not edition:
            return None
        named = graphs.tensors() if engine.device.startswith("cuda") else {}
        places = {name: [tensor.data_ptr(), tensor.nbytes] for name, tensor in named.items() if name.startswith("kv.")}
        return {"edition": edition, "layout": dict(graphs.layout()), "places": places}

    def prove(self) -> None:
        """The second half, which ranks take together once all of them have memory: make one token."""
        if self._unproven:
            self._graphs.resume(self._start)
            self._unproven = False
        self._start.engine.self_test()
        self._graphs.served(self._start)
        self.intact = self.intact and not self._graphs.overwrote(self._start)


@dataclasses.dataclass(frozen=True)
class Imagined:
    """What was made of an engine before its start, see :func:`imagine`."""

    weights: stages.Stage


def imagine(engine: Engine | None) -> Imagined:
    """Make of an engine, before it is told to start, what needs neither its device nor settings.

    It must not have changed when the start comes, its files neither: that is for the caller to see.

    Args:
        engine: None where it cannot be made yet: then there is little to do.
    """
    weights, graphs = stages.weights_stage(), stages.cudagraph_stage()
    before = stages.before_weights()
    if engine is not None:
        engine.import_code()
        engine.identity()
        for stage in (weights, graphs, *before):
            stage.imagine(engine)
    return Imagined(weights)


def recover_for_duty(
    engine: Engine,
    options: Options | None = None,
    *,
    parked: bool,
    at_once: bool = False,
    imagined: Imagined | None = None,
    **overrides: Any,
) -> Recovered:
    """Start an engine as :func:`recover` does, to be parked and unparked from then on.

    Args:
        imagined: the start begins now, and not with the process, and has this of it.
        parked: let it stand by: it attaches weights, restores graphs and warms up, with next to no memory for a cache.
        at_once: it will be unparked as soon as it is there: the token that proves it then is its first, and what
            only new prompts need waits for the first of these.
    """
    with short_turns():
        return _recover(*_start(engine, options, overrides, parked=parked, at_once=at_once, imagined=imagined))


def _recover(start: stages.Start, weights: stages.Stage) -> Recovered:
    engine, report, parked, at_once = start.engine, start.report, start.parked, start.at_once
    graphs = stages.cudagraph_stage()
    before = _load_weights(start, weights, graphs)
    with report.phase("kv"):
        if parked and not graphs.in_place(start) and not engine.park():
            start = dataclasses.replace(start, parked=False)
        with graphs.placing(start):
            engine.allocate_kv()
    with report.phase("graphs"):
        graphs.run(start)
        if not at_once:
            engine.warm_up()
    if not at_once:
        with report.phase("server"):
            engine.first_token()
    report.finish()
    recovered = Recovered(start, graphs, before, unwarmed=at_once)
    if at_once:
        return recovered
    recovered.conclude()
    if start.parked and graphs.in_place(start):
        graphs.park(start)  # what stood for the cache in the start is of no use to an engine that waits
    return recovered


def preload(engine: Engine, options: Options | None = None, **overrides: Any) -> Report:
    """Load and publish an engine's weights ahead of time; the engine serves nothing. This is ``fer load``.

    Takes and raises the same as :func:`recover`.
    """
    start, weights = _start(engine, options, overrides)
    before = _load_weights(start, weights, None, tokenizer=False)
    start.report.finish()
    _finish(start, before)
    return start.report


def _start(
    engine: Engine,
    options: Options | None,
    overrides: dict[str, Any],
    *,
    parked: bool = False,
    at_once: bool = False,
    imagined: Imagined | None = None,
) -> tuple[stages.Start, stages.Stage]:
    """One start, and its weights stage, which has begun."""
    if options is None:
        options = Options.load(**overrides)
    elif overrides:
        options = options.replace(**overrides)
    if options.given("log"):  # else the level is the application's own business
        logging.getLogger("fer").setLevel(options.log.upper())
    report = Report(started_ns=boottime_ns() if imagined is not None else None)
    start = stages.Start(engine=engine, options=options, report=report, parked=parked, at_once=at_once)
    # Imports belong to the phase "python", which lasts until the first phase that is named.
    weights = imagined.weights if imagined is not None else stages.weights_stage()
    weights.begin(start)
    engine.import_code()
    return start, weights


def _load_weights(
    start: stages.Start, weights: stages.Stage, graphs: stages.Wide | None, *, tokenizer: bool = True
) -> list[stages.Stage]:
    """The phases up to the weights; the stages that ran before them, which have something to finish."""
    engine, report = start.engine, start.report
    with report.phase("distributed"):
        weights.prepare(start)
        engine.init_distributed()
    if tokenizer:
        with report.phase("tokenizer"):
            engine.load_tokenizer()
    with report.phase("kernels"):
        before = stages.before_weights()
        _run(start, before)
    with report.phase("weights"):
        weights.ahead(start)
    if graphs is not None:
        with report.phase("graphs"):
            graphs.prepare(start)
    for stage in before:
        stage.ahead(start)
    with report.phase("weights"):
        _run(start, [weights])
    return before


def _run(start: stages.Start, todo: list[stages.Stage]) -> None:
    for stage in todo:
        stage.run(start)


def _finish(start: stages.Start, done: list[stages.Stage]) -> None:
    for stage in done:
        stage.finish(start)
