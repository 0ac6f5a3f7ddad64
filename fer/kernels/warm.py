"""Kernels prepared before they are asked for, from what earlier starts recorded.

Triton's ``preload`` takes a recorded specialisation and compiles it, or reads it from the cache, so that the first call
finds it in memory. It needs the GPU's kind but no context; the binary itself is loaded by the first launch, or here on
demand. Only functions of modules that the program has imported are prepared: an archive does not choose imports.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("fer")


@dataclass
class Warmed:
    """What was prepared.

    Attributes:
        ready: functions whose kernel is in memory now.
        failed: functions that could not be prepared, with the reason; their first call does it.
    """

    ready: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def specializations(parts: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Function and specialisation of each kernel that recorded one, each once."""
    found = {(str(each.get("function", "")), str(each.get("specialization", ""))): None for each in parts}
    return [(function, text) for function, text in found if function and text]


def warm(
    wanted: Iterable[tuple[str, str]], *, threads: int = 4, modules: Iterable[str] = (), load: bool = False
) -> Warmed:
    """Prepare kernels in a pool of threads; waits for all.

    Args:
        wanted: as :func:`specializations` gives them.
        modules: imported first; otherwise only what is imported already is looked into.
        load: load each binary on the current device too, so that the first launch does not. Needs a context.
    """
    begin = time.perf_counter()
    done = Warmed()
    for name in modules:
        importlib.import_module(name)
    jobs = []
    for function, text in wanted:
        found = _function(function)
        if isinstance(found, str):
            done.failed[function] = found
        else:
            jobs.append((function, found, text))
    with ThreadPoolExecutor(max(1, min(threads, len(jobs) or 1)), thread_name_prefix="fer-warm") as pool:
        for function, why in pool.map(lambda job: (job[0], _prepare(job[1], job[2], load)), jobs):
            if why:
                done.failed[function] = why
            else:
                done.ready.append(function)
    done.seconds = time.perf_counter() - begin
    return done


def begin(wanted: list[tuple[str, str]], *, threads: int = 2) -> threading.Thread | None:
    """:func:`warm` beside what the start does next, of what is imported; None where there is nothing to do."""
    if not wanted or "triton" not in sys.modules:
        return None

    def run() -> None:
        done = warm(wanted, threads=threads)
        log.info("kernels prepared: %d in %.3f s, %d not", len(done.ready), done.seconds, len(done.failed))

    thread = threading.Thread(target=run, name="fer-warm", daemon=True)
    thread.start()
    return thread


def _function(name: str) -> Any:
    """Triton's function of this name, in a module that is imported; else why not."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    if found is None:
        return f"{module} is not imported"
    for part in path.split("."):
        found = getattr(found, part, None)
    # Autotuners and heuristics wrap the function that Triton compiled.
    while found is not None and not hasattr(found, "preload"):
        found = getattr(found, "fn", None)
    return found if found is not None else f"{module} has no function {path}"


def _prepare(function: Any, text: str, load: bool) -> str:
    try:
        data = json.loads(text)
        if data["name"] != getattr(function, "_fn_name", data["name"]):
            return f"the function is called {function._fn_name} now"
        kernel = function.preload(_localised(data) or text)
        if load and kernel is not None:
            _ = kernel.run  # loads the binary
    except Exception as error:  # whatever a foreign kernel raises: its first call would raise it too, in its place
        return f"{type(error).__name__}: {error}"
    return ""


def _localised(data: dict[str, Any]) -> str:
    """The specialisation without libraries of another machine's paths, which Triton then takes from its own place."""
    libraries = data.get("options", {}).get("extern_libs") or ()
    if all(os.path.exists(path) for _, path in libraries):
        return ""
    del data["options"]["extern_libs"]
    return json.dumps(data)
