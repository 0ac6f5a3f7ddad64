"""A kernel in Gluon, Triton's lower language; importing this fails where the installed Triton has none, or another."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def multiply(x, y, out, count, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    inside = at < count
    gl.store(out + at, gl.load(x + at, mask=inside) * gl.load(y + at, mask=inside), mask=inside)
