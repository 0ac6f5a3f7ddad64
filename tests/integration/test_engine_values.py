"""Values that code depends on: what it can tell apart is told apart, what nobody can compare is refused."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import functools
import importlib
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fer.engines import callables, values
from fer.engines.module import ModuleEngine
from fer.errors import UsageError
from fer.fingerprint import Fingerprint
from tests.support.processes import ROOT, WAIT_S


@dataclasses.dataclass
class Plan:
    width: int = 1


@dataclasses.dataclass
class Twin:
    width: int = 1


class Pair(NamedTuple):
    left: int = 1


class Text(str):
    pass


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self, module: nn.Module) -> None:
        pass


class Bare:
    pass


class Kind(enum.Enum):
    PLAIN = 1


def computed(value: object) -> Any:
    """A member whose value is computed: the class is another, its names are the same."""
    return enum.Enum("Kind", {"X": value}, module=__name__).X  # type: ignore[attr-defined]


def one() -> int:
    return 1


def two() -> int:
    return 2


def extra(attribute: int) -> Plan:
    plan = Plan()
    plan.more = attribute  # type: ignore[attr-defined]
    return plan


def fill(value: Any, module: nn.Module) -> None:
    pass


def build() -> nn.Module:
    return nn.Linear(1, 1)


DIFFERENT: list[tuple[Any, Any]] = [
    ([1, 2], {1, 2}),
    ([1, 2], (1, 2)),
    ({1, 2}, frozenset({1, 2})),
    ("x", Path("x")),
    ("x", b"x"),
    ({1: 2}, {"1": 2}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({"a": 1}, collections.OrderedDict(a=1)),
    ({}, collections.defaultdict(int)),
    (collections.defaultdict(one), collections.defaultdict(two)),
    (computed(1), computed(2)),
    (Kind.PLAIN, f"{__name__}:Kind.PLAIN"),
    (Plan(), Twin()),
    (Plan(), {"width": 1}),
    (extra(1), extra(2)),
    (Pair(), (1,)),
    (argparse.Namespace(a=1), types.SimpleNamespace(a=1)),
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    (1.0, float("inf")),
    (1.0, np.float64(1.0)),
    (torch.float32, "torch.float32"),
    (torch.Size([1]), [1]),
    (re.compile("a"), re.compile("a", re.IGNORECASE)),
    (one, callables.name(one)),
    ([one], [two]),
    ([{"tuple": [1]}], [(1,)]),
    (
        [functools.partial(fill, 1), functools.partial(fill, 2)],
        [functools.partial(fill, 3), functools.partial(fill, 2)],
    ),
    ([Slotted(1)], [Slotted(2)]),
]


def fingerprint(value: Any) -> bytes:
    def load(module: nn.Module) -> None:
        assert value is not None

    return Fingerprint(dict(ModuleEngine(build, load).identity().settings), {}).to_json()


@pytest.mark.parametrize(
    ("left", "right"),
    DIFFERENT,
    ids=[f"{n} {type(a).__name__} {type(b).__name__}" for n, (a, b) in enumerate(DIFFERENT)],
)
def test_what_code_can_tell_apart_is_told_apart(left: Any, right: Any) -> None:
    assert fingerprint(left) == fingerprint(left)
    assert fingerprint(left) != fingerprint(right)


def looped() -> list[Any]:
    items: list[Any] = [1]
    items.append(items)
    return items


@pytest.mark.parametrize(
    "make",
    [
        lambda: Text("x"),
        lambda: type("Items", (list,), {})([1]),
        lambda: type("Table", (dict,), {})(a=1),
        lambda: type("Names", (types.SimpleNamespace,), {})(a=1),
        lambda: collections.ChainMap({}),
        lambda: {"a": [Plan(object())]},  # type: ignore[arg-type]
        lambda: computed(object()),
        lambda: torch.ones(1),
        Bare,
        looped,
    ],
)
def test_what_may_hold_more_than_it_shows_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="'value'"):
        fingerprint(make())


def test_the_files_of_records_are_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"records_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "import dataclasses, enum\n"
        "@dataclasses.dataclass\nclass Record:\n    x: int = 1\n"
        "class Choice(enum.Enum):\n    A = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module(name)
    for held in (module.Record(), [{"a": module.Record()}], module.Choice.A, types.SimpleNamespace(c=module.Choice.A)):
        engine = ModuleEngine(build, functools.partial(fill, held))
        assert (tmp_path / f"{name}.py").resolve() in engine.identity().sources


def test_a_set_is_the_same_in_every_process() -> None:
    code = (
        "import json; from fer.engines import values; "
        "print(json.dumps(values.plain([set('abcdefgh'), {frozenset('xyz'): 1}])))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert json.loads(child.stdout) == values.plain([set("abcdefgh"), {frozenset("xyz"): 1}])
