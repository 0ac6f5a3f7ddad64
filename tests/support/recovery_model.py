"""A small model with everything recovery has to bring back, its checkpoint, and an engine over both."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fer.engines.module import ModuleEngine
from fer.weights.checkpoint import resolve

WIDTH, LAYERS = 64, 3


class Gate:
    """A plain object that refers to a module's tensor, as routers in mixture-of-experts models do."""

    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias
        self.scale = None


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("bias", torch.zeros(width))
        self.register_buffer("table", torch.zeros(width), persistent=False)
        self.gate = Gate(self.bias)
        self.folded: torch.Tensor | None = None
        self.on_host: torch.Tensor | None = None
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.norm(x))) * self.scale
        return x + self.down(hidden) + self.gate.bias + self.table @ self.folded * (self.gate.scale or 0.0)


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_checkpoint(folder: Path, *, seed: int = 0, width: int = WIDTH, layers: int = LAYERS) -> Path:
    """A folder of two shards and their index; the same seed gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    state = {name: torch.randn_like(value) for name, value in Model(width, layers).state_dict().items()}
    del state["head.weight"]
    names = sorted(state)
    where = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def load(folder: Path, module: nn.Module) -> None:
    """Fill the module and compute what loading computes: a folded tensor, scalars, a non-persistent table."""
    own = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for shard in resolve(folder):
            with safe_open(shard, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    own[name].data.copy_(opened.get_tensor(name))
        for number, layer in enumerate(module.layers):
            layer.folded = (layer.up.weight.t() @ layer.up.weight).contiguous()
            layer.table.copy_(torch.linspace(0, 1, layer.table.numel()))
            layer.on_host = torch.arange(4.0, device="cpu") * number
            layer.scale = 1.0 + float(layer.norm.weight.abs().max())
            layer.gate.scale = 0.25 * (number + 1)


def engine(folder: Path, *, width: int = WIDTH, layers: int = LAYERS, **arguments: Any) -> ModuleEngine:
    """A ModuleEngine over :class:`Model` and a checkpoint folder."""
    return ModuleEngine(
        functools.partial(Model, width, layers),
        functools.partial(load, folder),
        checkpoint=resolve(folder),
        model=str(folder),
        **arguments,
    )


def answer(module: nn.Module) -> str:
    """A digest of the model's output, and of what it keeps in host memory, bit for bit."""
    ids = torch.arange(32, device=next(module.parameters()).device).view(2, 16)
    with torch.inference_mode():
        out = module(ids).cpu()
    digest = hashlib.sha256(out.contiguous().numpy().tobytes())
    for layer in module.layers:
        digest.update(layer.on_host.numpy().tobytes())
    return digest.hexdigest()


def expected(folder: Path, **arguments: int) -> str:
    """The answer of the model loaded without FER."""
    made = engine(folder, **arguments)
    return answer(made.load())
