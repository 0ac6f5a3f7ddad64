"""Kernels that run on a GPU, in a process of their own: ``python -m tests.support.kernels_gpu_child NAME ...``.

Prints one JSON object: digests of results and of binaries, whether results are right, hits and compilations, what
tuning chose, and which kernels this Triton or this GPU does not have. ``start:FOLDER`` starts a model by FER.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

SIZE = 1 << 16


class Lacking(Exception):
    """This Triton or this GPU does not have it."""


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * columns + column, mask=inside, other=-float("inf"))
    value = tl.exp(value - tl.max(value))
    tl.store(out + row * columns + column, value / tl.sum(value), mask=inside)


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024) for warps in (4, 8)]


@triton.autotune(configs=CONFIGS, key=["count"])
@triton.jit
def tuned(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) * tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def tma(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    target = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [ROWS, COLUMNS])
    at, across = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    target.store([at, across], source.load([at, across]) * 2.0)


def vectors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    x, y = (torch.randn(SIZE, device="cuda", generator=generator) for _ in range(2))
    return x, y, torch.empty_like(x)


def run_add() -> tuple[torch.Tensor, torch.Tensor, Any]:
    x, y, out = vectors()
    kernel = add[(triton.cdiv(SIZE, 1024),)](x, y, out, SIZE, BLOCK=1024)
    return out, x + y, kernel


def run_softmax() -> tuple[torch.Tensor, torch.Tensor, Any]:
    x, _, out = vectors()
    kernel = softmax[(64,)](x, out, SIZE // 64, BLOCK=1024)
    return out, torch.softmax(x.view(64, -1), -1).view(-1), kernel


def run_tuned() -> tuple[torch.Tensor, torch.Tensor, Any]:
    x, y, out = vectors()
    kernel = tuned[lambda meta: (triton.cdiv(SIZE, meta["BLOCK"]),)](x, y, out, SIZE)
    return out, x * y, kernel


def run_tma() -> tuple[torch.Tensor, torch.Tensor, Any]:
    if torch.cuda.get_device_capability()[0] < 9:
        raise Lacking("TMA needs compute capability 9.0")
    if not hasattr(tl, "make_tensor_descriptor"):
        raise Lacking("this Triton has no tl.make_tensor_descriptor")
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, device="cuda", dtype=torch.int8))
    x, _, out = vectors()
    kernel = tma[(4, 4)](x, out, 256, 256, ROWS=64, COLUMNS=64)
    return out, x * 2.0, kernel


def run_gluon() -> tuple[torch.Tensor, torch.Tensor, Any]:
    try:
        from tests.support import kernels_gluon
    except (ImportError, AttributeError) as error:
        raise Lacking(f"this Triton's Gluon is another one: {error}") from None
    x, y, out = vectors()
    kernel = kernels_gluon.multiply[(triton.cdiv(SIZE, 1024),)](x, y, out, SIZE, 1024, num_warps=4)
    return out, x * y, kernel


KERNELS: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, Any]]] = {
    "add": run_add,
    "softmax": run_softmax,
    "tuned": run_tuned,
    "tma": run_tma,
    "gluon": run_gluon,
}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())


def start(folder: str) -> dict[str, Any]:
    """A model under torch.compile, started by FER; logits of a prompt and of eight steps."""
    import fer
    from fer.engines.transformers import TransformersEngine

    engine = TransformersEngine(folder, device="cuda:0", compile="inductor", max_length=64)
    report = fer.recover(engine, weights=False, cudagraph=False, distinit=False)
    told = report.stages["kernels"]
    steps = [engine.prefill([5, 6, 7, 8, 9]), *(engine.advance(token) for token in range(10, 18))]
    for name in ("fer-kernels-finish", "fer-kernels-writer"):
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join(120)
    results = {"logits": digest(b"".join(map(bits, steps)))}
    return {"results": results, "kernels": {"path": told.path, "why": told.why, **told.details}}


def main(names: list[str]) -> dict[str, Any]:
    if names[0].startswith("start:"):
        return start(names[0].removeprefix("start:"))
    from tests.support.kernels import counted

    answer: dict[str, Any] = {"results": {}, "right": {}, "binaries": {}, "left_out": {}, "chosen": ""}
    with counted() as found:
        for name in names:
            try:
                out, expected, kernel = KERNELS[name]()
            except Lacking as lacking:
                answer["left_out"][name] = str(lacking)
                continue
            torch.cuda.synchronize()
            answer["results"][name] = digest(bits(out))
            answer["right"][name] = bool(torch.allclose(out, expected, rtol=1e-5, atol=1e-6))
            answer["binaries"][name] = digest(kernel.asm["cubin"])
    if "tuned" in names and tuned.cache:
        answer["chosen"] = str(tuned.best_config)
    return {**answer, "hits": found.hits, "compiled": found.compiled}


if __name__ == "__main__":
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    print(json.dumps(main(sys.argv[1:])))
