"""One command a rank, from the command of an engine of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fer.standby.cohort import meeting_place, store
from fer.standby.process import Command


def of_ranks(command: Command, path: Path, world: int) -> Sequence[Command]:
    """The commands of an engine whose rank 0 answers at ``path``, rank 0 first. One rank is the command itself.

    What the ranks meet in is named after ``path``, which is another one at each start.
    """
    if world == 1:
        return [command]
    files = (meeting_place(path), store(path))
    return [
        dataclasses.replace(
            command,
            arguments=(*command.arguments, "--rank", str(rank), "--world", str(world)),
            files=files,
            name=f"rank {rank}",
        )
        for rank in range(world)
    ]
