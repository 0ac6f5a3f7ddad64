"""Probes: the pattern in a cache, and how small a slab can stand for the whole of it."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from fer.cudagraph.probe import LARGEST_SLAB, PATTERN, alias, digest_of, fill_pattern, hexed, text_of
from tests.support.cudagraph_driver import FakeDriver

MIB = 1 << 20
GRANULE = 2 * MIB


def layers(count: int, size: int, stride: int, tensors: int = 1) -> list[list[tuple[int, int]]]:
    return [[((layer * tensors + part) * stride, size) for part in range(tensors)] for layer in range(count)]


def test_equal_layers_need_the_room_of_one() -> None:
    assert alias(layers(36, 6 * MIB, 6 * MIB), GRANULE) == 6 * MIB
    assert alias(layers(36, 5 * MIB, 6 * MIB), GRANULE) == 6 * MIB


def test_keys_and_values_of_one_layer_never_share_memory() -> None:
    assert alias(layers(36, 6 * MIB, 6 * MIB, tensors=2), GRANULE) == 12 * MIB
    # All keys before all values, as some engines allocate them: with three layers three strides keep a layer's apart.
    apart = [[(layer * 6 * MIB, 6 * MIB), ((3 + layer) * 6 * MIB, 6 * MIB)] for layer in range(3)]
    slab = alias(apart, GRANULE)
    assert slab in (12 * MIB, 36 * MIB)
    assert all(keys[0] % slab != values[0] % slab for keys, values in apart)


def test_small_caches_stand_for_themselves() -> None:
    assert alias(layers(4, 1024, 1024), GRANULE) == GRANULE
    assert alias([], GRANULE) == GRANULE


@pytest.mark.parametrize("sizes", [(6 * MIB, 4 * MIB), (6 * MIB, 6 * MIB + 512)])
def test_unequal_layers_are_not_shared(sizes: tuple[int, int]) -> None:
    offsets = [0, 8 * MIB, 24 * MIB]
    found = alias([[(offset, sizes[number % 2])] for number, offset in enumerate(offsets)], GRANULE)
    assert found == 30 * MIB
    huge = [[(number * LARGEST_SLAB, sizes[number % 2] + number)] for number in range(3)]
    assert alias(huge, GRANULE) == 0  # no slab can stand for it: no deep probes


def test_the_pattern_repeats_and_is_finite_in_every_format() -> None:
    fake = FakeDriver()
    size = 2 * PATTERN + 4096
    memory = (ctypes.c_ubyte * size)()
    fill_pattern(fake.cuda, ctypes.addressof(memory), size)
    found = np.frombuffer(memory, "<u1")
    assert (found[:PATTERN] == found[PATTERN : 2 * PATTERN]).all()
    assert (found[2 * PATTERN :] == found[:4096]).all()
    assert len(np.unique(found)) == 16
    for kind in (np.float16, np.float32):
        assert np.isfinite(found.view(kind)).all()
        assert np.abs(found.view(kind)).max() < 4
    wide = (found.view("<u2").astype("<u4") << 16).view("<f4")  # bfloat16
    assert np.isfinite(wide).all()
    assert np.abs(wide).max() < 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("count", [1, 7, 4096, 100_003])
def test_the_host_sums_what_the_device_sums(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(count)
    tensor = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    outputs = {"b": tensor, "a": tensor.flip(0)}
    assert text_of(outputs) == hexed(digest_of(outputs))
    if count > 1:
        assert text_of({"a": outputs["b"], "b": outputs["a"]}) != text_of(outputs)
