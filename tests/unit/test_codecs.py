"""Tensor subclasses with a written codec come back bitwise; the others are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from fer.errors import IntegrityError, UnsupportedState
from fer.weights import codecs, manifest, module_state
from fer.weights.records import Wrapper
from tests.support.state_modules import Helper
from tests.support.state_roundtrip import copies_of, on_meta, roundtrip, write_down


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def sharded(mesh: Any, dim: int = 0) -> Any:
    """A builder of a linear layer whose weight is a DTensor."""
    from torch.distributed.tensor import DTensor, Shard

    def build() -> nn.Module:
        module = nn.Linear(4, 6, dtype=torch.bfloat16)
        local = torch.empty(6, 4, dtype=torch.bfloat16, device="cpu")  # a mesh of CPUs has no tensors on meta
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(dim)], run_check=False))
        module.alias = Helper(weight=module.weight)
        return module

    return build


class TestDTensor:
    def test_comes_back_over_the_skeleton_s_mesh(self, mesh: Any) -> None:
        def load(module: Any) -> None:
            module.weight.to_local().copy_(torch.arange(24.0).reshape(6, 4))
            module.weight.tag = [1]

        with torch.no_grad():
            done = roundtrip(sharded(mesh), load)
        weight = done.attached.weight
        assert weight.device_mesh == mesh  # not "is": torch may keep an equal one from an earlier test
        assert weight.placements == done.loaded.weight.placements
        assert torch.equal(weight.to_local(), done.loaded.weight.to_local())
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad and weight.tag == [1]
        assert done.attached.alias.weight is weight

    def test_the_local_tensor_can_be_moved_beneath_it(self, mesh: Any) -> None:
        loaded = sharded(mesh)()
        capture = module_state.capture(loaded, on_meta(sharded(mesh)))
        for tensor in capture.tensors:
            tensor.data = torch.full_like(tensor, 3.0)
        assert torch.equal(loaded.weight.to_local(), torch.full((6, 4), 3.0, dtype=torch.bfloat16))

    def test_other_placements_on_the_skeleton_are_named(self, mesh: Any) -> None:
        state = module_state.capture(sharded(mesh)(), on_meta(sharded(mesh))).state
        with pytest.raises(IntegrityError, match=r"placements is .*dim=1.*, published was .*dim=0"):
            module_state.rehearse(on_meta(sharded(mesh, dim=1)), state)

    def test_a_skeleton_without_mesh_is_named(self, mesh: Any) -> None:
        def build() -> nn.Module:
            module = nn.Linear(4, 6, dtype=torch.bfloat16)
            module.alias = Helper(weight=module.weight)
            return module

        state = module_state.capture(sharded(mesh)(), on_meta(sharded(mesh))).state
        with pytest.raises(IntegrityError, match="no DTensor there"):
            module_state.rehearse(on_meta(build), state)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 64, bias=False, dtype=torch.bfloat16), nn.Linear(64, 32, dtype=torch.bfloat16))


def _config(name: str, **arguments: Any) -> Any:
    import torchao.quantization

    return getattr(torchao.quantization, name)(**arguments)


class TestTorchao:
    @pytest.fixture(autouse=True)
    def _torchao(self) -> None:
        pytest.importorskip("torchao.quantization")

    @pytest.mark.parametrize(
        ("config", "cls"),
        [
            ("Float8WeightOnlyConfig", "Float8Tensor"),
            ("Int8WeightOnlyConfig", "Int8Tensor"),
            ("Int8DynamicActivationInt8WeightConfig", "Int8Tensor"),
            ("IntxWeightOnlyConfig", "IntxUnpackedToInt8Tensor"),
        ],
    )
    def test_comes_back_with_the_same_outputs(self, config: str, cls: str) -> None:
        from torchao.quantization import quantize_

        done = roundtrip(linear, lambda module: quantize_(module, _config(config)))
        x = torch.randn(3, 128, dtype=torch.bfloat16)
        assert type(done.attached[0].weight).__name__ == cls
        assert isinstance(done.attached[0].weight, nn.Parameter)
        assert torch.equal(done.attached(x), done.loaded(x))
        assert done.attached[0].weight.__tensor_flatten__()[1] == done.loaded[0].weight.__tensor_flatten__()[1]

    def test_packed_int4(self) -> None:
        """Its kernels need a GPU, its tensors do not."""
        from torchao.quantization import Int4Tensor

        def load(module: Any) -> None:
            qdata = torch.randint(-128, 127, (64, 64), dtype=torch.int8)
            scale, zero = torch.rand(4, 64), torch.rand(4, 64)
            weight = Int4Tensor(qdata, scale, zero, [1, 32], torch.Size([64, 128]))
            module[0].weight = nn.Parameter(weight, requires_grad=False)

        done = roundtrip(linear, load)
        mine, theirs = done.loaded[0].weight, done.attached[0].weight
        assert torch.equal(mine.qdata, theirs.qdata) and torch.equal(mine.scale, theirs.scale)
        assert (theirs.shape, theirs.block_size, theirs.act_pre_scale) == (mine.shape, [1, 32], None)

    def test_every_class_in_the_table_exists(self) -> None:
        for name in codecs._TORCHAO:
            cls, codec = codecs.find(f"torchao.quantization:{name}", "torchao/1")
            assert cls.__name__ == name and codecs.codec_for(cls) is codec

    def test_a_context_that_is_no_data_is_refused_by_name(self) -> None:
        from torchao.quantization import quantize_

        loaded = linear()
        quantize_(loaded, _config("Float8WeightOnlyConfig"))
        loaded[0].weight.mm_config = object()
        with pytest.raises(UnsupportedState, match=r"0\.weight\.mm_config"):
            module_state.capture(loaded, on_meta(linear))

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"codec": "torchao/9"}, "no codec torchao/9"),
            ({"cls": "os:system"}, "no codec"),
            ({"meta": {}}, "its attributes are"),
            ({"inner": {}}, "its tensors are"),
        ],
    )
    def test_records_that_do_not_fit_are_named(self, changes: dict[str, Any], why: str) -> None:
        from torchao.quantization import quantize_

        loaded = linear()
        quantize_(loaded, _config("Float8WeightOnlyConfig"))
        capture = module_state.capture(loaded, on_meta(linear))
        first: Wrapper
        first, *rest = capture.state.wrappers
        state = replace(capture.state, wrappers=[replace(first, **changes), *rest])
        record = manifest.decode(manifest.encode(replace(write_down(capture), state=state)))
        with pytest.raises(IntegrityError, match=why):
            module_state.restore(on_meta(linear), record.state, copies_of(capture, record))


def test_a_subclass_without_codec_is_refused_by_name() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    loaded = nn.Module()
    loaded.two = TwoTensor(torch.ones(2), torch.ones(2))
    with pytest.raises(UnsupportedState, match=r"no codec for the tensor subclass .*TwoTensor") as error:
        module_state.capture(loaded, nn.Module())
    assert error.value.fields["path"] == "two"
