"""The checksum, the samples and the tensor digests."""

from __future__ import annotations

import hashlib

import pytest
import torch

from fer.weights import integrity

ROW = integrity.COLUMNS * 8
MASK = (1 << 64) - 1


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def by_the_formula(slab: torch.Tensor) -> str:
    """The module docstring's formula in Python integers, row by row."""
    words = slab.view(torch.int64).tolist()
    words += [0] * (-len(words) % integrity.COLUMNS)
    rows = [words[i : i + integrity.COLUMNS] for i in range(0, len(words), integrity.COLUMNS)]
    whole = slab.numel() // ROW
    weight = [integrity._splitmix64(i) | 1 for i in range(integrity.COLUMNS)]
    a = b = 0
    for number, row in enumerate(rows):
        chunk, place = (0, number) if number < whole else (1 if whole else 0, 0)
        a += weight[place] * weight[chunk] * sum(row)
        b += sum(w * x for w, x in zip(weight, row, strict=True))
    return f"{a & MASK:016x}{b & MASK:016x}"


@pytest.mark.parametrize("size", [8, 4096, ROW, ROW + 4096, 5 * ROW, 7 * ROW + 8])
def test_checksum_is_the_formula(size: int) -> None:
    slab = random_bytes(size)
    assert integrity.checksums([slab]) == [by_the_formula(slab)]


def test_checksums_of_many_are_those_of_each() -> None:
    slabs = [random_bytes(size, seed=size) for size in (4096, ROW, 3 * ROW + 4096)]
    assert integrity.checksums(slabs) == [integrity.checksums([slab])[0] for slab in slabs]
    assert integrity.checksums([]) == []


def test_a_chunk_border_changes_nothing_but_the_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large slabs are folded chunk by chunk: with small chunks every single flip must still show."""
    monkeypatch.setattr(integrity, "_CHUNK_ROWS", 2)
    slab = random_bytes(7 * ROW)
    before = integrity.checksums([slab])
    for row in range(7):
        slab[row * ROW + 17] ^= 1
        assert integrity.checksums([slab]) != before
        slab[row * ROW + 17] ^= 1
    swapped = torch.cat([slab[2 * ROW : 4 * ROW], slab[: 2 * ROW], slab[4 * ROW :]])
    assert integrity.checksums([swapped]) != before


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_of_a_small_slab_shows(bit: int) -> None:
    slab = random_bytes(512)
    before = integrity.checksums([slab])
    for position in range(slab.numel()):
        slab[position] ^= 1 << bit
        assert integrity.checksums([slab]) != before, position
        slab[position] ^= 1 << bit


def test_words_that_change_places_show() -> None:
    slab = random_bytes(4 * ROW)
    before = integrity.checksums([slab])
    words = slab.view(torch.int64)
    for first, second in ((0, 1), (0, integrity.COLUMNS), (5, 3 * integrity.COLUMNS + 9)):
        words[[first, second]] = words[[second, first]]
        assert integrity.checksums([slab]) != before, (first, second)
        words[[first, second]] = words[[second, first]]


def test_samples_see_the_sampled_pages_and_the_length() -> None:
    slab = random_bytes(1 << 20)
    before = integrity.samples(slab)
    places = integrity.sample_pages(slab.numel())
    assert places[0] == 0
    assert places[-1] == (1 << 20) - 4096
    for place in places:
        slab[place + 100] ^= 1
        assert integrity.samples(slab) != before
        slab[place + 100] ^= 1
    assert integrity.samples(torch.cat([slab, slab])) != before
    assert integrity.samples(slab) == before


def test_tensor_digest_is_sha256_of_the_contiguous_bytes() -> None:
    tensor = torch.randn(33, 65)
    expected = hashlib.sha256(tensor.t().contiguous().numpy().tobytes()).hexdigest()
    assert integrity.tensor_digest(tensor.t()) == expected
    assert integrity.tensor_digest(torch.empty(0, 3)) == hashlib.sha256(b"").hexdigest()
    assert integrity.tensor_digest(torch.tensor(2.5, dtype=torch.bfloat16)) is not None
    assert integrity.tensor_digest(tensor, cancelled=lambda: True) is None
