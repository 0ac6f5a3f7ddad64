"""Any ``torch.nn.Module`` as an engine: a function that builds it and a function that loads it.

::

    engine = ModuleEngine(build, load, device="cuda:0", checkpoint=[path])
    report = fer.recover(engine)
    engine.module(x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fer.engines import callables, process, ranks
from fer.engines.base import Engine, EngineIdentity, Ranks
from fer.errors import FerBug, OptionError
from fer.weights import quantization as guard

Builder = Callable[[], nn.Module]
Loader = Callable[[nn.Module], "nn.Module | None"]


class ModuleEngine(Engine):
    """An engine made of two functions.

    Loading is ``loader(builder())`` with ``device`` as torch's default device: the loader fills the module in place
    (or returns another one) and does all post-processing. Attaching calls ``builder()`` alone, on ``meta``, and
    restores what loading made of it: tensors and plain values, wherever they are. Submodules and helper objects that
    exist after loading must therefore come from the builder.

    Part of the identity are the files that define builder and loader, the values they close over, are bound to or have
    as defaults, and the module-level values and local code that they read by name, with all that this reads in turn
    (:mod:`fer.engines.callables`), and torch's default type and precision (:mod:`fer.engines.process`). What is only
    found while they run is not seen: environment variables, files other than ``checkpoint``, imports inside functions,
    computed names, random numbers, an attribute put into an installed module (``torch.nn.init.SCALE = 2``). It must be
    named in ``settings`` or ``sources``.

    Args:
        builder, loader: see above. A loader that returns None has filled the module it was given.
        device: torch's name of the device the weights live on.
        checkpoint: files the weights are read from; their content decides between hit and miss.
        model, revision, architecture, dtype: names for the identity; taken from the builder where left out.
        quantization, quantization_config: method and configuration, checked against the allowlist before any load.
        overrides, settings: what else decides the weights' bytes, as plain data. Where ``settings`` is given, values
            that builder and loader depend on and that are no plain data are the caller's affair.
        packages: distributions whose version decides the weights' bytes, besides torch.
        sources: further files whose content is part of the identity.
        mutable: patterns of tensors the engine writes while serving.
        axis: what the ranks of a launch are: of a tensor-parallel group unless said otherwise.
        kv, first_token: called with the module in the phases of these names.
        evaluate: put the loaded module into evaluation mode.
        estimated_bytes: device bytes that this rank's weights will need, to make room for them before a load; where
            left out, the checkpoint's size shared among the ranks that split the model. Say it where loading casts.

    Attributes:
        module: the module in use, after :meth:`adopt`.

    Raises:
        UsageError: a builder or loader has no source file, or depends on values that are no plain data.
        OptionError: a name in ``settings`` is one that FER uses there itself.
    """

    def __init__(
        self,
        builder: Builder,
        loader: Loader,
        *,
        device: str = "cpu",
        checkpoint: Sequence[Path | str] = (),
        model: str = "",
        revision: str = "",
        architecture: str = "",
        dtype: str = "",
        quantization: str = "",
        quantization_config: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        packages: Sequence[str] = (),
        sources: Sequence[Path | str] = (),
        mutable: Sequence[str] = (),
        axis: ranks.Axis = "tp",
        kv: Callable[[nn.Module], object] | None = None,
        first_token: Callable[[nn.Module], object] | None = None,
        evaluate: bool = True,
        estimated_bytes: int | None = None,
    ) -> None:
        self.device = device
        self.mutable = tuple(mutable)
        self._builder, self._loader = builder, loader
        self._axis, self._evaluate = axis, evaluate
        self._kv, self._first_token = kv, first_token
        self._estimated_bytes = estimated_bytes
        self._module: nn.Module | None = None
        self._ranks: Ranks | None = None
        bound = {
            role: callables.bound_values(function, strict=settings is None)
            for role, function in (("builder", builder), ("loader", loader))
        }
        code = {path for function in (builder, loader) for path in callables.source_files(function)}
        own: dict[str, Any] = {
            "loader": callables.name(loader),
            "evaluate": evaluate,
            **{f"{role}.{key}": value for role, values in bound.items() for key, value in values.items()},
        }
        _reserved({*own, "process"}, settings or {})
        self._facts: dict[str, Any] = {
            "engine": "module",
            "engine_version": "1",
            "model": model or callables.name(builder),
            "revision": revision,
            "architecture": architecture or callables.name(builder),
            "quantization": quantization,
            "quantization_config": dict(quantization_config or {}),
            "dtype": dtype,
            "overrides": dict(overrides or {}),
            "settings": {**(settings or {}), **own},
            "packages": ("torch", *packages),
            "sources": tuple(sorted({Path(path) for path in sources} | code)),
            "checkpoint": tuple(Path(path) for path in checkpoint),
        }

    @property
    def module(self) -> nn.Module:
        if self._module is None:
            raise FerBug("the engine's module was asked for before it was loaded or attached")
        return self._module

    def identity(self) -> EngineIdentity:
        guard.check(self._facts["quantization"], self._facts["quantization_config"])
        if self._ranks is None:
            self._ranks = ranks.of_launch(self._axis, self.device)
        settings = {**self._facts["settings"], "process": process.state()}
        return EngineIdentity(ranks=self._ranks, **{**self._facts, "settings": settings})

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return self._builder().train(not self._evaluate)

    def load(self) -> nn.Module:
        guard.check(self._facts["quantization"], self._facts["quantization_config"])
        with torch.device(self.device):
            module = self._builder()
            module = self._loader(module) or module
        return module.train(not self._evaluate)

    def adopt(self, module: nn.Module) -> None:
        self._module = module

    def init_distributed(self) -> None:
        ranks.start(self.device)

    def agree(self, flag: bool) -> bool:
        return ranks.agree(flag, self.device)

    def allocate_kv(self) -> None:
        if self._kv is not None:
            self._kv(self.module)

    def first_token(self) -> None:
        if self._first_token is not None:
            with torch.inference_mode():
                self._first_token(self.module)

    def estimated_bytes(self) -> int:
        return super().estimated_bytes() if self._estimated_bytes is None else self._estimated_bytes


def _reserved(taken: set[str], settings: Mapping[str, Any]) -> None:
    for name in sorted(taken.intersection(settings)):
        raise OptionError(f"settings={{{name!r}: ...}} is a name that FER uses itself", fix="Call it something else")
