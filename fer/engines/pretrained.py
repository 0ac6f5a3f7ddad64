"""A Hugging Face folder as a model: loaded in full, or as the same model on ``meta`` without reading weights.

The skeleton takes the steps of ``from_pretrained`` in its order, less the weights: configuration, quantiser, class,
replaced layers, sharding plan, evaluation mode, generation configuration. What loading adds to it afterwards is plain
values and tensors, which FER keeps.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fer import warm
from fer.errors import CheckpointError, OptionError
from fer.weights.shards import read_header

_CONFIGURATIONS = ("config", "generation_config")
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_TOKENIZER_FILES = (
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
_COMPLETE = "Name a complete Hugging Face folder, or bring this one's files anew"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How one rank makes its model of a folder.

    ``world`` is the number of tensor-parallel ranks; above 1 the process group must stand. ``matmul`` is how FP8
    layers multiply, ``""`` for a model without them.
    """

    folder: Path
    device: str
    dtype: torch.dtype
    overrides: Mapping[str, Any] = field(default_factory=dict)
    attention: str = ""
    world: int = 1
    matmul: str = ""
    trust_remote_code: bool = False


def raw_config(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``, as it stands there.

    Raises:
        CheckpointError: it is missing or no JSON object.
    """
    return _json_object(folder / "config.json")


def compared_config(folder: Path) -> dict[str, Any]:
    """The folder's configuration as far as it has an effect: ``config`` and, where there is one, ``generation_config``.

    Raises:
        CheckpointError: one of the files is no JSON object.
    """
    # Loading replaces these: by the compute type, which the identity has in its own field, and by the folder's name.
    # All others, the version that wrote the file included, end in the configuration that the module carries.
    replaced = {"_name_or_path", "torch_dtype", "dtype"}
    config = {name: value for name, value in raw_config(folder).items() if name not in replaced}
    generation = folder / "generation_config.json"
    more = {"generation_config": _json_object(generation)} if generation.exists() else {}
    return {"config": config, **more}


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read", why=_first_line(error), fix=_COMPLETE) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object", fix=_COMPLETE)
    return content


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def check_unchanged(folder: Path, settings: Mapping[str, Any]) -> None:
    """Whether a folder's configuration is still what an identity's settings tell.

    Raises:
        CheckpointError: it is not.
    """
    compared = compared_config(folder)
    changed = [name for name in _CONFIGURATIONS if compared.get(name) != settings.get(name)]
    if changed:
        raise CheckpointError(
            f"{' and '.join(f'{name}.json' for name in changed)} of {folder} changed during the start",
            fix="Start again once the folder is complete",
            path=str(folder),
        )


def ends_of(module: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    end = module.generation_config.eos_token_id
    return frozenset(end if isinstance(end, list) else [] if end is None else [end])


def architectures(folder: Path) -> list[str]:
    """Names of model classes, as ``config.json`` has them.

    Raises:
        CheckpointError: it is missing or no JSON object, or has something else there.
    """
    named = raw_config(folder).get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise CheckpointError(f"{folder / 'config.json'} has architectures that are no list of names", fix=_COMPLETE)
    return named


def tokenizer_of(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer, by ``AutoTokenizer``.

    Raises:
        CheckpointError: naming the file, where one is no JSON object.
    """
    if not trust_remote_code and (held := warm.take("tokenizer", folder)) is not None:
        return held
    try:
        return _hub().AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except ImportError:
        raise  # a package is missing, and the message says which
    # Of a damaged file, each of the tokenizers' libraries raises something else, the one in Rust plain Exception.
    except Exception as error:
        for path in (folder / name for name in _TOKENIZER_FILES):
            if path.exists():
                _json_object(path)
        raise CheckpointError(
            f"Transformers cannot make a tokenizer of {folder}", why=_first_line(error), fix=_COMPLETE
        ) from error


def config_of(folder: Path, overrides: Mapping[str, Any], *, trust_remote_code: bool = False) -> Any:
    """The model's configuration with fields overridden; Transformers' class for it.

    Raises:
        CheckpointError: Transformers refuses it.
    """
    if not overrides and not trust_remote_code and (held := warm.take("config", folder)) is not None:
        return held
    try:
        return _hub().AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code, **copy.deepcopy(dict(overrides))
        )
    except ImportError:
        raise  # a package is missing, and the message says which
    # Each model's configuration checks its fields, or stumbles over them, in its own way.
    except Exception as error:
        raise CheckpointError(
            f"Transformers does not understand {folder / 'config.json'}", why=_first_line(error), fix=_COMPLETE
        ) from error


def architecture_of(config: Any) -> str:
    """Name of the model class that ``AutoModelForCausalLM`` takes for this configuration."""
    named = list(getattr(config, "architectures", None) or ())
    return str(named[0]) if named else type(config).__name__.removesuffix("Config")


def dtype_of(asked: str, config: Any, shards: Sequence[Path]) -> str:
    """Torch's name of the compute type: as asked, else as configured, else the first float type of the weights."""
    if asked != "auto":
        return asked
    configured = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if configured is not None:
        return str(configured).removeprefix("torch.")
    found = (tensor.dtype for shard in shards for tensor in read_header(shard).tensors if tensor.dtype in _FLOATS)
    return _FLOATS[next(found, "F32")]


def check_shared(folder: Path, config: Any, world: int) -> None:
    """Refuse a model that so many tensor-parallel ranks cannot share.

    Args:
        config: Transformers' configuration of it.

    Raises:
        OptionError: it has no plan, its heads cannot be spread evenly, or its embeddings are tied.
    """
    if world < 2:
        return
    text = config.get_text_config(decoder=True)
    if not any(getattr(each, "base_model_tp_plan", None) for each in (config, text)):
        raise OptionError(
            f"{folder} cannot be shared by {world} ranks",
            why=f"Transformers has no tensor-parallel plan for {architecture_of(config)}",
            fix="Serve it with one rank",
        )
    heads = {
        "attention heads": int(text.num_attention_heads),
        "key/value heads": int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads),
    }
    for name, count in heads.items():
        if count % world:
            raise OptionError(
                f"{folder} cannot be shared by {world} ranks", why=f"it has {count} {name}", fix="Use fewer ranks"
            )
    if getattr(text, "tie_word_embeddings", False):
        # KeyError: 'lm_head.weight', of apply_tensor_parallelism in transformers 5.24, for a model on meta.
        raise OptionError(
            f"{folder} cannot be shared by {world} ranks",
            why="its input and output embeddings are tied, and Transformers cannot shard the skeleton of such a model",
            fix="Serve it with one rank",
        )


def plan_of(folder: Path, overrides: Mapping[str, Any], *, trust_remote_code: bool = False) -> dict[str, str]:
    """Sharding styles of the model's own tensor-parallel plan, by patterns of module names; empty without one."""
    config = config_of(folder, overrides, trust_remote_code=trust_remote_code)
    # Models add to the plans of their class and configuration when they are made.
    with torch.device("meta"):
        model = _hub().AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {pattern: str(style) for pattern, style in (getattr(model, "_tp_plan", None) or {}).items()}


def load(recipe: Recipe) -> nn.Module:
    """The model, by ``from_pretrained``."""
    if recipe.matmul and recipe.world > 1:
        build(recipe)  # a plan that cannot be right is refused before anything is read
    where: dict[str, Any] = {"distributed_config": _distributed(recipe)} if recipe.world > 1 else {}
    if recipe.world == 1 and recipe.device != "cpu":
        where = {"device_map": {"": recipe.device}}
    model: nn.Module = _hub().AutoModelForCausalLM.from_pretrained(
        recipe.folder,
        config=_config(recipe),
        dtype=recipe.dtype,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=recipe.trust_remote_code,
        **_attention(recipe),
        **where,
    )
    if recipe.world > 1:
        _compact(model)
    # Left over from loading: how to rename weights back when saving. Its compiled patterns exist on no skeleton, and
    # without it save_pretrained falls back to the class's own table.
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions
    _forget_hash(model)
    return model.eval()


def build(recipe: Recipe) -> nn.Module:
    """The same model on ``meta``; reads no weights."""
    config = _config(recipe)
    quantizer = _quantizer(config)
    config.name_or_path = str(recipe.folder)
    with torch.device("meta"):
        model = _hub().AutoModelForCausalLM.from_config(
            config, dtype=recipe.dtype, trust_remote_code=recipe.trust_remote_code, **_attention(recipe)
        )
        if quantizer is not None:
            quantizer.preprocess_model(model=model, dtype=recipe.dtype, device_map=None)
        if recipe.world > 1:
            model = _distribute(model, recipe)
        _plain_buffers(model)
    model.eval()
    model.tie_weights()
    _generation(model, recipe)
    if quantizer is not None:
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    skeleton: nn.Module = model
    return skeleton


def _hub() -> Any:
    """The package ``transformers``, whose lazily made names no type checker follows."""
    import transformers

    return transformers


def _config(recipe: Recipe) -> Any:
    config = config_of(recipe.folder, recipe.overrides, trust_remote_code=recipe.trust_remote_code)
    if recipe.matmul:
        from fer.engines.fp8_modules import METHOD

        details = dict(config.quantization_config)
        config.quantization_config = {**details, "quant_method": METHOD, "matmul": recipe.matmul}
    return config


def _attention(recipe: Recipe) -> dict[str, Any]:
    return {"attn_implementation": recipe.attention} if recipe.attention else {}


def _quantizer(config: Any) -> Any:
    """The quantiser of a pre-quantised model, with the changes to ``config`` that it asks for; None without one."""
    if getattr(config, "quantization_config", None) is None:
        return None
    from transformers.quantizers import auto

    registry: Any = auto
    return registry.get_hf_quantizer(config, None, None, True, {})[0]


def _distributed(recipe: Recipe) -> Any:
    from transformers import distributed

    parallel: Any = distributed
    return parallel.DistributedConfig(tp_plan="auto", tp_size=recipe.world)


def _distribute(model: Any, recipe: Recipe) -> Any:
    """Shard a skeleton by the plan that ``from_pretrained`` would use."""
    plan, _, mesh = type(model).prepare_distribute_model(_distributed(recipe))
    model = type(model).maybe_distribute_model(model, plan, mesh)
    if recipe.matmul:
        from fer.engines.fp8_modules import check_shards

        check_shards(model, recipe.world)
    return model


def _plain_buffers(model: nn.Module) -> None:
    """Buffers as loading leaves them: it puts plain tensors into the places that constructors filled."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer)


def _compact(model: nn.Module) -> None:
    """Give every shard memory of its own: on a CPU loading leaves it as a view into the whole tensor."""
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.untyped_storage().nbytes() > local.numel() * local.element_size():
                local.data = local.clone()


def _generation(model: Any, recipe: Recipe) -> None:
    """The generation settings that ``from_pretrained`` reads from the folder, by the method that it uses."""
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        model.adjust_generation_fn(
            None,
            from_auto_class=True,
            from_pipeline=None,
            pretrained_model_name_or_path=recipe.folder,
            cache_dir=None,
            force_download=False,
            proxies=None,
            local_files_only=True,
            token=None,
            revision="main",
            subfolder="",
            trust_remote_code=recipe.trust_remote_code,
        )
    _forget_hash(model)


def _forget_hash(model: Any) -> None:
    """Python's hashes of text differ in every process, so a kept one is wrong; it only chooses between warnings."""
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings._original_object_hash = None
