"""Engines for the conformance suite, and what is asked of them. Imported by its processes, by name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fer.engines.base import Engine
from fer.engines.module import ModuleEngine
from fer.engines.transformers import TransformersEngine


class Helper:
    """A plain object that holds a tensor and a figure which loading computes."""

    def __init__(self) -> None:
        self.scale: torch.Tensor | None = None
        self.limit = 0.0


class Awkward(nn.Module):
    """All that a state_dict does not hold: aliases, views, plain attributes, non-persistent buffers, figures."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(width)
        self.mixer = nn.Linear(width, width, dtype=torch.float64)
        self.unused: nn.Parameter | None = None
        self.register_buffer("table", torch.zeros(width), persistent=False)
        self.register_buffer("empty", torch.zeros(0, width))
        self.helper = Helper()
        self.parts: list[torch.Tensor] = [self.embed.weight]
        self.gain = 0.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens)) * self.table
        x = self.mixer(x.double()).to(x.dtype) * self.helper.scale * self.gain
        left, right = self.halves
        return self.head(torch.cat([x[:, : left.shape[1]] * left, x[:, right.shape[1] :] * right], dim=1))


def build_awkward(width: int) -> nn.Module:
    return Awkward(width)


def load_awkward(module: nn.Module, path: str) -> None:
    """Read the weights and post-process them: fold, transpose, derive."""
    assert isinstance(module, Awkward)
    module.load_state_dict(load_file(path), strict=False)
    module.mixer.weight = nn.Parameter(module.mixer.weight.detach().t().contiguous().t(), requires_grad=False)
    module.mixer.weight.layout_note = "column-major"  # type: ignore[attr-defined]
    module.table.copy_(torch.linspace(0.5, 1.5, module.table.numel()))
    width = module.table.numel()
    both = torch.arange(2.0 * width).reshape(2, width).mul_(0.01).add_(1)
    module.halves = (both[:, : width // 2][:1], both[:, width // 2 :][:1])
    module.helper.scale = module.table.flip(0)
    module.helper.limit = float("inf")
    module.gain = module.table.sum().item() / 7


def write_awkward(path: Path, width: int = 8, seed: int = 0) -> Path:
    """A checkpoint for :class:`Awkward`."""
    torch.manual_seed(seed)
    module = Awkward(width)
    module.norm.running_mean.normal_()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items() if name != "head.weight"}
    save_file(state, path)
    return path


def awkward(path: str, width: int = 8, device: str = "cpu", quantization: str = "") -> Engine:
    return ModuleEngine(
        functools.partial(build_awkward, width),
        functools.partial(load_awkward, path=path),
        device=device,
        checkpoint=[path],
        mutable=["norm.running_*", "norm.num_batches_tracked"],
        quantization=quantization,
        first_token=ask_awkward,
    )


def ask_awkward(module: nn.Module) -> torch.Tensor:
    device = next(module.parameters()).device
    output: torch.Tensor = module(torch.arange(4, device=device))
    return output


def awkward_outputs(engine: ModuleEngine) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {"head": ask_awkward(engine.module)}


class Sharded(nn.Module):
    """One linear layer cut by rows over the ranks of a launch."""

    def __init__(self) -> None:
        super().__init__()
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.linear = nn.Linear(8, 8 // world, bias=False)
        self.rank = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = self.linear(x)
        world = torch.distributed.get_world_size()
        parts = [torch.empty_like(mine) for _ in range(world)]
        torch.distributed.all_gather(parts, mine)
        return torch.cat(parts, dim=-1)


def load_sharded(module: nn.Module, path: str) -> None:
    assert isinstance(module, Sharded)
    weight = load_file(path)["weight"]
    rank, rows = torch.distributed.get_rank(), module.linear.weight.shape[0]
    with torch.no_grad():
        module.linear.weight.copy_(weight[rank * rows : (rank + 1) * rows])
    module.rank = rank


def sharded(path: str, device: str = "cpu") -> Engine:
    return ModuleEngine(Sharded, functools.partial(load_sharded, path=path), device=device, checkpoint=[path])


def sharded_outputs(engine: ModuleEngine) -> dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {"y": engine.module(torch.arange(8.0).reshape(1, 8))}


def transformers(**arguments: Any) -> Engine:
    """A :class:`TransformersEngine`; ``cuda`` as the device means this rank's own card."""
    if arguments.get("device") == "cuda":
        import os

        arguments["device"] = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return TransformersEngine(max_length=64, **arguments)


def transformers_outputs(engine: TransformersEngine) -> dict[str, torch.Tensor]:
    prompt = [1, 5, 9, 200]
    return {"logits": engine.logits(prompt), "tokens": torch.tensor(engine.generate(prompt, 8))}


class Forgetful(ModuleEngine):
    """Breaks the rules: where it did not load the module, it changes a value before going on."""

    loaded = False

    def load(self) -> nn.Module:
        self.loaded = True
        return super().load()

    def adopt(self, module: nn.Module) -> None:
        if not self.loaded:
            module.gain = 1.0
        super().adopt(module)


def forgetful(path: str) -> Engine:
    return Forgetful(functools.partial(build_awkward, 8), functools.partial(load_awkward, path=path), checkpoint=[path])
