"""Every error has an exit code, and the right one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fer import errors
from fer.cli.exit_codes import TABLE, code_of


def _classes(root: type[errors.FerError]) -> Iterator[type[errors.FerError]]:
    yield root
    for child in root.__subclasses__():
        if child.__module__ == "fer.errors":
            yield from _classes(child)


@pytest.mark.parametrize("kind", list(_classes(errors.FerError)))
def test_every_error_has_a_documented_code(kind: type[errors.FerError]) -> None:
    assert code_of(kind("something")) in {row.code for row in TABLE} - {0}


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.FerError, 1),
        (errors.PublishRefused, 1),
        (errors.OptionError, 2),
        (errors.UnsupportedQuantization, 2),
        (errors.Miss, 3),
        (errors.KeeperUnavailable, 4),
        (errors.PeerRefused, 4),
        (errors.Refused, 5),
        (errors.LeasesStand, 5),
        (errors.OutOfMemory, 6),
        (errors.WaitTimeout, 6),
        (errors.IntegrityError, 7),
        (errors.SlabLost, 7),
    ],
)
def test_the_nearest_class_decides(kind: type[errors.FerError], code: int) -> None:
    assert code_of(kind("something")) == code


def test_other_exceptions() -> None:
    assert code_of(KeyboardInterrupt()) == 130
    assert code_of(ValueError("a bug")) == 1


def test_codes_are_unique() -> None:
    codes = [row.code for row in TABLE]
    assert len(codes) == len(set(codes))
