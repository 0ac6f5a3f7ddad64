"""What cannot be kept is refused by its path, before anything has been moved."""

from __future__ import annotations

import collections
import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fer.errors import IntegrityError, UnsupportedState
from fer.weights import module_state
from tests.support.state_modules import Helper, Layer
from tests.support.state_roundtrip import on_meta, roundtrip


class TestRefusals:
    """Each names the path, before anything has been moved."""

    @pytest.mark.parametrize(
        ("value", "why"),
        [
            (torch.eye(2).to_sparse(), "layout"),
            (torch.ones(2, dtype=torch.complex64).conj(), "conjugate"),
            (torch.ones(2, dtype=torch.complex64).conj().imag, "negation"),
            (torch.empty(2, device="meta"), "meta"),
            (nn.parameter.UninitializedParameter(), "initialised"),
            (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "NestedTensor"),
            (print, "loading put"),
            (threading.Lock(), "loading put"),
            (Helper(a=1), "cannot be rebuilt"),
            (Layer(), "lacks it"),
            (functools.partial(print), "code"),
            (collections.defaultdict(list), "cannot be rebuilt"),
            (np.zeros(1 << 18), "loading put"),
            ({torch.ones(1): 1}, "key of this dict"),
            ({Helper(): 1}, "key of this dict"),
        ],
        ids=lambda v: type(v).__name__,
    )  # fmt: skip
    def test_what_cannot_be_kept(self, value: Any, why: str) -> None:
        loaded = nn.Sequential(Layer())
        loaded[0].load()
        vars(loaded[0])["extra"] = [value]
        with pytest.raises(UnsupportedState, match=why) as error:
            module_state.capture(loaded, on_meta(lambda: nn.Sequential(Layer())))
        assert error.value.fields["path"].startswith("0.extra[")

    @pytest.mark.filterwarnings("ignore")
    def test_a_legacy_quantised_tensor(self) -> None:
        if not hasattr(torch, "quantize_per_tensor"):
            pytest.skip("this torch has no legacy quantised tensors any more")
        loaded = nn.Module()
        loaded.q = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
        with pytest.raises(UnsupportedState, match="legacy quantised"):
            module_state.capture(loaded, nn.Module())

    def test_a_parameter_with_a_gradient(self) -> None:
        loaded = nn.Linear(2, 2)
        loaded(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UnsupportedState, match="gradient"):
            module_state.capture(loaded, on_meta(lambda: nn.Linear(2, 2)))

    def test_a_tensor_subclass_without_codec(self) -> None:
        class Odd(torch.Tensor):
            pass

        loaded = nn.Module()
        loaded.odd = torch.ones(2).as_subclass(Odd)
        with pytest.raises(UnsupportedState, match=r"no codec for the tensor subclass .*Odd"):
            module_state.capture(loaded, nn.Module())

    def test_a_module_of_another_class(self) -> None:
        with pytest.raises(UnsupportedState, match=r"loading made it a .*ReLU"):
            module_state.capture(nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh()))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_a_scripted_module(self) -> None:
        with pytest.raises(UnsupportedState, match="scripted"):
            module_state.capture(nn.Sequential(torch.jit.script(nn.ReLU())), nn.Sequential(nn.ReLU()))

    def test_hooks_that_loading_added(self) -> None:
        loaded = nn.Linear(2, 2)
        loaded.register_forward_hook(lambda *_: None)
        with pytest.raises(UnsupportedState, match="_forward_hooks"):
            module_state.capture(loaded, on_meta(lambda: nn.Linear(2, 2)))

    def test_an_object_shared_with_the_skeleton(self) -> None:
        shared = Helper(tensor=torch.ones(2))

        def build() -> nn.Module:
            module = nn.Module()
            module.helper = shared
            return module

        with pytest.raises(UnsupportedState, match="share this object"):
            module_state.capture(build(), build())
        with pytest.raises(UnsupportedState, match="share this object"):
            module = nn.Linear(2, 2)
            module_state.capture(module, module)

    def test_nesting_without_end(self) -> None:
        loaded = nn.Module()
        loaded.deep = deep = []
        for _ in range(400):
            deep.append([])
            deep = deep[0]
        with pytest.raises(UnsupportedState, match="deeper"):
            module_state.capture(loaded, nn.Module())

    def test_a_large_array_unless_the_skeleton_has_the_same(self) -> None:
        def build(fill: float = 0.0) -> nn.Module:
            module = nn.Module()
            module.array = np.full(1 << 18, fill)
            return module

        roundtrip(build)
        with pytest.raises(UnsupportedState, match="numpy array"):
            module_state.capture(build(1.0), build())


class TestSkeletonsThatDoNotFit:
    def state_of(self, module: nn.Module, build: Any) -> Any:
        return module_state.capture(module, on_meta(build)).state

    def test_another_class(self) -> None:
        state = self.state_of(nn.Linear(2, 2), lambda: nn.Linear(2, 2))
        with pytest.raises(IntegrityError, match=r"published was a .*Linear"):
            module_state.rehearse(on_meta(lambda: nn.Bilinear(2, 2, 2)), state)

    def test_a_child_less(self) -> None:
        state = self.state_of(nn.Sequential(nn.ReLU(), nn.ReLU()), lambda: nn.Sequential(nn.ReLU(), nn.ReLU()))
        with pytest.raises(IntegrityError, match=r"'?1'? does not fit"):
            module_state.rehearse(nn.Sequential(nn.ReLU()), state)

    def test_code_that_is_missing(self) -> None:
        def build() -> nn.Module:
            module = nn.Linear(2, 2)
            module.weight.weight_loader = print
            return module

        state = self.state_of(build(), build)
        with pytest.raises(IntegrityError, match=r"weight\.weight_loader"):
            module_state.rehearse(on_meta(lambda: nn.Linear(2, 2)), state)
