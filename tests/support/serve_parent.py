"""``fer serve`` with the engine of :mod:`tests.support.serve_engine`; settings come as JSON."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fer.cli.output import guarded
from fer.standby import member
from fer.standby.process import Command
from fer.standby.rank_commands import of_ranks
from fer.standby.rankgroup import Limits
from fer.standby.router import RouterLimits
from fer.standby.service import BATCH_ROUTER, Settings, serve
from fer.standby.supervisor import Commands, SupervisorLimits


def main() -> None:
    asked = json.loads(sys.argv[1])
    rows = str(asked.pop("rows", 4))
    module = asked.pop("engine", "tests.support.serve_engine")
    limits = Limits(term_s=asked.pop("term_s", 5.0), kill_s=5.0)
    given = {"start_s": 30.0, "drain_s": 10.0, "settle_s": 0.2}
    supervisor = SupervisorLimits(**{name: asked.pop(name, usual) for name, usual in given.items()}, end=limits)
    router = RouterLimits(**{name: asked.pop(name) for name in ("requests", "wait_s", "stall_s") if name in asked})
    member.FIRST_DELAY_S = asked.pop("first_delay_s", member.FIRST_DELAY_S)

    def engine(settings: Settings) -> Commands:
        def commands(path: Path) -> Sequence[Command]:
            # As a file, without what -m would import before: it starts in a moment.
            arguments = (sys.executable, "-m", module, "--socket", str(path), "--rows", rows)
            environment = {**os.environ, "TEST_MODEL": str(settings.model)}
            return of_ranks(Command(arguments=arguments, environment=environment), path, settings.tp)

        return commands

    asked["batch_rows"] = tuple(asked.pop("batch_rows", ()))
    asked["batch_router"] = dataclasses.replace(BATCH_ROUTER, wait_s=asked.pop("batch_wait_s", 60.0))
    logging.basicConfig(format="fer: %(message)s", level=logging.INFO)
    settings = Settings(model=Path(asked.pop("model")), port=asked.pop("port", 0), router=router, supervisor=supervisor)
    for name, value in asked.items():
        object.__setattr__(settings, name, value)
    with guarded():
        serve(settings, engine=engine)
    assert "torch" not in sys.modules, "the supervisor must not need torch"


if __name__ == "__main__":
    import typer

    try:
        main()
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
