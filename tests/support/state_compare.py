"""Compare two modules in everything that loading may have made of them, without FER's capture or digest."""

from __future__ import annotations

import torch
from torch import nn

INTERNAL = set(vars(nn.Module()))


def facts(module: nn.Module) -> dict[str, object]:
    """Everything that tells two modules apart, by path: plain values as they are, tensors as a tuple of facts.

    Tensors are numbered as they are met, and so are storages, so that identity and sharing become comparable.
    """
    found: dict[str, object] = {}
    numbers: dict[int, int] = {}
    storages: dict[int, int] = {}
    walked: set[int] = set()

    def tensor(path: str, t: torch.Tensor) -> None:
        first = id(t) not in numbers
        number = numbers.setdefault(id(t), len(numbers))
        storage = storages.setdefault(t.untyped_storage()._cdata, len(storages))
        found[path] = (
            number, type(t), t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), storage, t.requires_grad,
            t.device, _bytes(t),
        )  # fmt: skip
        if first:
            for name, extra in sorted(vars(t).items()):
                thing(f"{path}.{name}", extra)

    def thing(path: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            tensor(path, value)
        elif isinstance(value, nn.Module):
            if id(value) not in walked:
                walked.add(id(value))
                walk(path, value)
        elif isinstance(value, list | tuple):
            found[path] = (type(value), len(value))
            for n, item in enumerate(value):
                thing(f"{path}[{n}]", item)
        elif isinstance(value, dict):
            found[path] = (type(value), list(value))
            for key, item in value.items():
                thing(f"{path}[{key!r}]", item)
        elif hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
            if id(value) not in walked:
                walked.add(id(value))
                found[path] = type(value)
                for name, item in sorted(vars(value).items()):
                    thing(f"{path}.{name}", item)
        elif callable(value):
            found[path] = getattr(value, "__qualname__", type(value))
        else:
            found[path] = (type(value), None if " object at 0x" in repr(value) else repr(value))

    def walk(prefix: str, owner: nn.Module) -> None:
        found[prefix] = (
            type(owner),
            owner.training,
            list(owner._parameters),
            list(owner._buffers),
            list(owner._modules),
        )
        found[f"{prefix}/transient"] = sorted(owner._non_persistent_buffers_set)
        for table in (owner._parameters, owner._buffers, owner._modules):
            for name, value in table.items():
                thing(f"{prefix}.{name}", value)
        for name in sorted(set(vars(owner)) - INTERNAL):
            thing(f"{prefix}.{name}", vars(owner)[name])

    walked.add(id(module))
    walk("", module)
    return found


def _bytes(t: torch.Tensor) -> bytes:
    """The elements, bit by bit, NaNs included."""
    if t.numel() == 0:
        return b""
    return bytes(torch.empty(t.numel(), dtype=t.dtype).copy_(t.detach().flatten()).view(torch.uint8).tolist())


def assert_same(left: nn.Module, right: nn.Module) -> None:
    mine, theirs = facts(left), facts(right)
    assert mine.keys() == theirs.keys()
    for path, fact in mine.items():
        assert fact == theirs[path], path
