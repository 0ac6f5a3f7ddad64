"""Transformers' FP8 layers with a matrix product of our choice, through Transformers' own registry of quantisers.

Transformers' ``FineGrainedFP8`` quantiser does everything else: it replaces the layers, plans their sharding and
converts the checkpoint's names. Registering a method of our own keeps a machine without a GPU from turning the weights
back into bfloat16, and puts the replaced product in place before tensor parallelism wraps the layers.

Import this module only where Transformers is about to be used.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations import finegrained_fp8
from transformers.quantizers import auto, quantizer_finegrained_fp8

from fer.engines.fp8 import function
from fer.errors import UnsupportedQuantization

# Whole modules as Any: Transformers' annotations differ between its versions, and ours must pass with each.
_hub: Any = transformers
_layers: Any = finegrained_fp8
_registry: Any = auto
_quantizers: Any = quantizer_finegrained_fp8

METHOD = "fer_fp8"
"""Our method's name in Transformers' registry."""


@_registry.register_quantization_config(METHOD)
class BlockFp8Config(_hub.FineGrainedFP8Config):  # type: ignore[misc]
    """``FineGrainedFP8Config`` and the way its layers multiply."""

    def __init__(self, matmul: str = "dequantize", **kwargs: Any) -> None:
        kwargs.pop("quant_method", None)
        super().__init__(**kwargs)
        self.quant_method = METHOD
        self.matmul = matmul


@_registry.register_quantizer(METHOD)
class BlockFp8Quantizer(_quantizers.FineGrainedFP8HfQuantizer):  # type: ignore[misc]
    """FineGrainedFP8's quantiser; keeps FP8 on every device and swaps the layers' product."""

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Every environment will do: :func:`fer.engines.fp8.choose` has looked already."""

    def update_tp_plan(self, config: Any) -> Any:
        """Transformers before 5.18 calls this; two things are missing in its own version.

        For Qwen3 it replaces the plan by one of parameters alone, so that weights were sharded and nothing summed the
        products up; and it leaves the scales of experts whole beside sharded weights.
        """
        plan = dict(config.base_model_tp_plan or {})
        config = super().update_tp_plan(config)
        plan |= config.base_model_tp_plan or {}
        experts = [key for key in plan if ".experts." in key and not key.endswith("_scale_inv")]
        config.base_model_tp_plan = {**{f"{key}_scale_inv": plan[key] for key in experts}, **plan}
        return config

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, **kwargs)
        use_matmul(model, self.quantization_config.matmul)


class BlockScaledLinear(_layers.FP8Linear):  # type: ignore[misc]
    """An FP8 layer that multiplies by torch's own means."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = function(self.matmul)(input, self.weight, self.weight_scale_inv, tuple(self.block_size))
        return output if self.bias is None else output + self.bias


class BlockScaledExperts(_layers.FP8Experts):  # type: ignore[misc]
    """FP8 experts, one after the other, that multiply by torch's own means."""

    def linear(
        self, input: torch.Tensor, weight: torch.Tensor, weight_scale_inv: torch.Tensor, activation_scale: Any = None
    ) -> torch.Tensor:
        return function(self.matmul)(input, weight, weight_scale_inv, tuple(self.block_size))


def use_matmul(model: nn.Module, matmul: str) -> None:
    """Let the FP8 layers of ``model`` multiply by ``matmul``; ``"kernels"`` leaves them as Transformers made them.

    Raises:
        UnsupportedQuantization: a layer's class is not one whose product can be replaced.
    """
    if matmul == "kernels":
        return
    for path, module in model.named_modules():
        kind = type(module)
        if kind is _layers.FP8Linear:
            module.__class__ = BlockScaledLinear
        elif kind is _layers.FP8Experts:
            module.__class__ = BlockScaledExperts
            # Transformers dispatches by this setting in front of the class's own loop over experts.
            module.config._experts_implementation = "eager"
        elif kind.__module__ == _layers.FP8Linear.__module__:
            raise UnsupportedQuantization(
                f"{path} is a {kind.__name__}, which needs Transformers' own FP8 kernels",
                fix="Install the package kernels with a local copy of its FP8 kernel",
                method=f"fp8 ({kind.__name__})",
            )
        else:
            continue
        module.matmul = matmul


def check_shards(model: nn.Module, world: int) -> None:
    """Refuse a sharding that cuts through the blocks of FP8 weights; ``model`` may be a skeleton.

    Transformers shards weights and scales each by their own length, so a rank would pair rows with foreign scales.

    Raises:
        UnsupportedQuantization: naming the first such weight.
    """
    for path, module in model.named_modules():
        if not isinstance(module, (_layers.FP8Linear, _layers.FP8Experts)):
            continue
        for name, weight in module.named_parameters(path, recurse=False):
            scale = module._parameters.get(f"{name.rpartition('.')[2]}_scale_inv")
            why = "" if scale is None else _cut(weight, scale, module.block_size, world)
            if why:
                raise UnsupportedQuantization(
                    f"{name} cannot be shared by {world} ranks",
                    why=why,
                    fix="Use fewer ranks",
                    method="fp8 (blocks cut by tensor parallelism)",
                )


def _cut(weight: Any, scale: Any, block: tuple[int, int], world: int) -> str:
    """Why a rank's shard of a weight and its shard of the scales do not belong together, ``""`` where they do."""
    first = weight.ndim - 2  # experts are stacked in front of rows and columns
    for dim in (first, first + 1):
        size = block[dim - first]
        sharded = [p for p in getattr(weight, "placements", ()) if hasattr(p, "dim") and p.dim % weight.ndim == dim]
        # A projection that packs two halves is dealt out half by half: each rank gets its part of both.
        halves = max((getattr(p, "split_factor", 1) for p in sharded), default=1)
        if sharded and weight.shape[dim] % (world * size * halves):
            return f"its dimension of {weight.shape[dim]} is not whole blocks of {size} on each rank"
        rows, scales = (getattr(tensor, "_local_tensor", tensor).shape[dim] for tensor in (weight, scale))
        if scales != -(-rows // size):
            return f"a rank would hold {rows} rows or columns and the scales of {scales} blocks of {size}"
    return ""
