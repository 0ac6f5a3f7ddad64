"""What gives way to a load, and what is said where nothing can."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fer.errors import OutOfMemory
from fer.memory import host
from fer.memory.base import Room
from fer.weights import room
from fer.weights.client import KeeperClient
from fer.weights.keeper.start import start_keeper
from tests.support.keeper import key, publish
from tests.support.recovery import keeper

SIZE = 1 << 20


@pytest.fixture
def client() -> Iterator[KeeperClient]:
    """A connection to a keeper that may hold many editions."""
    start_keeper()
    with keeper() as connected:
        yield connected


def device(total: int) -> Any:
    """A host of ``total`` bytes, of which kept slabs are all that is used."""

    def free() -> Room:
        with keeper() as client:
            return Room(free=total - sum(info.bytes for info in client.status().editions), total=total)

    return SimpleNamespace(kind="host", gpu="host", room=free)


def kept(client: KeeperClient) -> str:
    """An edition that nobody uses."""
    edition = publish(client, key(), size=SIZE)
    client.release(edition)
    return edition


BESIDE = SIZE + host.spare(0)


def test_what_fits_evicts_nothing(client: KeeperClient) -> None:
    kept(client)
    assert room.make(client, device(2 * SIZE + BESIDE), SIZE) == []


def test_room_is_made_for_the_slab_that_publishing_fills_and_for_what_stays_free(client: KeeperClient) -> None:
    edition = kept(client)
    (evicted,) = room.make(client, device(2 * SIZE + BESIDE - 1), SIZE)
    assert evicted.edition == edition
    assert not client.status().editions


def test_where_nothing_is_published_less_is_needed(client: KeeperClient) -> None:
    kept(client)
    assert room.make(client, device(2 * SIZE), SIZE, publish=False) == []
    (evicted,) = room.make(client, device(2 * SIZE - 1), SIZE, publish=False)
    assert evicted.bytes == SIZE


def test_what_is_in_use_stays_and_is_named_only_where_the_weights_themselves_do_not_fit(client: KeeperClient) -> None:
    edition = publish(client, key(), size=SIZE)
    assert room.make(client, device(2 * SIZE), SIZE) == []
    with pytest.raises(OutOfMemory) as caught:
        room.make(client, device(2 * SIZE - 1), SIZE)
    assert (caught.value.fields["needed"], caught.value.fields["free"]) == (SIZE, SIZE - 1)
    assert edition in caught.value.why
    assert "test" in caught.value.why
    assert len(client.status().editions) == 1
