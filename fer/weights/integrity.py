"""Proof that kept bytes are the published bytes.

A slab's *checksum* covers every byte, depends on every byte's position, and is computed where the memory is: two
reductions over the slab, so a GPU does it at memory bandwidth and nothing is copied to the host. Its *samples* are a
digest of a few pages, enough for host slabs, which the kernel has sealed against writes. A tensor's *digest* is the
sha256 of its contiguous bytes, for people and for ``fer verify --full``.

The checksum is linear, with arithmetic modulo 2**64. The slab is read as rows of :data:`COLUMNS` little-endian words
x[r, c] and gives

    A = sum over r of u(r) * sum over c of x[r, c]        B = sum over c of w(c) * sum over r of x[r, c]

with u(r) = w(r mod 2**13) * w(r div 2**13) and w(i) the odd pseudo-random weights of :func:`_weights` (splitmix64,
Steele, Lea and Flood, OOPSLA 2014). A moves when a word changes row, B when it changes column, both when its value
changes. It is made against faults, not against a forger: sha256 is what stands against those.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import torch

COLUMNS = 1 << 14
"""Words in a row: 128 KiB, wide enough for full bandwidth and few enough rows to fold on the host."""

_CHUNK_ROWS = 1 << 13
"""Rows handled at a time (1 GiB): keeps every byte offset in 32 bits, where torch's reductions are fastest."""

_SAMPLES = 16
"""Pages a slab: a model is some fifty slabs, and the kernel has sealed them all."""

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


@functools.cache
def _weights() -> torch.Tensor:
    """w(0), w(1), ... for a row and for a chunk's rows, as int64 in host memory."""

    def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:  # logical shift: torch's >> keeps the sign of int64
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    z = torch.arange(1, COLUMNS + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ shifted(z, 31)) | 1


def _chunks(slab: torch.Tensor) -> list[torch.Tensor]:
    """A slab as matrices of :data:`COLUMNS` words; what is left of a last row is filled up with zeros."""
    words = slab.view(torch.int64)
    whole = words.numel() // COLUMNS * COLUMNS
    chunks = list(words[:whole].view(-1, COLUMNS).split(_CHUNK_ROWS)) if whole else []
    if whole < words.numel():
        tail = torch.zeros(1, COLUMNS, dtype=torch.int64, device=slab.device)
        tail[0, : words.numel() - whole] = words[whole:]
        chunks.append(tail)
    return chunks


class _Sums:
    """Sums of one slab, on its device: of each row, and of each column.

    Both reductions are started at once and nothing waits for the device. They write into buffers made before, so that
    they are the only kernels of a check: each further kind would cost a fresh process some milliseconds to load. The
    rest is folded on the host.
    """

    def __init__(self, slab: torch.Tensor) -> None:
        chunks = _chunks(slab)
        self._lengths = [chunk.shape[0] for chunk in chunks]
        self._rows = torch.empty(sum(self._lengths), dtype=torch.int64, device=slab.device)
        columns = torch.empty(len(chunks), COLUMNS, dtype=torch.int64, device=slab.device)
        for rows, column_sums, chunk in zip(self._rows.split(self._lengths), columns, chunks, strict=True):
            torch.sum(chunk, dim=1, out=rows)
            torch.sum(chunk, dim=0, out=column_sums)
        self._columns = columns.sum(dim=0) if len(chunks) > 1 else columns[0]

    def fold(self) -> str:
        """A and B as hexadecimal digits; waits for the device."""
        weights = _weights()
        a = 0
        for number, rows in enumerate(self._rows.cpu().split(self._lengths)):
            a += int((rows * weights[: rows.numel()]).sum()) * (_splitmix64(number) | 1)
        b = int((self._columns.cpu() * weights).sum())
        return f"{a & _MASK:016x}{b & _MASK:016x}"


class Checksums:
    """Checksums of several slabs: all are begun before the first is waited for.

    Args:
        slabs: one-dimensional ``uint8`` tensors, each as long as its slab (a multiple of 8 bytes).
    """

    def __init__(self, slabs: Sequence[torch.Tensor]) -> None:
        self._begun = [_Sums(slab) for slab in slabs]

    def result(self) -> list[str]:
        """32 hexadecimal digits a slab; waits for the device."""
        return [sums.fold() for sums in self._begun]


def checksums(slabs: Sequence[torch.Tensor]) -> list[str]:
    """Checksum of each slab, see :class:`Checksums`."""
    return Checksums(slabs).result()


def sample_pages(size: int) -> list[int]:
    """Byte positions of the sampled pages of a slab of ``size`` bytes, ascending: first, last and some between."""
    pages = max(1, size // _PAGE)
    wanted = {0, pages - 1} | {_splitmix64(i) % pages for i in range(_SAMPLES - 2)}
    return [page * _PAGE for page in sorted(wanted)]


def samples(slab: torch.Tensor) -> str:
    """sha256 over the sampled pages of a slab in host memory (one-dimensional ``uint8``), as hexadecimal digits."""
    digest = hashlib.sha256(str(slab.numel()).encode())
    content = slab.numpy()
    for position in sample_pages(slab.numel()):
        digest.update(content[position : position + _PAGE].tobytes())
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
