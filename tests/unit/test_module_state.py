"""Capture and restore: what a loaded module holds beyond state_dict() comes back, or is refused by its path."""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fer.errors import UnsupportedState
from fer.weights import module_state, values
from tests.support.state_compare import assert_same
from tests.support.state_modules import (
    Frozen,
    Grouped,
    Helper,
    Kind,
    Layer,
    LoadedParameter,
    Pair,
    Slotted,
    build_nothing,
)
from tests.support.state_roundtrip import on_meta, roundtrip


class TestWhatPeersForget:
    """One test for each thing that engines make while loading and that caches of weights have lost."""

    def test_tensors_in_plain_attributes(self) -> None:
        def load(module: Layer) -> None:
            module.load()
            kv = module.weight.detach().t().contiguous()
            module.w_kc, module.w_vc = kv[:3].transpose(0, 1), kv[3:]
            module.w_scale, module.use_deep_gemm_bmm = 0.5, True

        done = roundtrip(Layer, load)
        assert_same(done.loaded, done.attached)
        assert done.attached.w_kc.untyped_storage()._cdata == done.attached.w_vc.untyped_storage()._cdata

    def test_a_helper_that_refers_to_a_parameter_gets_the_new_one(self) -> None:
        done = roundtrip(Grouped, lambda module: module.gate.load())
        assert_same(done.loaded, done.attached)
        assert done.attached.topk.correction_bias is done.attached.gate.bias

    def test_scalars_computed_while_loading(self) -> None:
        def load(module: Layer) -> None:
            module.load()
            module.scale = 0.0625
            module.weight_scale_float = float("inf")
            module.odd = float("nan")

        done = roundtrip(Layer, load)
        assert_same(done.loaded, done.attached)
        assert done.attached.scale == 0.0625

    def test_attributes_of_tensors(self) -> None:
        def load(module: Layer) -> None:
            module.load()
            module.weight.format_ue8m0 = True
            module.weight.scales = [torch.ones(2)]

        done = roundtrip(Layer, load)
        assert_same(done.loaded, done.attached)
        assert done.attached.weight.format_ue8m0 is True

    def test_persistence_of_buffers(self) -> None:
        done = roundtrip(Layer, Layer.load)
        assert "table" not in done.attached.state_dict()
        assert torch.equal(done.attached.table.nan_to_num(), done.loaded.table.nan_to_num())

    def test_persistence_that_loading_changed(self) -> None:
        done = roundtrip(Layer, lambda module: module.register_buffer("table", torch.ones(3)))
        assert "table" in done.attached.state_dict()

    def test_loaders_on_parameters_come_from_the_skeleton(self) -> None:
        def build() -> nn.Module:
            module = Layer()
            module.weight = LoadedParameter(torch.empty(4, 6))
            module.weight.weight_loader = print
            module.weight.shard = None
            return module

        def load(module: Any) -> None:
            module.load()
            module.weight.shard = 3

        done = roundtrip(build, load)
        assert_same(done.loaded, done.attached)
        assert type(done.attached.weight) is LoadedParameter
        assert done.attached.weight.weight_loader is print

    def test_parameters_that_loading_replaced_removed_and_moved(self) -> None:
        def load(module: Layer) -> None:
            module.load()
            old = module.weight
            del module.weight
            module.register_buffer("packed", old.detach().to(torch.float8_e4m3fn))
            module.weight = nn.Parameter(old.detach().t(), requires_grad=False)
            module.bias = None
            del module.scale

        done = roundtrip(Layer, load)
        assert_same(done.loaded, done.attached)
        assert list(done.attached._parameters) == ["bias", "weight"]
        assert not hasattr(done.attached, "scale")


class TestWhereTensorsHide:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda t: [t, [t]],
            lambda t: (t, 1),
            lambda t: {"a": {"b": t}},
            lambda t: {t},
            lambda t: frozenset({t}),
            lambda t: collections.deque([t], maxlen=3),
            lambda t: collections.OrderedDict(x=t),
            lambda t: Pair(t, None),
            lambda t: SimpleNamespace(t=t),
            lambda t: Frozen(scale=t),
            lambda t: {1: t, (2, "b"): [t], None: 3},
        ],
    )
    def test_in_something_made_while_loading(self, wrap: Any) -> None:
        done = roundtrip(Layer, lambda module: setattr(module, "made", wrap(torch.arange(5.0))))
        assert_same(done.loaded, done.attached)

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda t: [t, len],
            lambda t: (t, len),
            lambda t: {"f": len, "t": t},
            lambda t: {t},
            lambda t: frozenset({t}),
            lambda t: collections.deque([len, t]),
            lambda t: collections.defaultdict(list, t=t),
            lambda t: Pair(len, t),
            lambda t: Helper(inner=Helper(t=t), lock=threading.Lock()),
            lambda t: Frozen(scale=t),
            lambda t: functools.partial(len, t, key=[t]),
            lambda t: Helper(ref=weakref.ref(t)),
        ],
    )
    def test_in_something_the_skeleton_has_too(self, wrap: Any) -> None:
        def build() -> nn.Module:
            module = Layer()
            module.made = wrap(module.bias)
            return module

        done = roundtrip(build, lambda module: module.load())
        assert_same(done.loaded, done.attached)

    def test_in_slots_and_frozen_dataclasses(self) -> None:
        def build() -> nn.Module:
            module = Layer()
            module.slotted, module.frozen = Slotted(module.bias), Frozen(scale=module.bias)
            return module

        def load(module: Any) -> None:
            module.load()
            module.slotted.hide(torch.ones(2))
            object.__setattr__(module.frozen, "factor", 2.5)

        attached = roundtrip(build, load).attached
        assert attached.slotted.tensor is attached.bias is attached.frozen.scale
        assert torch.equal(attached.slotted.hidden(), torch.ones(2))
        assert attached.frozen.factor == 2.5

    def test_in_slots_of_a_module(self) -> None:
        class Tight(nn.Module):
            __slots__ = ("fused",)

        done = roundtrip(Tight, lambda module: setattr(module, "fused", torch.ones(2)))
        assert torch.equal(done.attached.fused, torch.ones(2))

    def test_weak_references_follow(self) -> None:
        done = roundtrip(lambda: nn.LSTM(3, 4, num_layers=2))
        attached = done.attached
        assert [ref() is w for ref, w in zip(attached._flat_weight_refs, attached._flat_weights, strict=True)] == [
            True
        ] * 8
        assert attached._flat_weights[0] is attached.weight_ih_l0
        x = torch.ones(2, 1, 3)
        assert torch.equal(attached(x)[0], done.loaded(x)[0])

    def test_in_a_module_that_is_not_registered(self) -> None:
        def build() -> nn.Module:
            module = nn.Module()
            module.hidden = [Layer(), Layer()]
            module.shared = module.hidden[0].weight
            return module

        done = roundtrip(build, lambda module: [layer.load() for layer in module.hidden])
        assert_same(done.loaded, done.attached)
        assert done.attached.shared is done.attached.hidden[0].weight

    def test_in_hooks(self) -> None:
        def build() -> nn.Module:
            module = nn.Linear(3, 2)
            module.register_forward_pre_hook(functools.partial(print, module.bias))
            return module

        # A hook is code: the one the skeleton has cannot be exchanged for another partial.
        with pytest.raises(UnsupportedState, match="_forward_pre_hooks"):
            roundtrip(build)

    def test_in_cycles(self) -> None:
        def build() -> nn.Module:
            module = Layer()
            module.helper = Helper(owner=module, items=[])
            module.helper.items.append(module.helper.items)
            return module

        def load(module: Any) -> None:
            module.load()
            module.helper.items.append(module.bias)

        attached = roundtrip(build, load).attached
        assert attached.helper.owner is attached
        assert attached.helper.items[0] is attached.helper.items
        assert attached.helper.items[1] is attached.bias

    def test_one_list_in_two_places_stays_one(self) -> None:
        def load(module: Any) -> None:
            module.first = module.second = [torch.ones(1)]

        attached = roundtrip(Layer, load).attached
        assert attached.first is attached.second


class TestPlainValues:
    @pytest.mark.parametrize(
        "value",
        [
            None, True, -3, 1 << 80, 0.1, float("-inf"), -0.0, 2 - 3j, "text", b"bytes", torch.bfloat16,
            torch.Size([2, 3]),
            torch.device("cpu"), torch.device("cuda", 0), torch.strided, torch.channels_last, Kind.ABSORBED, ...,
            range(1, 9, 2), slice(None, 3), np.float32(0.5), np.arange(6).reshape(2, 3), (), [], {}, {1, "a"},
            frozenset({2}), {"a": [1, (2, None)]}, collections.Counter(a=2),
        ],
        ids=lambda value: "set" if isinstance(value, set) else repr(value),  # whose order differs between workers
    )  # fmt: skip
    def test_come_back(self, value: Any) -> None:
        for before in ("absent", None, 0):

            def build(before: Any = before) -> nn.Module:
                module = nn.Module()
                if before != "absent":
                    module.value = before
                return module

            attached = roundtrip(build, lambda module: setattr(module, "value", value)).attached
            assert type(attached.value) is type(value)
            assert repr(attached.value) == repr(value)

    def test_of_helpers_that_the_skeleton_has(self) -> None:
        def build() -> nn.Module:
            module = nn.Module()
            module.config = Helper(rope=Helper(theta=1.0), names=["a"], gone=1)
            return module

        def load(module: Any) -> None:
            module.config.rope.theta = 5e5
            module.config.names.insert(0, "b")
            del module.config.gone

        config = roundtrip(build, load).attached.config
        assert (config.rope.theta, config.names, hasattr(config, "gone")) == (5e5, ["b", "a"], False)

    def test_only_differences_are_written_down(self) -> None:
        def build() -> nn.Module:
            module = Layer()
            module.config = Helper(port=1234, path="/here")
            return module

        state = roundtrip(build, lambda module: module.load()).record.state
        assert [node.path for node in state.nodes] == [""]
        assert state.nodes[0].attrs == {}

    def test_devices_of_the_engine_have_no_number(self) -> None:
        record = values.encode(torch.device("cuda", 3), 3)
        assert values.decode(record, 1) == torch.device("cuda", 1)
        other = values.encode(torch.device("cuda", 2), 3)
        assert values.decode(other, 1) == torch.device("cuda", 2)

    def test_without_a_skeleton_the_module_s_own_are_recorded(self) -> None:
        def load(module: Layer) -> None:
            module.load()
            module.scale, module.names, module.kept = 0.5, ["a"], print

        def build() -> nn.Module:
            module = Layer()
            module.kept = print
            module.helper = Helper(bias=module.bias, f=print)
            return module

        done = roundtrip(build, load, blind=True)
        assert_same(done.loaded, done.attached)


class TestTorchModules:
    @pytest.mark.parametrize(
        "build",
        [
            build_nothing,
            lambda: nn.BatchNorm1d(3),
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Sequential(), nn.BatchNorm2d(2).eval()),
            lambda: nn.ParameterList([nn.Parameter(torch.ones(2)), torch.zeros(1)]),
            lambda: nn.ParameterDict({"a": torch.ones(2), "b": torch.zeros(())}),
            lambda: nn.ModuleDict({"x": nn.Embedding(3, 2)}),
            lambda: nn.MultiheadAttention(4, 2),
            lambda: nn.TransformerEncoderLayer(4, 2, 8),
            lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
            lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
            lambda: torch.nn.utils.spectral_norm(nn.Linear(3, 2)),
        ],
    )  # fmt: skip
    def test_come_back(self, build: Any) -> None:
        done = roundtrip(build)
        mine, theirs = done.loaded.state_dict(), done.attached.state_dict()
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert parametrize.is_parametrized(done.loaded) == parametrize.is_parametrized(done.attached)

    def test_tied_weights_are_one_parameter(self) -> None:
        def build() -> nn.Module:
            module = nn.ModuleDict({"emb": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
            module["head"].weight = module["emb"].weight
            return module

        done = roundtrip(build)
        assert done.attached["head"].weight is done.attached["emb"].weight
        assert [leaf.names for leaf in done.record.state.tensors] == [["emb.weight", "head.weight"]]

    def test_weights_tied_by_loading_alone(self) -> None:
        def build() -> nn.Module:
            return nn.ModuleDict({"emb": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})

        done = roundtrip(build, lambda module: setattr(module["head"], "weight", module["emb"].weight))
        assert done.attached["head"].weight is done.attached["emb"].weight

    def test_one_module_under_two_names(self) -> None:
        def build() -> nn.Module:
            layer = nn.Linear(2, 2)
            return nn.Sequential(layer, nn.Sequential(layer))

        attached = roundtrip(build).attached
        assert attached[0] is attached[1][0]

    def test_a_child_that_loading_removed(self) -> None:
        def load(module: Any) -> None:
            del module[1]

        assert len(roundtrip(lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), load).attached) == 1

    def test_gradients_wanted_or_not(self) -> None:
        attached = roundtrip(lambda: nn.Linear(2, 2), lambda m: m.weight.requires_grad_(False)).attached
        assert (attached.weight.requires_grad, attached.bias.requires_grad) == (False, True)

    def test_modules_loaded_in_inference_mode(self) -> None:
        def build() -> nn.Module:
            with torch.inference_mode():
                return nn.Linear(2, 2).requires_grad_(False)

        roundtrip(build)


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e8m0fnu,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> list[torch.Tensor]:
    """Some tensors, among them views of one storage: sliced, transposed, expanded, empty, without dimensions."""
    found: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        count = draw(st.integers(0, 40))
        raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
        if dtype is torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        base = torch.frombuffer(bytearray(raw), dtype=dtype).clone() if count else torch.empty(0, dtype=dtype)
        found.append(base)
        for _ in range(draw(st.integers(0, 3))):
            shape = draw(st.lists(st.integers(0, 4), max_size=3))
            stride = draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
            reach = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
            offset = draw(st.integers(0, 5))
            if reach + offset <= count:
                found.append(base.as_strided(shape, stride, offset))
    return draw(st.permutations(found))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tensors(), st.data())
def test_any_tensors_in_any_slots_come_back(found: list[torch.Tensor], data: st.DataObject) -> None:
    # Slots may repeat a tensor: then one object stands in several places.
    slots = data.draw(st.lists(st.tuples(st.integers(0, len(found) - 1), st.integers(0, 4)), min_size=1, max_size=6))

    def load(module: Any) -> None:
        module.many, module.kept = [], {}
        for number, (index, kind) in enumerate(slots):
            tensor = found[index]
            match kind:
                case 0:
                    module.register_buffer(f"b{number}", tensor, persistent=False)
                case 1:
                    module.register_buffer(f"b{number}", tensor)
                case 2:
                    module.register_parameter(f"p{number}", nn.Parameter(tensor, requires_grad=False))
                case 3:
                    module.many.append((tensor, number))
                case _:
                    module.kept[number] = tensor

    done = roundtrip(build_nothing, load)
    assert_same(done.loaded, done.attached)


def test_capture_holds_storages_only_until_they_are_taken() -> None:
    loaded = Layer()
    capture = module_state.capture(loaded, on_meta(Layer))
    gone = [weakref.ref(live.take()) for live in capture.storages]
    for tensor in capture.tensors:
        tensor.data = tensor.detach().clone()
    assert [ref() for ref in gone] == [None] * len(gone)
    assert capture.storages[0].names == ["weight"]


def test_patterns_match_any_of_a_tensor_s_names() -> None:
    assert module_state.matches(["layers.0.running_mean", "alias"], ["layers.*.running_mean"])
    assert not module_state.matches(["layers.0.weight"], ["*.bias"])
