"""The structure digest tells apart what a caller could tell apart, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fer.weights import module_state, structure
from tests.support.processes import ROOT
from tests.support.state_modules import Helper, Layer


def loaded() -> nn.Module:
    module = Layer()
    module.load()
    module.items = [1, module.bias]
    return module


def test_values_and_addresses_do_not_matter() -> None:
    one, other = loaded(), loaded()
    with torch.no_grad():
        other.weight.fill_(7)
    assert module_state.structure_digest(one) == module_state.structure_digest(other)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m.weight.requires_grad_(False),
        lambda m: setattr(m.weight, "data", m.weight.data.half()),
        lambda m: setattr(m.weight, "data", m.weight.data.t().contiguous().t()),
        lambda m: setattr(m, "bias", nn.Parameter(m.bias.detach())),
        lambda m: setattr(m.bias, "data", m.weight.data.view(-1)[:6]),
        lambda m: setattr(m.bias, "note", 1),
        lambda m: setattr(m, "scale", 1.0),
        lambda m: setattr(m, "scale", False),
        lambda m: m.items.append(None),
        lambda m: m.register_buffer("table", m.table),
        lambda m: m.add_module("child", nn.ReLU()),
        lambda m: m.register_forward_hook(print),
        lambda m: setattr(m, "forward", print),
        lambda m: setattr(m, "table", m.table.to("meta")),
        lambda m: m._parameters.update(weight=m._parameters.pop("weight")),
    ],
)
def test_everything_else_does(change: Any) -> None:
    one, other = loaded(), loaded()
    change(other)
    assert module_state.structure_digest(one) != module_state.structure_digest(other)


def test_the_order_in_which_attributes_were_set_does_not() -> None:
    one, other = nn.Module(), nn.Module()
    one.a, one.b = 1, {"x", "y", "z"}
    other.b, other.a = {"z", "y", "x"}, 1
    assert module_state.structure_digest(one) == module_state.structure_digest(other)


def test_the_order_of_keys_does() -> None:
    one, other = nn.Module(), nn.Module()
    one.table, other.table = {"a": 1, "b": 1}, {"b": 1, "a": 1}
    assert module_state.structure_digest(one) != module_state.structure_digest(other)


def test_the_first_difference_is_named() -> None:
    one, other = loaded(), loaded()
    other.scale = 2.5
    assert module_state.first_difference(one, other) == "scale: None / scale: 2.5"
    assert module_state.first_difference(one, loaded()) == ""


def test_an_outline_names_where_another_module_parts_from_it() -> None:
    kept = structure.outline(loaded())
    assert module_state.where_it_parts(loaded(), kept) == ""
    other = loaded()
    other.scale = 2.5
    assert module_state.where_it_parts(other, kept) == "scale: 2.5"
    del other.scale
    assert module_state.where_it_parts(other, kept) == "it ends before the published one does"


def test_leftovers_are_found_wherever_they_are() -> None:
    module = loaded()
    module.helper = Helper(inner=[{"x": torch.empty(1, device="meta")}])
    module.bias.extra = torch.empty(1, device="meta")
    assert module_state.meta_leftovers(module) == ["bias.extra", "helper.inner[0][0]"]
    assert module_state.survey(module).leftovers == module_state.meta_leftovers(module)


def test_is_the_same_in_another_process() -> None:
    code = (
        "from tests.support.state_modules import Layer; from fer.weights import module_state;"
        "m = Layer(); m.names = {'a', 'b', 'c', 'd'}; print(module_state.structure_digest(m))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""
