"""Model folders for the tests of engines: tiny ones with random weights, in several formats, made in a moment."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fer.engines.fp8 import quantize_blocks
from fer.engines.quiet import quiet

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(folder: Path, *, seed: int = 0, tied: bool = False, dtype: str = "float32", **fields: Any) -> Path:
    """A Llama with random weights; every tensor is different, biases and norms included."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SMALL, "tie_word_embeddings": tied, "attention_bias": True, **fields})
    return _write(folder, LlamaForCausalLM, config, seed, dtype)


def qwen3(folder: Path, *, seed: int = 0, dtype: str = "bfloat16", **fields: Any) -> Path:
    """A Qwen3 (norms on queries and keys, as in the 8B)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _write(folder, Qwen3ForCausalLM, Qwen3Config(**{**SMALL, **fields}), seed, dtype)


def qwen3_moe(folder: Path, *, seed: int = 0, dtype: str = "bfloat16", **fields: Any) -> Path:
    """A Qwen3 with 4 experts, 2 of them used for a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    return _write(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**SMALL, **moe, **fields}), seed, dtype)


def to_fp8(source: Path, folder: Path, *, block: tuple[int, int] = (128, 128)) -> Path:
    """``source`` (one file) as block-wise FP8, in the checkpoint format of FineGrainedFP8."""
    from safetensors import safe_open

    folder.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            tensor = file.get_tensor(name)
            if name.endswith("proj.weight"):
                tensors[name], tensors[f"{name}_scale_inv"] = quantize_blocks(tensor, block)
            else:
                tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write(folder: Path, kind: Any, config: Any, seed: int, dtype: str) -> Path:
    torch.manual_seed(seed)
    with quiet():
        model = kind(config).to(getattr(torch, dtype))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        model.save_pretrained(folder)
    return folder


def with_config(source: Path, folder: Path, **fields: Any) -> Path:
    """``source`` with fields of its ``config.json`` replaced."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder
