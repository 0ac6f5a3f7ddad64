"""Running a program in a forked child as the interpreter would have: ``__main__``, ``sys``, and the end."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import runpy
import sys
import types
from typing import Any

from fer.standby.launcher_command import Program


def prepare(program: Program) -> types.CodeType | None:
    """Read and compile a script, before anybody relies on its running; None for a module.

    Raises:
        OSError: it cannot be read or compiled. A process of its own shows that better, and loses nothing by it.
    """
    if program.kind == "module":
        return None
    if os.path.isdir(program.target):
        raise OSError(f"{program.target} is a folder")
    with open(program.target, "rb") as file:
        source = file.read()
    if source.startswith(b"PK"):
        raise OSError(f"{program.target} is an archive")
    try:
        return compile(source, os.path.abspath(program.target), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise OSError(f"{program.target} cannot be compiled") from error


def run(program: Program, code: types.CodeType | None) -> int:
    """Run it to its end and return the exit status, which is then to become the process's own.

    Raises:
        KeyboardInterrupt: it was interrupted, and has said so; the interpreter turns this into the end by a signal.
    """
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    sys.orig_argv[:] = program.original
    sys.executable = program.executable
    importlib.invalidate_caches()
    try:
        if code is None:
            sys.argv[:] = ["-m", *program.arguments]
            sys.path.insert(0, os.getcwd())
            # What the interpreter itself calls for -m; run_module would put another module in the place of __main__.
            runner: Any = runpy
            runner._run_module_as_main(program.target, alter_argv=True)
        else:
            sys.argv[:] = [program.target, *program.arguments]
            sys.path.insert(0, os.path.dirname(os.path.realpath(program.target)))
            main.__dict__.update(__file__=code.co_filename, __cached__=None)
            main.__loader__ = importlib.machinery.SourceFileLoader("__main__", code.co_filename)
            exec(code, main.__dict__)  # hook: allow code-as-data because this is the program that the user starts
    except SystemExit as stop:
        return _status(stop.code)
    except KeyboardInterrupt:
        _show(*sys.exc_info())
        sys.excepthook = lambda *_: None
        raise
    except BaseException:
        _show(*sys.exc_info())
        return 1
    return 0


def _status(code: Any) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr, flush=True)  # noqa: T201 - as the interpreter does
    return 1


def _show(kind: Any, error: Any, trace: Any) -> None:
    """Print an exception, without the frames that are ours."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    sys.excepthook(kind, error.with_traceback(trace), trace)
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace
