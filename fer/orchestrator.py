"""The orchestrator: one start of an engine, stage by stage, every second accounted for.

The module is not called ``recover``: importing a submodule sets it as an attribute of the package, and
``fer.recover`` has to stay the function.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from fer import stages
from fer.options import Options
from fer.report import Report

if TYPE_CHECKING:
    from fer.engines.base import Engine


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
    start = _start(engine, options, overrides)
    report = start.report
    graphs = stages.cudagraph_stage()
    before = _load_weights(start, graphs)
    with report.phase("kv"), graphs.placing(start):
        engine.allocate_kv()
    with report.phase("graphs"):
        graphs.run(start)
        engine.warm_up()
    with report.phase("server"):
        engine.first_token()
    report.finish()
    _finish(start, before)
    return report


def preload(engine: Engine, options: Options | None = None, **overrides: Any) -> Report:
    """Load and publish an engine's weights ahead of time; the engine serves nothing. This is ``fer load``.

    Takes and raises the same as :func:`recover`.
    """
    start = _start(engine, options, overrides)
    before = _load_weights(start, None, tokenizer=False)
    start.report.finish()
    _finish(start, before)
    return start.report


def _start(engine: Engine, options: Options | None, overrides: dict[str, Any]) -> stages.Start:
    if options is None:
        options = Options.load(**overrides)
    elif overrides:
        options = options.replace(**overrides)
    if options.given("log"):  # else the level is the application's own business
        logging.getLogger("fer").setLevel(options.log.upper())
    report = Report()
    # Imports belong to the phase "python", which lasts until the first phase that is named.
    stages.weights_stage()
    engine.import_code()
    return stages.Start(engine=engine, options=options, report=report)


def _load_weights(start: stages.Start, graphs: stages.Wide | None, *, tokenizer: bool = True) -> list[stages.Stage]:
    """The phases up to the weights; the stages that ran before them, which have something to finish."""
    engine, report = start.engine, start.report
    weights = stages.weights_stage()
    with report.phase("distributed"):
        weights.prepare(start)
        engine.init_distributed()
    if graphs is not None:
        with report.phase("graphs"):
            graphs.prepare(start)
    if tokenizer:
        with report.phase("tokenizer"):
            engine.load_tokenizer()
    with report.phase("kernels"):
        before = stages.before_weights()
        _run(start, before)
    with report.phase("weights"):
        _run(start, [weights])
    return before


def _run(start: stages.Start, todo: list[stages.Stage]) -> None:
    for stage in todo:
        stage.run(start)


def _finish(start: stages.Start, done: list[stages.Stage]) -> None:
    for stage in done:
        stage.finish(start)
