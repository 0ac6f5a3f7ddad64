"""Small helpers over whole torch storages."""

from __future__ import annotations

import torch

from fer.memory import torch_private


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All bytes of a storage, as a one-dimensional ``uint8`` tensor over it."""
    return torch_private.tensor_over(storage, torch.uint8, (storage.nbytes(),), (1,), 0)


def private_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of a storage in memory that torch allocates on the same device."""
    return bytes_of(storage).clone().untyped_storage()
