"""Settings of a command: its flags, ``FER_*`` variables, ``fer.toml`` and defaults, as engines read them.

Every command that looks for a keeper goes through :func:`settings`, so that it looks where an engine started one.
"""

from __future__ import annotations

from typing import Any

from fer.cli.log import log_to_stderr
from fer.options import Options


def settings(*, log: str = "warning", **given: Any) -> Options:
    """The settings in force; FER's log goes to stderr from now on, from the level they say.

    Args:
        log: the level where none is set.
        given: values of flags, None where one was not given.

    Raises:
        OptionError: a setting is unknown or has a bad value.
    """
    options = Options.load(defaults={"log": log}, **given)
    log_to_stderr(options.log)
    return options
