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
