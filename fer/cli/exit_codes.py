"""What the exit code of ``fer`` means. The one table; ``docs/cli.md`` repeats it and a test compares the two."""

from __future__ import annotations

from dataclasses import dataclass

from fer import errors


@dataclass(frozen=True)
class Row:
    """One exit code.

    Attributes:
        meaning: one clause, for people.
        kinds: the errors it stands for; of an error's classes the nearest one that has a row decides.
    """

    code: int
    meaning: str
    kinds: tuple[type[errors.FerError], ...] = ()


TABLE: tuple[Row, ...] = (
    Row(0, "done"),
    Row(1, "failed for a reason without a code of its own; the message names it", (errors.FerError,)),
    Row(2, "the command, a setting, the model's configuration or the checkpoint is wrong", (errors.UsageError,)),
    Row(3, "nothing that is kept fits, and loading was forbidden", (errors.Miss,)),
    Row(
        4,
        "no keeper or launcher could be reached, or the one found could not be trusted",
        (errors.KeeperError, errors.LauncherError),
    ),
    Row(5, "the keeper refused, for instance because engines hold leases", (errors.Refused, errors.LeasesStand)),
    Row(6, "memory or waiting time ran out", (errors.ResourceError,)),
    Row(7, "kept bytes, or tokens made from them, are not what they were", (errors.IntegrityError, errors.SlabLost)),
    Row(8, "a check of `fer doctor` failed"),
    Row(9, "an archive holds code, or what FER never writes, and is not trusted", (errors.ArchiveUntrusted,)),
    Row(130, "interrupted"),
)

MISS = 3
INTEGRITY = 7
CHECK_FAILED = 8
INTERRUPTED = 130


def code_of(error: BaseException) -> int:
    """The exit code for an error; 1 for one that FER did not raise."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    codes = {kind: row.code for row in TABLE for kind in row.kinds}
    return next((codes[kind] for kind in type(error).__mro__ if kind in codes), 1)
