"""Fingerprints: canonical form, digest, explanation, and probes that fail."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fer import environment as env
from fer import fingerprint
from fer.engines.base import EngineIdentity, Ranks
from fer.errors import OptionError
from fer.fingerprint import ABSENT, Difference, Fingerprint, Unknown, explain

ROOT = Path(__file__).parents[2]
STAMPS = {"device": "cpu", "torch": "2.13.0", "arch": "x86_64"}


def identity(**changes: Any) -> EngineIdentity:
    fields: dict[str, Any] = {
        "engine": "module",
        "engine_version": "1",
        "model": "org/model",
        "revision": "main",
        "architecture": "LlamaForCausalLM",
        "quantization": "fp8",
        "quantization_config": {"weight_block_size": [128, 128]},
        "dtype": "bfloat16",
        "overrides": {"rope_scaling": {"factor": 2.0}},
        "settings": {"matmul": "torch"},
        "packages": ["pytest"],
        "ranks": Ranks(tp_size=2, tp_rank=1, local_size=2),
    }
    return EngineIdentity(**{**fields, **changes})


def of(**changes: Any) -> Fingerprint:
    return fingerprint.of(identity(**changes), STAMPS)


def in_child(expression: str) -> bytes:
    """The JSON of a fingerprint that another process makes."""
    code = f"import sys; from fer.fingerprint import *; sys.stdout.buffer.write(({expression}).to_json())"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, timeout=50, check=True, cwd=ROOT).stdout


def differing(left: Fingerprint, right: Fingerprint) -> list[str]:
    return [difference.field for difference in explain(left, right)]


def test_equal_engines_have_equal_fingerprints() -> None:
    left, right = of(), of()
    assert left == right
    assert left.to_json() == right.to_json()
    assert left.group_digest == right.group_digest
    assert explain(left, right) == []
    assert len({left, right}) == 1


def test_the_order_of_mappings_and_sets_does_not_matter() -> None:
    left = of(settings={"a": 1, "b": {"x", "y", "z"}})
    assert left == of(settings={"b": {"z", "y", "x"}, "a": 1})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine": "transformers"}, "engine.name"),
        ({"engine_version": "2"}, "engine.version"),
        ({"model": "org/other"}, "model"),
        ({"revision": "v2"}, "revision"),
        ({"architecture": "Qwen3ForCausalLM"}, "architecture"),
        ({"quantization": ""}, "quantization.method"),
        ({"quantization_config": {"weight_block_size": [64, 64]}}, "quantization.config_sha256"),
        ({"dtype": "float16"}, "dtype"),
        ({"overrides": {"rope_scaling": {"factor": 4.0}}}, "overrides.rope_scaling.factor"),
        ({"overrides": {"rope_scaling": {"factor": 2}}}, "overrides.rope_scaling.factor"),
        ({"settings": {"matmul": "kernels"}}, "settings.matmul"),
        ({"packages": ["pytest", "ruff"]}, "packages.ruff"),
        ({"sources": [Path(__file__)]}, "sources.test_fingerprint.py"),
        ({"ranks": Ranks(tp_size=4, tp_rank=1, local_size=2)}, "parallel.tp"),
        ({"ranks": Ranks(tp_size=2, tp_rank=1, local_size=1)}, "parallel.local_size"),
    ],
)
def test_every_field_is_told_apart_and_explained(changes: dict[str, Any], field: str) -> None:
    left, right = of(), of(**changes)
    assert left.group_digest != right.group_digest
    assert differing(left, right) == [field]


@pytest.mark.parametrize("name", ["device", "torch", "arch"])
def test_every_stamp_of_the_environment_counts(name: str) -> None:
    other = fingerprint.of(identity(), {**STAMPS, name: "other"})
    assert differing(of(), other) == [f"environment.{name}"]
    assert of().group_digest != other.group_digest


def test_ranks_of_one_launch_share_the_group_part() -> None:
    left, right = of(), of(ranks=Ranks(tp_size=2, tp_rank=0, local_size=2))
    assert left.group_digest == right.group_digest
    assert (left.rank_key, right.rank_key) == ("tp1/2,pp0/1,dp0/1,ep0/1", "tp0/2,pp0/1,dp0/1,ep0/1")
    assert left != right
    assert differing(left, right) == ["rank.tp"]


def test_neither_the_launch_nor_the_checkpoint_is_part_of_it() -> None:
    ranks = Ranks(tp_size=2, tp_rank=1, local_size=2, launch="another")
    assert of() == of(ranks=ranks, checkpoint=[Path("model.safetensors")])


def test_both_values_are_named() -> None:
    found = explain(of(dtype="float16"), of(settings={}))
    assert found == [
        Difference("dtype", "float16", "bfloat16"),
        Difference("settings.matmul", "torch", ABSENT),
    ]
    assert str(found[0]) == "dtype: 'float16' / 'bfloat16'"
    assert str(found[1]) == "settings.matmul: 'torch' / (absent)"


def test_true_one_and_one_point_zero_are_three_values() -> None:
    prints = [of(settings={"n": value}) for value in (True, 1, 1.0, "1", None)]
    assert len({found.group_digest for found in prints}) == 5
    assert differing(prints[0], prints[1]) == ["settings.n"]


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Shape:
    rows: int
    columns: int


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Path("/model"), "/model"),
        (b"\x00\xff", {"__bytes__": "00ff"}),
        (frozenset({2, 1}), {"__set__": [1, 2]}),
        ((1, "a"), [1, "a"]),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Shape(2, 3), {"rows": 2, "columns": 3}),
        ({0: "no", 1: "yes"}, {"0": "no", "1": "yes"}),
        ("\udc80 ü", "\udc80 ü"),
        (10**40, 10**40),
    ],
)
def test_values_get_one_canonical_form(value: object, plain: object) -> None:
    found = of(settings={"v": value})
    assert found.group["settings"]["v"] == plain
    assert Fingerprint.from_json(found.to_json()) == found


def test_types_of_torch_and_numpy_are_known_by_name() -> None:
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    values = {"dtype": torch.float8_e4m3fn, "device": torch.device("cpu"), "n": numpy.float32(0.5)}
    assert of(settings=values).group["settings"] == {"dtype": "float8_e4m3fn", "device": "cpu", "n": 0.5}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (float("nan"), "no finite number"),
        (float("inf"), "no finite number"),
        (1j, "complex"),
        (object(), "object"),
        (len, "builtin_function_or_method"),
        ({1.5: "x"}, "a key must be"),
        ({Colour.RED: "x"}, "a key must be"),
        ({1: "x", "1": "y"}, "stands for something else too"),
        ({"__unknown__": ["", ""]}, "stands for something else too"),
    ],
)
def test_values_without_a_canonical_form_are_refused_by_name(value: object, why: str) -> None:
    with pytest.raises(OptionError, match=why) as caught:
        of(settings={"list": [0, value]})
    assert caught.value.fields["name"].startswith("settings.list[1]")


def test_a_model_folder_is_one_model_from_every_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert of(model="model") == of(model=str(tmp_path / "model"))


def test_the_source_of_builders_and_remote_code_counts(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    module, builder = tmp_path / "code" / "modeling.py", tmp_path / "build.py"
    module.write_text("x = 1")
    builder.write_text("y = 1")
    before = of(sources=[builder, tmp_path / "code"])
    assert before == of(sources=[builder, tmp_path / "code"])
    module.write_text("x = 2")
    assert differing(before, of(sources=[builder, tmp_path / "code"])) == ["sources.code"]
    module.write_text("x = 1")
    module.rename(tmp_path / "code" / "other.py")
    assert differing(before, of(sources=[builder, tmp_path / "code"])) == ["sources.code"]


def test_sources_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").write_text(name)
    found = of(sources=[tmp_path / "a" / "m.py", tmp_path / "b" / "m.py"])
    assert set(found.group["sources"]) == {str(tmp_path / "a" / "m.py"), str(tmp_path / "b" / "m.py")}


# --- unknown ---


def test_a_failed_probe_never_equals_anything(tmp_path: Path) -> None:
    left, right = of(sources=[tmp_path / "gone.py"]), of(sources=[tmp_path / "gone.py"])
    assert left.group_digest != right.group_digest
    assert differing(left, right) == ["sources.gone.py"]
    assert "unknown (FileNotFoundError" in str(explain(left, right)[0])
    assert left.unknown == right.unknown
    assert left.unknown[0].startswith("sources.gone.py: FileNotFoundError")
    assert of().unknown == []


def test_a_failed_probe_never_equals_itself_in_another_process() -> None:
    left, right = (Fingerprint.from_json(in_child("Fingerprint({'a': Unknown('x')}, {})")) for _ in range(2))
    assert differing(left, right) == ["a"]
    assert differing(left, Fingerprint({"a": "x"}, {})) == ["a"]
    assert left.group_digest != right.group_digest


def test_a_probe_that_finds_nothing_has_failed() -> None:
    assert isinstance(env.probe(lambda: None), Unknown)
    assert isinstance(env.probe(lambda: ""), Unknown)
    assert env.probe(lambda: 0) == 0
    assert env.probe(lambda: {}[0]).reason.startswith("KeyError")


# --- the environment ---


def test_the_same_environment_is_the_same_in_another_process() -> None:
    runs = [in_child("Fingerprint(environment('cpu'), {})") for _ in range(2)]
    assert runs[0] == runs[1]
    found = Fingerprint.from_json(runs[0])
    assert found.unknown == []
    assert {"device", "torch", "arch", "cpu_capability"} <= set(found.group)
    assert "python" not in json.dumps(found.group)


def test_settings_that_select_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.KERNEL_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = Fingerprint(env.environment("cpu"), {})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert differing(before, Fingerprint(env.environment("cpu"), {})) == ["variables.NVIDIA_TF32_OVERRIDE"]


def test_a_machine_without_gpu_has_unknown_gpu_stamps() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    found = Fingerprint(env.environment("cuda:0"), {})
    assert {line.partition(":")[0] for line in found.unknown} >= {"gpu", "compute_capability"}


def test_packages_are_told_by_version_and_absence() -> None:
    assert env.package_version("pytest") == pytest.__version__
    assert env.package_version("no-such-package-of-anyone") is None
    assert isinstance(env.package_version("json"), Unknown)  # importable, yet without metadata


def test_an_editable_package_is_told_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ferthing").mkdir()
    (tmp_path / "ferthing" / "__init__.py").write_text("x = 1")
    metadata = tmp_path / "ferthing-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ferthing\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert env.package_version("ferthing") == "1.0"
    (metadata / "direct_url.json").write_text(json.dumps({"url": "file:///x", "dir_info": {"editable": True}}))
    before = env.package_version("ferthing")
    assert before["version"] == "1.0"
    (tmp_path / "ferthing" / "__init__.py").write_text("x = 2")
    assert env.package_version("ferthing") != before


# --- JSON ---


def test_another_schema_never_matches_and_is_explained() -> None:
    content = json.loads(of().to_json())
    content["schema"] += 1
    other = Fingerprint.from_json(json.dumps(content).encode())
    assert other.group_digest != of().group_digest
    assert differing(of(), other) == ["schema"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b'{"schema": "1", "group": {}, "rank": {}}',
        b'{"schema": 1, "group": [], "rank": {}}',
        b'{"schema": 1, "group": {"a": NaN}, "rank": {}}',
    ],
)
def test_other_data_is_no_fingerprint(data: bytes) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        Fingerprint.from_json(data)


_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_keys = st.text(max_size=4) | st.sampled_from(["a", "b", "a.b", "(absent)"])
_values = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3), max_leaves=12
)


@given(st.dictionaries(_keys, _values, max_size=4), st.dictionaries(_keys, _values, max_size=4))
def test_digests_agree_with_explanations(left: dict[str, Any], right: dict[str, Any]) -> None:
    a, b = Fingerprint(left, {}), Fingerprint(right, {})
    again = Fingerprint.from_json(a.to_json())
    assert again.group_digest == a.group_digest
    assert (a.group_digest == b.group_digest) == (explain(a, b) == [])


def test_a_dot_in_a_key_hides_no_difference() -> None:
    left, right = Fingerprint({"a.b": 1}, {}), Fingerprint({"a": {"b": 1}}, {})
    assert differing(left, right) == ["a.b", "a.b"]
    assert differing(Fingerprint({"a": ABSENT}, {}), Fingerprint({}, {})) == ["a"]
    assert differing(Fingerprint({"a": {}}, {}), Fingerprint({}, {})) == ["a"]
    assert differing(Fingerprint({"a": 5}, {}), Fingerprint({"a": {"b": 1}}, {})) == ["a", "a.b"]


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, fer.fingerprint; sys.exit(bool({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=ROOT, env={**os.environ}).returncode == 0
