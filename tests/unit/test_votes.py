"""What may fail on one rank is voted on before it is acted on."""

from __future__ import annotations

from typing import cast

import pytest

from fer.engines.base import Engine
from fer.errors import CheckpointError, PeerRankFailed
from fer.weights.votes import together


class Ranks:
    """Stands for an engine of several ranks: the others' votes are given."""

    def __init__(self, *, others: bool) -> None:
        self.others, self.votes = others, list[bool]()

    def agree(self, flag: bool) -> bool:
        self.votes.append(flag)
        return flag and self.others


def fail() -> None:
    raise CheckpointError("a shard is missing")


def test_the_result_where_all_succeed() -> None:
    ranks = Ranks(others=True)
    assert together(cast(Engine, ranks), lambda: 7, "counting") == 7
    assert ranks.votes == [True]


def test_a_rank_that_fails_votes_first_and_raises_its_own_error() -> None:
    ranks = Ranks(others=True)
    with pytest.raises(CheckpointError, match="a shard is missing"):
        together(cast(Engine, ranks), fail, "reading")
    assert ranks.votes == [False]


def test_a_rank_that_succeeds_does_not_go_on_without_the_others() -> None:
    ranks = Ranks(others=False)
    with pytest.raises(PeerRankFailed, match="reading"):
        together(cast(Engine, ranks), lambda: 7, "reading")
    assert ranks.votes == [True]
