"""The error tree: drawn as it is, and alive on the other side of a process boundary."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from fer import errors
from fer.errors import FerError, from_dict


def classes(root: type[FerError] = FerError) -> list[type[FerError]]:
    ours = [child for child in root.__subclasses__() if child.__module__ == errors.__name__]
    return [root, *(kind for child in ours for kind in classes(child))]


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn: list[tuple[str, int]] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?: {2,}\S|$)", line):
            drawn.append((match[2], len(match[1]) // 4))
    depth = {kind.__name__: len(kind.__mro__) - len(FerError.__mro__) for kind in classes()}
    assert drawn == [(kind.__name__, depth[kind.__name__]) for kind in classes()]


@pytest.mark.parametrize("kind", classes())
def test_every_error_crosses_a_process_boundary(kind: type[FerError]) -> None:
    error = kind("it broke", why="a reason", fix="Do this", method="awq", needed=12)
    for copy in (pickle.loads(pickle.dumps(error)), from_dict(json.loads(json.dumps(error.to_dict())))):
        assert type(copy) is kind
        assert str(copy) == str(error)
        assert (copy.what, copy.why, copy.fix) == ("it broke", "a reason", "Do this")
        assert copy.fields == {"method": "awq", "needed": 12}


@pytest.mark.parametrize("kind", classes())
def test_every_error_is_documented(kind: type[FerError]) -> None:
    assert kind.__doc__


def test_the_message_says_what_why_and_what_to_do() -> None:
    assert str(FerError("it broke", why="a reason", fix="Do this")) == "it broke: a reason. Do this"
    assert str(FerError("it broke")) == "it broke"
    assert str(FerError("it broke", fix="Do this")) == "it broke. Do this"


def test_an_unknown_kind_becomes_a_plain_error() -> None:
    error = from_dict({"kind": "FromTheFuture", "what": "it broke"})
    assert type(error) is FerError
    assert str(error) == "it broke"
    assert str(from_dict({})) == "unknown error"
