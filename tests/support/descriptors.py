"""Comparing sets of open descriptors."""

from __future__ import annotations

import os
from pathlib import Path

Open = dict[int, str]
"""Descriptor number to what it is open on."""


def open_descriptors(pid: int | None = None) -> Open:
    """What a process (this one by default) has open."""
    found: Open = {}
    folder = Path(f"/proc/{pid or os.getpid()}/fd")
    for entry in folder.iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return found


def leaked(before: Open, after: Open) -> Open:
    """What is open after and was not before. A number that now stands for another file counts."""
    return {number: what for number, what in after.items() if before.get(number) != what}
