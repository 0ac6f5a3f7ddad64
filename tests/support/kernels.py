"""Small Triton kernels, compiled for GPUs that need not be there, and counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import MockTensor

SM90, SM100 = 90, 100


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def scale(x, out, count, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count) * factor, mask=at < count)


def compile_add(block: int = 256, arch: int = SM90, **options: Any) -> Any:
    """The kernel ``add`` for a GPU, as Triton's compiler gives it."""
    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "count": "i32", "BLOCK": "constexpr"}
    source = ASTSource(fn=add, signature=signature, constexprs={"BLOCK": block})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def warm_up(block: int = 256) -> Any:
    """The kernel ``add`` as a call would get it, for the GPU that is there or :func:`pretended_gpu`; no launch."""
    x = MockTensor("float32")  # torch's name of the type, without torch
    return add.warmup(x, x, x, 1024, BLOCK=block, grid=(1,))


@dataclass
class Counted:
    """Compilations and hits, as Triton itself tells them."""

    hits: int = 0
    compiled: list[str] = field(default_factory=list)


@contextlib.contextmanager
def counted(*, chain: bool = False) -> Iterator[Counted]:
    """Count lookups by Triton's own listener while this lasts; ``chain``: who listened before hears of them too."""
    found = Counted()
    before = triton.knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **others: Any) -> None:
        if cache_hit:
            found.hits += 1
        else:
            found.compiled.append(src.name)
        if chain and before is not None:
            before(src=src, cache_hit=cache_hit, **others)

    triton.knobs.compilation.listener = listen
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before


class Driver:
    """A GPU as far as Triton asks for one before a launch: enough to warm kernels up, not to run them."""

    def __init__(self, arch: int = SM90) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def pretended_gpu(arch: int = SM90) -> Iterator[Driver]:
    """Triton sees this GPU, and nothing it compiled before for another one in memory."""
    driver = triton.runtime.driver
    before = driver._active  # asking for the property would look for a real one
    made = Driver(arch)
    driver.set_active(made)
    for kernel in (add, scale):
        kernel.device_caches.clear()
    try:
        yield made
    finally:
        for kernel in (add, scale):
            kernel.device_caches.clear()
        driver._active = before
