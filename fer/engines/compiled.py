"""A model's forward under ``torch.compile``: one program for a step of one token, one for prompts of any length.

Both are compiled while the engine warms up. What torch keeps of them, and the kernels they are made of, the kernels
stage gives back to the next start; tracing the model is work that remains.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from fer.errors import OptionError

if TYPE_CHECKING:
    from fer.engines.transformers import TransformersEngine


def check(backend: str) -> None:
    """Refuse a backend that torch does not have; imports torch's compiler, which takes a second. Raises OptionError."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise OptionError(f"compile={backend!r} is not known", fix=f"Use {', '.join(sorted(known))}")


class Compiled:
    """The two programs of one module; called as the module is.

    Args:
        module: the model.
        backend: torch's name of a compiler, such as ``"inductor"``.
    """

    def __init__(self, module: Any, backend: str) -> None:
        self._step: Callable[..., Any] = torch.compile(module, backend=backend, dynamic=False)
        # A length of its own each time would be a compilation each time.
        self._prompt: Callable[..., Any] = torch.compile(module, backend=backend, dynamic=True)

    def __call__(self, *, input_ids: torch.Tensor, **others: Any) -> Any:
        program = self._step if input_ids.shape[1] == 1 else self._prompt
        return program(input_ids=input_ids, **others)


def lengths(most: int) -> Iterator[int]:
    """Lengths of prompts that a warm-up walks: the powers of two up to the longest prompt."""
    length = 2
    while length < most:
        yield length
        length *= 2


def warm_up(engine: TransformersEngine, backend: str, most: int) -> str:
    """Compile both programs, and let prompts of every order of length find what they lack.

    An earlier start's walk over the lengths is not repeated while the kernels it left are there; the two programs are
    made in any case, so that no answer waits for a compilation.

    Args:
        most: positions of the engine's cache, 3 or more.

    Returns:
        why the walk was done, ``""`` where it was left out.
    """
    from fer.kernels import coverage, markers

    first, *others = lengths(most)
    engine.prefill([engine.any_token()] * first)

    def walk() -> None:
        for length in others:
            engine.prefill([engine.any_token()] * length)

    if coverage.VARIABLE not in os.environ:
        walk()
        return "no kernels are kept for this start"
    sweep = markers.of_engine(engine.identity(), sweep=f"torch.compile {backend}", first=1, last=most)
    return markers.walk(sweep, walk, agree=engine.agree)
