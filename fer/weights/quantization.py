"""The quantisation guard: which methods' weights may be kept.

A loaded module is more than its checkpoint: kernels repack, scales are fused, flags are set. Each method therefore
enters :data:`ALLOWED` together with the test that compares a loaded and an attached module bit by bit. Everything else
is refused by name before any loading work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fer.errors import UnsupportedQuantization

BLOCK_FP8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class Allowed:
    """One method of the allowlist.

    Attributes:
        title: what users call it.
        objection: why a configuration of this method is not covered, ``""`` where it is; with a variant's name.
        parity: the test that proves it.
    """

    title: str
    objection: Callable[[Mapping[str, Any]], tuple[str, str]]
    parity: str


def of_config(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Method and configuration from the content of a Hugging Face ``config.json``.

    The method is ``""`` for unquantised weights and ``"unknown"`` where a quantisation names no method, so that it
    is refused. Mixed layouts that stand outside ``quantization_config`` (``expert_dtype``) are taken into it.
    """
    found = next(_quantizations(config), None)
    if found is None:
        # Some checkpoints say it only here: the experts are packed though nothing else is quantised.
        packed = _packed_experts(config)
        return ("mixed", packed) if packed else ("", {})
    details = {**found, **_packed_experts(config)}
    method = details.get("quant_method") or details.get("quant_algo") or details.get("quant_type")
    if not method and isinstance(details.get("quantization"), Mapping):  # ModelOpt's own hf_quant_config.json
        method = details["quantization"].get("quant_algo")
    if not method:
        flags = [flag for flag in ("load_in_8bit", "load_in_4bit") if details.get(flag)]
        method = "bitsandbytes" if flags else "unknown"
    # Transformers hands out an enum whose text is the method's name.
    return str(getattr(method, "value", method)).lower(), details


def check(method: str, config: Mapping[str, Any]) -> None:
    """Let an allowed method pass.

    Args:
        method: as :func:`of_config` gives it, ``""`` for unquantised weights.
        config: the method's configuration.

    Raises:
        UnsupportedQuantization: naming the method and, where only a variant is refused, the variant.
    """
    entry = ALLOWED.get(method)
    title, why = (_title(method, config), "") if entry is None else entry.objection(config)
    if entry is not None and not why:
        return
    allowed = ", ".join(allowed.title for allowed in ALLOWED.values())
    raise UnsupportedQuantization(
        f"quantisation {title} is not supported",
        why=why or "no test proves that its loaded state is kept whole",
        fix=f"Supported: {allowed}. Start with weights=false to let the engine load this model as it always did",
        method=title,
    )


def _quantizations(config: Mapping[str, Any]) -> Any:
    """Every non-empty quantisation configuration, the model's own first, then those of nested parts."""
    for key in ("quantization_config", "compression_config"):
        found = config.get(key)
        if found is not None and not isinstance(found, Mapping):
            found = found.to_dict() if hasattr(found, "to_dict") else {"quant_method": str(found)}
        if found:
            yield dict(found)
    if config.get("gguf_file"):
        yield {"quant_method": "gguf"}
    for value in config.values():
        # Multimodal models keep it in text_config and the like.
        if isinstance(value, Mapping) and ("quantization_config" in value or "compression_config" in value):
            yield from _quantizations(value)


_PLAIN_EXPERTS = {"bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "fp8", "float8_e4m3fn"}


def _packed_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    found = next((part["expert_dtype"] for part in parts if part.get("expert_dtype")), None)
    return {} if _is_plain(found) else {"expert_dtype": str(found)}


def _is_plain(expert_dtype: Any) -> bool:
    return not expert_dtype or str(expert_dtype).removeprefix("torch.") in _PLAIN_EXPERTS


def _unquantized(config: Mapping[str, Any]) -> tuple[str, str]:
    left = {key for key, value in config.items() if value}
    return (
        ("", "")
        if not left
        else (
            "unknown",
            f"the weights count as unquantised, yet {sorted(left)} are configured",
        )
    )


_BLOCK_FP8_KEYS = {
    "quant_method",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "scale_fmt",
    "expert_dtype",
}


def _block_fp8(config: Mapping[str, Any]) -> tuple[str, str]:
    """Block-wise FP8 in the checkpoint format of FineGrainedFP8: two block sizes, dynamic activations, float scales."""
    block = config.get("weight_block_size")
    if not block:
        return "fp8 (per-tensor)", "it has no weight_block_size"
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(_is_size(size) for size in block):
        return (
            f"fp8 (weight_block_size {block!r})",
            "two sizes greater than zero are expected",
        )
    if not _is_plain(config.get("expert_dtype")):
        return (
            f"fp8 with {config['expert_dtype']} experts",
            "its experts are packed in another format",
        )
    if config.get("activation_scheme", "dynamic") != "dynamic":
        return (
            f"fp8 (block-wise, {config['activation_scheme']} activations)",
            "only dynamic activation scales are covered",
        )
    if str(config.get("fmt") or "e4m3").removeprefix("float8_") not in {
        "e4m3",
        "e4m3fn",
    }:
        return f"fp8 ({config['fmt']})", "only e4m3 is covered"
    if config.get("scale_fmt") not in (None, "", "float", "float32"):
        return (
            f"fp8 (block-wise, {config['scale_fmt']} scales)",
            "only float32 scales are covered",
        )
    strange = sorted(
        key for key, value in config.items() if key not in _BLOCK_FP8_KEYS and value not in (None, False, [], {})
    )
    if strange:
        return (
            f"fp8 (block-wise, with {', '.join(strange)})",
            "these settings are not covered by a test",
        )
    return "", ""


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _title(method: str, config: Mapping[str, Any]) -> str:
    """The method by the name its users know, with the variant that matters."""
    algorithm = config.get("quant_algo") or config.get("format")
    if method == "bitsandbytes":
        bits = "4-bit" if config.get("load_in_4bit") else "8-bit" if config.get("load_in_8bit") else ""
        return f"bitsandbytes {bits}".strip()
    if method in {"awq", "gptq", "hqq"} and config.get("bits"):
        return f"{method} ({config['bits']}-bit)"
    return f"{method} ({algorithm})" if algorithm and str(algorithm).lower() != method else method


ALLOWED: dict[str, Allowed] = {
    "": Allowed(
        title="unquantised",
        objection=_unquantized,
        parity="tests/integration/test_engine_transformers.py",
    ),
    BLOCK_FP8: Allowed(
        title="block-wise FP8",
        objection=_block_fp8,
        parity="tests/integration/test_engine_transformers.py",
    ),
}
"""The allowlist, by method name."""
