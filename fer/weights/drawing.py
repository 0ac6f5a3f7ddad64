"""Building modules on ``meta`` without drawing their first weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class WithoutDrawing(TorchFunctionMode):
    """Leaves out random fills of tensors on ``meta``, which hold nothing that could be filled.

    Modules draw their first weights as they are built, and the first ``normal_`` on ``meta`` of a process makes torch
    import its compiler: more than a second, on the path of every recovery.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Give back a tensor on ``meta`` as it is where it would be filled; do everything else."""
        kwargs = kwargs or {}
        if func in _DRAWS:
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled
        return func(*args, **kwargs)


# The functions of nn.init are listed for themselves: what they call inside, a mode does not see again.
_DRAWS = frozenset(
    [getattr(nn.init, name) for name in ("normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_")]
    + [getattr(torch.Tensor, name) for name in ("normal_", "uniform_", "bernoulli_", "exponential_", "random_")]
)
