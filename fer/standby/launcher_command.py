"""Which commands a forked child can stand for: scripts and modules of the template's own interpreter."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_FIRST_LINE = 4096


@dataclass(frozen=True, kw_only=True)
class Program:
    """A Python program.

    Attributes:
        kind: a file, or a module as for ``-m``.
        target: the file as it was written, or the module's name.
        arguments: what ``sys.argv`` holds beside the first.
        original: the whole command, for ``sys.orig_argv`` and the process's title.
        executable: absolute path of the interpreter, for ``sys.executable``.
        unbuffered: ``-u`` was given.
    """

    kind: Literal["script", "module"]
    target: str
    arguments: tuple[str, ...]
    original: tuple[str, ...]
    executable: str
    unbuffered: bool = False


class Unfit(Exception):
    """A command that has to be a process of its own; says why."""


def which(name: str, env: Mapping[str, str], cwd: str | os.PathLike[str] = ".") -> str | None:
    """Absolute path of the program that a command names, None where there is none."""
    if os.sep in name:
        path = os.path.join(os.path.abspath(cwd), name)
        return path if os.access(path, os.X_OK) and not os.path.isdir(path) else None
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    return None if found is None else os.path.abspath(found)


def program_of(argv: Sequence[str], path: str, env: Mapping[str, str]) -> Program:
    """What a command runs.

    Args:
        argv: the command.
        path: absolute path of its program, as :func:`which` finds it.
        env: its environment, for ``#!/usr/bin/env``.

    Raises:
        Unfit: it is not Python, not this interpreter, or asks for something that is decided at an interpreter's start.
    """
    if _is_this_interpreter(path):
        return _of_interpreter(argv, path)
    interpreter, options = _shebang(path, env)
    if interpreter is None:
        raise Unfit(f"{path} is no Python program")
    if not _is_this_interpreter(interpreter):
        raise Unfit(f"{path} runs under {interpreter}, the template under {sys.executable}")
    if options:
        raise Unfit(f"{path} gives its interpreter the options {options}")
    original = (interpreter, path, *argv[1:])
    return Program(kind="script", target=path, arguments=tuple(argv[1:]), original=original, executable=interpreter)


def _of_interpreter(argv: Sequence[str], path: str) -> Program:
    rest, unbuffered = list(argv[1:]), False
    while rest and rest[0] == "-u":
        unbuffered = True
        rest.pop(0)
    if not rest or rest[0] == "-":
        raise Unfit("the program is read from standard input")
    common = {"original": tuple(argv), "executable": path, "unbuffered": unbuffered}
    if rest[0].startswith("-m"):
        name = rest.pop(0)[2:] or (rest.pop(0) if rest else "")
        if not name:
            raise Unfit("-m names no module")
        return Program(kind="module", target=name, arguments=tuple(rest), **common)  # type: ignore[arg-type]
    if rest[0].startswith("-"):
        raise Unfit(f"the interpreter's option {rest[0]} is decided at its start")
    return Program(kind="script", target=rest[0], arguments=tuple(rest[1:]), **common)  # type: ignore[arg-type]


def _is_this_interpreter(path: str) -> bool:
    """Whether a path is the interpreter that runs here, in the same environment: venvs tell by the folder it is in."""
    ours = sys.executable
    return os.path.realpath(path) == os.path.realpath(ours) and os.path.realpath(
        os.path.dirname(path)
    ) == os.path.realpath(os.path.dirname(ours))


def _shebang(path: str, env: Mapping[str, str]) -> tuple[str | None, str]:
    """A script's interpreter and the options it is given; None for what is no script."""
    try:
        with open(path, "rb") as file:
            lines = file.read(_FIRST_LINE).split(b"\n")
    except OSError:
        return None, ""
    if not lines[0].startswith(b"#!"):
        return None, ""
    line = os.fsdecode(lines[0][2:]).strip()
    if line == "/bin/sh" and len(lines) > 1 and lines[1].startswith(b"'''exec'"):
        # How installers write paths that are too long or have spaces: '''exec' "/path/to/python" "$0" "$@"
        words = shlex.split(os.fsdecode(lines[1].removeprefix(b"'''exec'")))
        return (words[0], "") if words[1:] == ["$0", "$@"] else (None, "")
    interpreter, _, options = line.partition(" ")
    if Path(interpreter).name == "env":
        found = which(options.strip(), env) if options and not options.strip().startswith("-") else None
        return found, ""
    return interpreter, options.strip()
