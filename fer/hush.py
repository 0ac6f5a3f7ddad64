"""Libraries that complain on import about optional parts, of no use to whoever did not ask for those."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOUD: Final = ("torchao", "torch.utils._pytree")


def hush() -> None:
    """Let them tell errors alone from now on."""
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def hushed() -> Iterator[None]:
    """The same within alone, where what runs afterwards is not ours."""
    before = {name: logging.getLogger(name).level for name in LOUD}
    hush()
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
