"""What tests of whole processes share: a keeper of their own, and a pretended card's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.keeper import Keeper
from tests.support.pretended_room import Room
from tests.support.processes import Children


@pytest.fixture
def keeper(children: Children, runtime_dir: Path) -> Keeper:
    """A real one, in the test's runtime directory."""
    return Keeper(children, runtime_dir)


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """Memory that engines of :mod:`tests.support.standby_engine` share."""
    return Room(tmp_path / "room")
