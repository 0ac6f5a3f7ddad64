"""What a template has made ahead is given only for the very same files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fer import warm


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    yield tmp_path
    warm.forget()


def test_a_tokenizer_is_given_once_and_a_configuration_as_a_copy(folder: Path) -> None:
    tokenizer, config = object(), {"layers": [1]}
    warm.hold("tokenizer", folder, lambda: tokenizer)
    warm.hold("config", folder, lambda: config)
    assert warm.folders() == [str(folder)]
    assert warm.take("tokenizer", folder) is tokenizer
    assert warm.take("tokenizer", folder) is None
    for _ in range(2):
        found = warm.take("config", folder)
        assert found == config and found["layers"] is not config["layers"]
    assert {path.name for path in warm.files()} == {"tokenizer.json", "config.json"}


def test_files_that_were_only_touched_are_known_by_their_digest(folder: Path) -> None:
    warm.hold("config", folder, lambda: 1)
    os.utime(folder / "config.json", (1, 1))
    (folder / "model.safetensors").write_text("other weights")
    assert warm.take("config", folder) == 1


@pytest.mark.parametrize("change", ["content", "removed", "added", "folder"])
def test_changed_files_give_nothing(folder: Path, change: str) -> None:
    warm.hold("config", folder, lambda: 1)
    if change == "content":
        (folder / "config.json").write_text("[]")
    elif change == "removed":
        (folder / "tokenizer.json").unlink()
    elif change == "added":
        (folder / "added_tokens.json").write_text("{}")
    else:
        folder = folder / "none"
    assert warm.take("config", folder) is None


def test_what_was_made_of_files_that_changed_meanwhile_is_not_held(folder: Path) -> None:
    warm.hold("config", folder, lambda: (folder / "config.json").write_text("[1]"))
    assert warm.take("config", folder) is None and warm.folders() == []
