"""The public surface is what the documentation says it is."""

from __future__ import annotations

import importlib
import re
from importlib import metadata

import pytest

import fer
from tests.support.processes import ROOT


def test_the_whole_public_api() -> None:
    assert sorted(fer.__all__) == ["Options", "Report", "__version__", "recover"]


@pytest.mark.parametrize("name", [name for name in fer.__all__ if name != "__version__"])
def test_every_public_name_loads_and_is_documented(name: str) -> None:
    thing = getattr(fer, name)
    assert thing.__doc__
    assert thing.__module__.startswith("fer.")
    assert name in dir(fer)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'revocer'"):
        fer.revocer  # noqa: B018


def test_the_version_is_the_distribution_s() -> None:
    assert metadata.version("fast-engine-recovery") == fer.__version__


def test_the_command_is_installed() -> None:
    (entry,) = (e for e in metadata.entry_points(group="console_scripts") if e.name == "fer")
    module, function = entry.value.split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_the_package_is_typed() -> None:
    assert (ROOT / "fer" / "py.typed").is_file()


def test_the_command_line_s_documentation_lists_every_exit_code() -> None:
    from fer.cli.exit_codes import TABLE

    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert documented == {row.code for row in TABLE}


def test_the_command_line_s_documentation_names_every_command() -> None:
    from fer.cli.main import commands

    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert not [name for name in commands() if f"`fer {name}" not in page]
