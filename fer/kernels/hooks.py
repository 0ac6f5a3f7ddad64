"""How FER gets into a process that compiles: by Triton's own variables and hooks, installed when Triton is imported.

Nothing here imports Triton. Where it is not there yet, its import is awaited: a start that compiles nothing pays for
nothing. What is the user's own (a cache manager, a listener) is kept: both are chained.

========================================  =============================================  ===================
what                                      how                                            checked with Triton
========================================  =============================================  ===================
cache manager                             ``TRITON_CACHE_MANAGER``, read on every use    3.6 - 3.9
record of compilations                    ``knobs.compilation.listener``,                3.6 - 3.9
                                          ``knobs.runtime.jit_post_compile_hook``
``triton_key`` remembered                 replaced in ``triton.runtime.cache`` and       3.6 - 3.9
                                          where it was imported by name
========================================  =============================================  ===================
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fer.kernels import chain, coverage, tritonkey
from fer.kernels.manager import SPEC

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

VARIABLE = "TRITON_CACHE_MANAGER"
log = logging.getLogger("fer")


@dataclass
class Installed:
    """What is in place in this process.

    Attributes:
        manager: why FER's manager is not in charge, ``""`` where it is.
        behind: the user's own manager, which FER's asks where it has nothing; ``""`` without one.
        troubles: hooks that this version of Triton does not offer, with what is missing because of it.
    """

    manager: str = ""
    behind: str = ""
    troubles: list[str] = field(default_factory=list)


def install(environ: MutableMapping[str, str] | None = None, *, home: Path | None = None) -> Installed:
    """Put the verifying manager, the memo of ``triton_key`` and the record of compilations in place. Repeatable.

    Args:
        environ: variables; the process's own by default. Child processes inherit the manager through it.
        home: FER's folder.
    """
    environ = os.environ if environ is None else environ
    why = _claim_manager(environ)
    done = Installed(manager=why, behind="" if why else environ.get(chain.VARIABLE, ""))
    when_imported("triton", lambda module: done.troubles.extend(_attach(module, home)))
    return done


def _claim_manager(environ: MutableMapping[str, str]) -> str:
    knobs = sys.modules.get("triton.knobs")
    if knobs is not None and "manager_class" in knobs.cache.__dict__:
        return "the program has set triton.knobs.cache.manager_class; FER's manager is not installed"
    chosen = environ.get(VARIABLE)
    if not chosen:
        environ.pop(chain.VARIABLE, None)  # of a program that has taken its manager back since
    elif chosen != SPEC:
        environ[chain.VARIABLE] = chosen
    if environ.get("TRITON_REMOTE_CACHE_BACKEND") and not environ.get(chain.VARIABLE):
        log.info("TRITON_REMOTE_CACHE_BACKEND is set, but no manager that uses it; kernels are looked up locally")
    environ[VARIABLE] = SPEC
    return ""


def _attach(triton: ModuleType, home: Path | None) -> list[str]:
    """Everything that needs Triton's modules; what could not be done, and why."""
    troubles = []
    for what, how in (("the memo of triton_key", _remember_key), ("the record of compilations", _record)):
        try:
            how(triton, home)
        except Exception as error:  # a Triton that looks otherwise must not end an engine's import
            troubles.append(f"{what} is missing: {type(error).__name__}: {error}")
            log.warning("with Triton %s %s", getattr(triton, "__version__", "?"), troubles[-1])
    return troubles


def _remember_key(triton: ModuleType, home: Path | None) -> None:
    cache = importlib.import_module("triton.runtime.cache")
    original = cache.triton_key
    if getattr(original, "__fer__", False):
        return
    package = Path(str(triton.__file__)).parent
    lock, known = threading.Lock(), [""]

    def triton_key() -> str:
        with lock:
            known[0] = known[0] or tritonkey.memoised(package, original, home=home)
        return known[0]

    triton_key.__fer__ = True  # type: ignore[attr-defined]
    triton_key.cache_clear = original.cache_clear  # type: ignore[attr-defined]
    for name, module in [*sys.modules.items()]:
        if name.startswith(("triton.", "torch._inductor.")) and module.__dict__.get("triton_key") is original:
            module.triton_key = triton_key  # type: ignore[attr-defined]


def _record(triton: ModuleType, home: Path | None) -> None:
    coverage.attach(importlib.import_module("triton.knobs"))


# -- waiting for an import


def when_imported(name: str, then: Callable[[ModuleType], object]) -> None:
    """Call ``then`` with a top-level module: now where it is imported already, else right after its import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        then(module)
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Waiting) and finder.name == name:
            finder.then = then
            return
    sys.meta_path.insert(0, _Waiting(name, then))


class _Waiting:
    """A finder that finds nothing itself: it lets the others find the module and wraps what will execute it."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self.name, self.then = name, then
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self)  # type: ignore[assignment]  # a loader by its methods
        return spec


class _Then:
    """Executes a module by its own loader, and then what waits for it."""

    def __init__(self, loader: Any, waiting: _Waiting) -> None:
        self._loader, self._waiting = loader, waiting

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # Given back first: the module may look for its own loader while it is executed.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._waiting in sys.meta_path:
            sys.meta_path.remove(self._waiting)
        self._waiting.then(module)
