"""Which commands a forked child can stand for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fer.standby.launcher_command import Program, Unfit, program_of, which


def parsed(*argv: str, env: dict[str, str] | None = None) -> Program:
    environment = env or {"PATH": os.path.dirname(sys.executable)}
    path = which(argv[0], environment)
    assert path is not None
    return program_of(argv, path, environment)


def script(tmp_path: Path, first: str, name: str = "tool") -> str:
    path = tmp_path / name
    path.write_text(f"{first}\nprint()\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "kind", "target", "rest", "unbuffered"),
    [
        (["engine.py"], "script", "engine.py", (), False),
        (["-u", "engine.py", "-m", "x"], "script", "engine.py", ("-m", "x"), True),
        (["-m", "engine", "--port", "1"], "module", "engine", ("--port", "1"), False),
        (["-mengine"], "module", "engine", (), False),
    ],
)
@pytest.mark.parametrize("python", [sys.executable, "python"])
def test_scripts_and_modules(
    python: str, arguments: list[str], kind: str, target: str, rest: tuple[str, ...], unbuffered: bool
) -> None:
    found = parsed(python, *arguments)
    assert (found.kind, found.target, found.arguments, found.unbuffered) == (kind, target, rest, unbuffered)
    assert found.original == (python, *arguments)
    assert os.path.dirname(found.executable) == os.path.dirname(sys.executable)


@pytest.mark.parametrize("arguments", [[], ["-"], ["-i", "x.py"], ["-c", "1"], ["-m"], ["-I", "x.py"], ["-X", "dev"]])
def test_what_an_interpreter_decides_at_its_start(arguments: list[str]) -> None:
    with pytest.raises(Unfit):
        parsed(sys.executable, *arguments)


def test_console_scripts(tmp_path: Path) -> None:
    plain = script(tmp_path, f"#!{sys.executable}")
    long = script(tmp_path, f"""#!/bin/sh\n'''exec' "{sys.executable}" "$0" "$@"\n' '''""", "long")
    named = script(tmp_path, f"#!/usr/bin/env {os.path.basename(sys.executable)}", "named")
    for path in (plain, long, named):
        found = parsed(path, "a")
        assert (found.kind, found.target, found.arguments) == ("script", path, ("a",))
        assert found.original == (found.executable, path, "a")


@pytest.mark.parametrize(
    ("first", "why"),
    [
        ("#!/bin/sh", "runs under /bin/sh"),
        (f"#!{sys.executable} -I", "options -I"),
        ("#!/usr/bin/env -S python -I", "is no Python program"),
        ("\x7fELF", "is no Python program"),
    ],
)
def test_other_programs(tmp_path: Path, first: str, why: str) -> None:
    with pytest.raises(Unfit, match=why):
        parsed(script(tmp_path, first))


def test_the_same_binary_in_another_environment_is_another_interpreter(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))
    with pytest.raises(Unfit):
        parsed(str(tmp_path / "python"), "engine.py")


def test_which_goes_by_the_given_path_and_folder(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh")
    assert which("tool", {"PATH": str(tmp_path)}) == path
    assert which("tool", {"PATH": "/nowhere"}) is None
    assert which("./tool", {}, tmp_path) == f"{tmp_path}/./tool"
    assert which("./missing", {}, tmp_path) is None
    assert which(str(tmp_path), {}) is None
