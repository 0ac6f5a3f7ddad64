"""Proof that kept bytes are the published bytes.

A slab's *checksum* covers every byte, depends on every byte's position, and is computed where the memory is: two
reductions over the slab, so a GPU does it at memory bandwidth and nothing is copied to the host. Its *samples* are a
digest of a few pages, enough for host slabs, which the kernel has sealed against writes. A tensor's *digest* is the
sha256 of its contiguous bytes, for people and for ``fer verify --full``.

The checksum is linear, with arithmetic modulo 2**64. The slab is read as rows of :data:`COLUMNS` little-endian words
x[r, c] and gives

    A = sum over r of u(r) * sum over c of x[r, c]        B = sum over c of w(c) * sum over r of x[r, c]

with u(r) = w(r mod 2**15) * w(r div 2**15) and w(i) the odd pseudo-random weights of :func:`_weights` (splitmix64, Steele, Lea and Flood, OOPSLA 2014). A moves
when a word changes row, B when it changes column, both when its value changes. It is made against faults, not
against a forger: sha256 is what stands against those.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

COLUMNS = 4096
"""Words in a row: 32 KiB, wide enough that both reductions of a GPU read at full bandwidth."""

_CHUNK_ROWS = 1 << 15
"""Rows handled at a time (1 GiB): keeps every index in 32 bits, where torch's reductions are fastest."""

_SAMPLES = 64
_PAGE = 4096
_MASK = (1 << 64) - 1


def _splitmix64(index: int) -> int:
    z = (index * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """The first ``count`` weights as int64; the same numbers on every device."""

    def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:  # logical shift: torch's >> keeps the sign of int64
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = torch.arange(1, count + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ shifted(z, 31)) | 1


class _Weights:
    """Weights of one device, made once for all its slabs."""

    def __init__(self, device: torch.device) -> None:
        self.rows = _weights(_CHUNK_ROWS, device)
        self.columns = self.rows[:COLUMNS]


def _fold(slab: torch.Tensor, weights: _Weights) -> torch.Tensor:
    """A and B of one slab, as a device tensor of two int64; nothing waits for the device."""
    words = slab.view(torch.int64)
    whole = words.numel() // COLUMNS * COLUMNS
    pieces = [words[:whole].view(-1, COLUMNS)] if whole else []
    if whole < words.numel():
        tail = torch.zeros(1, COLUMNS, dtype=torch.int64, device=slab.device)
        tail[0, : words.numel() - whole] = words[whole:]
        pieces.append(tail)
    rows_total = torch.zeros((), dtype=torch.int64, device=slab.device)
    columns = torch.zeros(COLUMNS, dtype=torch.int64, device=slab.device)
    number = 0
    for piece in pieces:
        for chunk in piece.split(_CHUNK_ROWS):
            row_sums = chunk.sum(dim=1)
            # One more odd factor a chunk, so that equal rows of two chunks do not trade places unseen.
            rows_total += (row_sums * weights.rows[: row_sums.numel()]).sum() * _signed(_splitmix64(number) | 1)
            columns += chunk.sum(dim=0)
            number += 1
    return torch.stack((rows_total, (columns * weights.columns).sum()))


def checksums(slabs: Sequence[torch.Tensor]) -> list[str]:
    """Checksum of each slab, with one wait for the device in all.

    Args:
        slabs: one-dimensional ``uint8`` tensors, each as long as its slab (a multiple of 8 bytes).

    Returns:
        32 hexadecimal digits a slab.
    """
    made: dict[torch.device, _Weights] = {}
    folds = []
    for slab in slabs:
        if slab.device not in made:
            made[slab.device] = _Weights(slab.device)
        folds.append(_fold(slab, made[slab.device]))
    if not folds:
        return []
    if len(made) == 1:
        pairs = torch.stack(folds).tolist()
    else:
        pairs = [fold.tolist() for fold in folds]
    return [f"{a & _MASK:016x}{b & _MASK:016x}" for a, b in pairs]


def sample_pages(size: int) -> list[int]:
    """Byte positions of the sampled pages of a slab of ``size`` bytes, ascending: first, last and some between."""
    pages = max(1, size // _PAGE)
    wanted = {0, pages - 1} | {_splitmix64(i) % pages for i in range(_SAMPLES - 2)}
    return [page * _PAGE for page in sorted(wanted)]


def samples(slab: torch.Tensor) -> str:
    """sha256 over the sampled pages of a slab (one-dimensional ``uint8``), as hexadecimal digits."""
    digest = hashlib.sha256(str(slab.numel()).encode())
    for position in sample_pages(slab.numel()):
        digest.update(slab[position : position + _PAGE].cpu().numpy().tobytes())
    return digest.hexdigest()


_DIGEST_CHUNK = 64 << 20


def tensor_digest(tensor: torch.Tensor, *, cancelled: Callable[[], bool] = lambda: False) -> str | None:
    """sha256 of a tensor's contiguous bytes; None where ``cancelled`` became true on the way.

    Works in pieces of 64 MiB, so that a background thread neither holds memory nor delays anybody for long.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else None
    digest = hashlib.sha256()
    if flat is not None:
        for piece in flat.split(_DIGEST_CHUNK):
            if cancelled():
                return None
            digest.update(piece.cpu().numpy())  # hashlib takes the buffer without a copy and releases the GIL
    return digest.hexdigest()
