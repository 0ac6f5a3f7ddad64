"""The short way of ``fer run``: taken for its usual forms alone, without the command line's libraries."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fer.cli.entry import _recognised, _Run
from tests.support.processes import ROOT, WAIT_S


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["run", "--", "a", "--launcher", "x"], _Run(["a", "--launcher", "x"])),
        (["run", "a", "--help"], _Run(["a", "--help"])),
        (["run", "--launcher", "off", "a"], _Run(["a"], "off")),
        (["run", "--launcher=mine", "--runtime-dir", "/r", "--", "-x"], _Run(["-x"], "mine", "/r")),
        (["run", "--runtime-dir=/a=b", "a"], _Run(["a"], "auto", "/a=b")),
        (["run", "--", "--", "a"], _Run(["--", "a"])),
    ],
)
def test_usual_forms_take_the_short_way(arguments: list[str], found: _Run) -> None:
    assert _recognised(arguments) == found


@pytest.mark.parametrize(
    "arguments",
    [[], ["run"], ["run", "--"], ["run", "--help"], ["run", "-h", "a"], ["run", "--launcher"], ["run", "--json", "a"],
     ["run", "--launcher", "off"], ["status"], ["--version"], ["runs", "a"]],
)  # fmt: skip
def test_everything_else_goes_to_the_command_line(arguments: list[str]) -> None:
    assert _recognised(arguments) is None


def fer(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = "import sys\nfrom fer.cli.entry import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )


def test_the_short_way_does_what_the_long_one_does() -> None:
    done = fer("run", "--launcher", "off", "--", sys.executable, "-c", "import sys; print('here'); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, "here\n")
    assert done.stderr == "fer: plain exec: no launcher was asked for\n"


def test_its_errors_are_those_of_the_command_line() -> None:
    done = fer("run", "--launcher", "a/b", "--", "true")
    assert done.returncode == 2
    assert "a/b" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_still_comes() -> None:
    done = fer("run", "--help")
    assert done.returncode == 0
    assert "--launcher" in done.stdout


def test_it_loads_nothing_of_the_command_lines_libraries() -> None:
    program = (
        "import os, sys\nsys.argv = ['fer', 'run', '--launcher', 'off', '--', 'true']\n"
        "def stop(*_): print(sorted({n.split('.')[0] for n in sys.modules} & {'typer', 'rich', 'pydantic', 'torch'}))\n"
        "os.execvpe = os.execvp = os.execve = lambda *a: (stop(), os._exit(0))\n"
        "from fer.cli.entry import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.stdout == "[]\n", done.stderr
