"""``python -m fer.standby.launcher``: the template process.

It imports, proves that it can be forked, and serves. Replacing it by a fresh one is an exec of itself: the process
stays the same for whoever manages it, and stays the parent of its engines, which notice nothing.

Exit codes: 0 stopped, 2 bad arguments or a module that cannot be imported, 4 it cannot be the launcher of that name.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fer.errors import FerError, UsageError
from fer.memory.fd import Fd
from fer.standby import launcher_fit as fit
from fer.standby import launcher_place as place
from fer.standby import launcher_program
from fer.standby.launcher_environment import Reads
from fer.standby.launcher_imports import Imports
from fer.standby.launcher_server import Chosen, Replace, Running, Server

log = logging.getLogger("fer.launcher")


def main(arguments: Sequence[str]) -> int:
    """Be the launcher, and in each child its program; the exit code of either."""
    if not sys.flags.safe_path:
        del sys.path[0]  # of this command; every program has its own
    given = _parse(arguments)
    _set_up_log()
    try:
        outcome = _run(given)
    except FerError as error:
        log.error("%s", error)
        return 2 if isinstance(error, UsageError) else 4
    if isinstance(outcome, Chosen):
        return launcher_program.run(outcome.program, outcome.code)
    # All is written, and the interpreter's own end would have bindings list every object that was frozen for the forks.
    os._exit(0)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fer.standby.launcher", description="Forks engines.")
    parser.add_argument("--name", default=place.DEFAULT)
    parser.add_argument("--runtime-dir", type=Path)
    parser.add_argument("--import", dest="modules", action="append", default=[], metavar="MODULE")
    parser.add_argument("--preload", dest="folders", action="append", default=[], type=Path, metavar="FOLDER")
    # What a template leaves to the one that replaces it.
    parser.add_argument("--lock", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--engine", dest="engines", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--generation", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--fresh-why", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _set_up_log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s fer-launcher[%(process)d] %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.raiseExceptions = False  # a log that nobody reads any more is no reason to stop


def _run(given: argparse.Namespace) -> Chosen | Replace | None:
    name = place.check_name(given.name)
    folder = place.directory(given.runtime_dir)
    _close_inherited(given)
    lock = Fd(given.lock) if given.lock >= 0 else place.lock(folder, name)
    engines = dict(map(_adopt, given.engines))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    begin = time.monotonic()
    before, reads, imports = dict(os.environ), Reads(), Imports()
    with reads.watched():
        imports.modules(given.modules)
        for model in given.folders:
            imports.folder(model)
    spoiled = _prove(imports)
    server = Server(
        folder,
        name,
        lock,
        before=before,
        reads=reads,
        imported=imports.done,
        spoiled=spoiled,
        engines=engines,
        generation=given.generation,
        fresh_why=given.fresh_why,
    )
    _tell(f"fer launcher {name} ({os.getpid()}) serves in {folder} after {time.monotonic() - begin:.1f} s", spoiled)
    outcome = server.serve()
    if isinstance(outcome, Replace):
        _replace(given, server, outcome)
    return outcome


def _close_inherited(given: argparse.Namespace) -> None:
    """Close what the shell or manager left open: those numbers belong to the programs of requesters."""
    kept = {given.lock, *(int(text.split(":", 2)[1]) for text in given.engines)}
    for entry in os.listdir("/proc/self/fd"):
        if int(entry) > 2 and int(entry) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(entry))
    if given.lock >= 0:
        os.set_inheritable(given.lock, False)


def _prove(imports: Imports) -> str:
    """Prove that this process can be forked; what has spoiled it, ``""`` for nothing."""
    gc.collect()
    gc.freeze()  # collections in children would touch, and so copy, every page of what is loaded here
    fault = fit.faults()
    if fault:
        fit.settle()
        fault = fit.faults()
    return imports.culprits(fault) if fault else fit.trial()


def _tell(text: str, spoiled: str) -> None:
    if spoiled:
        log.error("spoiled, every engine will be started plainly: %s", spoiled)
    with contextlib.suppress(OSError):
        print(text, flush=True)  # noqa: T201 - supervisors wait for it
    from fer.weights.keeper import notify

    sock = notify.from_environment()
    if sock is not None:
        manager = notify.Notifier(sock)
        with contextlib.suppress(OSError):
            manager.send(f"READY=1\nSTATUS={'spoiled: ' + spoiled if spoiled else 'ready'}")
        manager.close()


def _adopt(text: str) -> tuple[int, Running]:
    pid, fd, since, command = text.split(":", 3)
    sock = socket.socket(fileno=int(fd))
    sock.set_inheritable(False)
    sock.setblocking(False)
    return int(pid), Running(sock, command, float(since))


def _replace(given: argparse.Namespace, server: Server, outcome: Replace) -> None:
    """Become a fresh template. Does not return."""
    log.info("replaced by a fresh template: %s", outcome.why)
    command = [sys.executable, "-m", "fer.standby.launcher", "--name", given.name]
    command += ["--runtime-dir", str(server.folder), "--lock", str(server.lock.fileno())]
    command += [part for name in given.modules for part in ("--import", name)]
    command += [part for model in given.folders for part in ("--preload", str(model))]
    command += ["--generation", str(given.generation + 1), f"--fresh-why={outcome.why}"]
    server.lock.detach()
    for pid, engine in server.engines.items():
        command.append(f"--engine={pid}:{engine.sock.fileno()}:{engine.since}:{engine.command}")
        engine.sock.set_inheritable(True)
    os.set_inheritable(int(command[command.index("--lock") + 1]), True)
    environment = dict(server.before)
    for name, value in outcome.variables.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
