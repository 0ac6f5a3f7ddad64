"""TransformersEngine: skeleton and loaded model are alike, answers are right, bad folders are refused by name."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fer
from fer.engines import estimate, fp8
from fer.engines.base import Ranks
from fer.engines.conformance_snapshot import Snapshot
from fer.engines.demo_model import smollm2
from fer.engines.transformers import TransformersEngine
from fer.errors import CheckpointError, OptionError, UnsupportedQuantization, UsageError
from tests.support import engine_models as models

pytestmark = pytest.mark.timeout(180)

PROMPT = [1, 5, 9, 200]
MARKS = ("_is_hf_initialized", "_use_kernels")
"""Plain flags that loading sets: FER records them, no skeleton has them."""


def started(engine: TransformersEngine) -> TransformersEngine:
    engine.adopt(engine.load())
    engine.allocate_kv()
    return engine


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def qwen3_fp8(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.to_fp8(qwen3, tmp_path_factory.mktemp("models") / "fp8")


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_fp8"])
def test_skeleton_and_loaded_model_differ_in_values_only(name: str, request: pytest.FixtureRequest) -> None:
    engine = TransformersEngine(request.getfixturevalue(name))
    with torch.device("meta"):
        skeleton = Snapshot(engine.build())
    loaded = Snapshot(engine.load())
    assert set(skeleton.on_meta()) == set(skeleton.tensors) == set(loaded.tensors)
    assert loaded.on_meta() == []
    for path in loaded.places.keys() | skeleton.places.keys():
        if path.endswith(MARKS):
            continue
        left, right = loaded.places.get(path, "absent"), skeleton.places.get(path, "absent")
        if path in loaded.tensors:
            left, right = (text.split(" storage=")[0].replace("=meta", "=cpu") for text in (left, right))
        assert left == right, path


def test_generate_agrees_with_transformers_own(llama: Path) -> None:
    engine = started(TransformersEngine(llama, max_length=64))
    expected = engine.module.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    assert list(engine.stream(PROMPT, max_new_tokens=12, stop=False)) == expected
    assert list(engine.stream(PROMPT, max_new_tokens=12, stop=False)) == expected, "the cache starts afresh"
    assert engine.logits(PROMPT)[-1].argmax() == expected[0]


def test_generation_stops_at_the_end_and_at_the_cache(llama: Path) -> None:
    engine = started(TransformersEngine(llama, max_length=16))
    tokens = list(engine.stream(PROMPT, max_new_tokens=10, stop=False))
    for end in set(tokens):
        engine.module.generation_config.eos_token_id = [end]
        assert engine.generate(PROMPT, 10) == tokens[: tokens.index(end)]
    for ids, new in (([], 1), (PROMPT, 13), (list(range(16)), 1)):
        with pytest.raises(OptionError, match="do not fit"):
            engine.generate(ids, new)


def test_a_folder_without_tokenizer_takes_token_ids(llama: Path) -> None:
    engine = TransformersEngine(llama)
    engine.load_tokenizer()
    with pytest.raises(UsageError, match="no tokenizer"):
        engine.ask("Who?")


def test_overrides_reach_model_and_identity(llama: Path) -> None:
    plain = TransformersEngine(llama)
    changed = TransformersEngine(llama, overrides={"rms_norm_eps": 0.5}, dtype="bfloat16", attention="eager")
    assert changed.identity().overrides == {"rms_norm_eps": 0.5}
    assert (plain.identity().dtype, changed.identity().dtype) == ("float32", "bfloat16")
    assert plain.identity().settings != changed.identity().settings
    for model in (changed.load(), changed.build()):
        assert model.config.rms_norm_eps == 0.5  # type: ignore[union-attr]
        assert model.config._attn_implementation == "eager"  # type: ignore[union-attr]
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_identity_reads_no_weights_and_names_the_shards(llama: Path) -> None:
    identity = TransformersEngine(llama, revision="r1").identity()
    assert (identity.engine, identity.architecture, identity.revision) == ("transformers", "LlamaForCausalLM", "r1")
    assert [path.name for path in identity.checkpoint] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("file", "change", "field"),
    [
        ("config.json", {"rms_norm_eps": 0.5}, "config.rms_norm_eps"),
        ("config.json", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "config.rope_parameters"),
        ("generation_config.json", {"eos_token_id": [7, 8]}, "generation_config.eos_token_id"),
        ("generation_config.json", {"transformers_version": "9.9"}, "generation_config.transformers_version"),
    ],
)
def test_an_edited_configuration_is_a_named_miss(
    llama: Path, tmp_path: Path, file: str, change: dict[str, object], field: str
) -> None:
    folder = models.with_config(llama, tmp_path / "model")
    assert fer.recover(TransformersEngine(folder, dtype="float32")).stages["weights"].path == "loaded"
    content = json.loads((folder / file).read_text())
    config = json.loads((folder / "config.json").read_text())
    without_effect = {"_name_or_path": "elsewhere", "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps({**config, **without_effect}))
    assert fer.recover(TransformersEngine(folder, dtype="float32")).stages["weights"].path == "attached"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps({**content, **change}))
    engine = TransformersEngine(folder)
    told = fer.recover(engine).stages["weights"]
    assert told.path == "loaded"
    assert field in told.why
    right = started(TransformersEngine(folder))
    assert torch.equal(engine.logits(PROMPT), right.logits(PROMPT))
    assert engine.module.generation_config.eos_token_id == right.module.generation_config.eos_token_id


def test_every_spelling_of_a_folder_is_one_model(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(llama)
    monkeypatch.chdir(llama.parent)
    spellings: list[str | Path] = [
        llama,
        str(llama),
        tmp_path / "link",
        llama.name,
        f"./{llama.name}/",
        llama / ".." / "llama",
    ]
    told = [fer.recover(TransformersEngine(spelling)).stages["weights"] for spelling in spellings]
    assert [stage.path for stage in told] == ["loaded"] + ["attached"] * 5, [stage.why for stage in told]


def test_a_configuration_that_changes_during_the_start_is_refused(llama: Path, tmp_path: Path) -> None:
    engine = TransformersEngine(models.with_config(llama, tmp_path / "model"))
    engine.identity()
    models.with_config(llama, tmp_path / "other", rms_norm_eps=0.5)
    (tmp_path / "other" / "config.json").replace(engine.folder / "config.json")
    for call in (engine.load, engine.build):
        with pytest.raises(CheckpointError, match=r"config\.json .* changed"):
            call()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("make", [models.llama, models.qwen3_moe])
def test_the_estimate_is_what_loading_takes(make: Any, dtype: str, tmp_path: Path) -> None:
    engine = TransformersEngine(make(tmp_path / "model", dtype="float32"), dtype=dtype)
    taken = sum(p.numel() * p.element_size() for p in engine.load().parameters())
    assert engine.estimated_bytes() == taken


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_fp8"])
def test_the_estimate_of_a_rank_is_its_share(name: str, request: pytest.FixtureRequest) -> None:
    engine = TransformersEngine(request.getfixturevalue(name))
    whole = engine.estimated_bytes()
    engine._identity = replace(engine.identity(), ranks=Ranks(tp_size=2))
    assert engine.estimated_bytes() == pytest.approx(whole / 2, rel=0.02)
    assert engine.estimated_bytes() > whole / 2, "norms are whole on every rank"


def test_the_estimate_follows_the_plan(qwen3_fp8: Path) -> None:
    shards = TransformersEngine(qwen3_fp8).identity().checkpoint
    whole = estimate.loaded_bytes(shards, itemsize=2)
    assert estimate.loaded_bytes(shards, itemsize=4) < 2 * whole, "FP8 weights are not cast"
    assert estimate.loaded_bytes(shards, itemsize=2, world=2, plan={"layers.*": "replicated"}) == whole
    half = estimate.loaded_bytes(shards, itemsize=2, world=2, plan={"lm_head": "colwise"})
    assert half == whole - 512 * 256 * 2 // 2


def test_code_in_the_folder_counts_where_it_is_trusted(llama: Path, tmp_path: Path) -> None:
    folder = models.with_config(llama, tmp_path / "remote")
    (folder / "modeling_own.py").write_text("SCALE = 2\n")
    assert TransformersEngine(folder).identity().sources == ()
    assert [p.name for p in TransformersEngine(folder, trust_remote_code=True).identity().sources] == [
        "modeling_own.py"
    ]


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "per-tensor"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "brand-new"}, "brand-new"),
    ],
)
def test_unsupported_quantisation_is_refused_before_any_load(
    llama: Path, tmp_path: Path, quantization: dict[str, object], named: str
) -> None:
    engine = TransformersEngine(models.with_config(llama, tmp_path / "q", quantization_config=quantization))
    for call in (engine.identity, engine.load, engine.build):
        with pytest.raises(UnsupportedQuantization, match=named):
            call()


def test_bad_folders_and_arguments_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        TransformersEngine(tmp_path)
    with pytest.raises(OptionError, match="matmul"):
        TransformersEngine(llama, matmul="magic")
    with pytest.raises(OptionError, match="dtype"):
        TransformersEngine(llama, dtype="float12")
    strange = models.with_config(llama, tmp_path / "strange", model_type="never-heard-of", architectures=None)
    with pytest.raises(CheckpointError, match="does not understand"):
        TransformersEngine(strange).identity()
    truncated = models.with_config(llama, tmp_path / "truncated")
    os.truncate(truncated / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="truncated"):
        TransformersEngine(truncated).identity()
    (truncated / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TransformersEngine(truncated).identity()


@pytest.mark.parametrize(
    "text", ["{", "[]", "", '{"architectures": 3}', '{"architectures": [3]}', "\xff", "[" * 100_000]
)
def test_a_damaged_configuration_is_refused_by_name_at_each_step(llama: Path, tmp_path: Path, text: str) -> None:
    folder = models.with_config(llama, tmp_path / "model")
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    engine = TransformersEngine(folder)
    for call in (engine.import_code, engine.identity, lambda: fer.recover(engine)):
        with pytest.raises(CheckpointError, match=r"model/config\.json"):
            call()


@pytest.mark.parametrize("fields", [{"hidden_size": "wide"}, {"num_hidden_layers": []}, {"rope_parameters": 3}])
def test_a_configuration_with_impossible_fields_is_refused_by_name(
    llama: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    engine = TransformersEngine(models.with_config(llama, tmp_path / "model", **fields))
    with pytest.raises(CheckpointError, match=r"model/config\.json"):
        engine.identity()


@pytest.mark.parametrize("file", ["tokenizer_config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_tokenizer_is_refused_by_name(llama: Path, tmp_path: Path, file: str, text: str) -> None:
    folder = models.with_config(llama, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=file):
        TransformersEngine(folder).load_tokenizer()


# -- block-wise FP8 ------------------------------------------------------------------------------------------------


def test_fp8_blocks_round_trip() -> None:
    torch.manual_seed(0)
    weight = torch.randn(200, 300) * torch.logspace(-3, 3, 300)
    quantized, scale = fp8.quantize_blocks(weight, (128, 128))
    assert (quantized.dtype, quantized.shape, scale.shape) == (fp8.FP8, weight.shape, (2, 3))
    back = fp8.dequantize(quantized, scale, (128, 128))
    step = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    # e4m3 has three bits of mantissa, and below its normal range steps of 2**-9.
    assert ((back - weight).abs() <= weight.abs() / 16 + step * 2**-9).all()
    rows, factors = fp8.quantize_rows(weight[:, :256], 128)
    assert factors.shape == (200, 2)
    spread = factors.repeat_interleave(128, 1)
    assert ((rows.float() * spread - weight[:, :256]).abs() <= weight[:, :256].abs() / 16 + spread * 2**-9).all()


def test_fp8_answers_like_its_dequantised_weights(qwen3: Path, qwen3_fp8: Path, tmp_path: Path) -> None:
    engine = started(TransformersEngine(qwen3_fp8, max_length=32))
    assert engine.identity().settings["matmul"] == "dequantize"
    projection = engine.module.model.layers[0].mlp.down_proj
    assert projection.weight.dtype == fp8.FP8
    reference = started(TransformersEngine(qwen3, max_length=32))
    for name, module in engine.module.named_modules():
        if hasattr(module, "weight_scale_inv"):
            weight = fp8.dequantize(module.weight, module.weight_scale_inv, (128, 128))
            reference.module.get_submodule(name).weight.data.copy_(weight)
    assert torch.equal(engine.logits(PROMPT), reference.logits(PROMPT))
    assert engine.generate(PROMPT, 8) == reference.generate(PROMPT, 8)


def test_scales_reach_the_product(qwen3_fp8: Path) -> None:
    engine = started(TransformersEngine(qwen3_fp8))
    before = engine.logits(PROMPT)
    with torch.no_grad():
        engine.module.model.layers[0].mlp.down_proj.weight_scale_inv[1, 1] *= 2
    assert not torch.equal(before, engine.logits(PROMPT))


def test_a_matmul_that_does_not_work_here_is_refused(qwen3_fp8: Path) -> None:
    for matmul in ("scaled_mm", "kernels"):
        with pytest.raises(OptionError, match=f"matmul={matmul}"):
            TransformersEngine(qwen3_fp8, matmul=matmul).identity()


# -- the demo's model ----------------------------------------------------------------------------------------------


def test_smollm2_answers_a_question(smollm2_folder: Path) -> None:
    engine = TransformersEngine(smollm2_folder)
    engine.load_tokenizer()
    engine = started(engine)
    assert "Paris" in engine.ask("What is the capital of France?")
    assert engine.generate("Once upon a time", 6) == engine.generate("Once upon a time", 6)


def test_smollm2_is_an_ordinary_sharded_folder(smollm2_folder: Path) -> None:
    shards = TransformersEngine(smollm2_folder).identity().checkpoint
    assert len(shards) > 1
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    assert smollm2(smollm2_folder.parents[1]) == smollm2_folder, "made once"
    assert not list(smollm2_folder.parent.glob("*.new-*"))
