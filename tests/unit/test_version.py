"""Versions: what proves that two engines have the same model, and what a folder says of itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fer.errors import CheckpointError
from fer.standby.version import Version, positions, unpublished
from fer.standby.wire import Ready


def version(folder: Path | None) -> Version:
    return Version(online=lambda path: [], model=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_files_that_answers_depend_on_tell_models_apart(folder: Path) -> None:
    seen = {version(folder).weights()}
    (folder / "model.lock").touch()
    (folder / "cache.json").mkdir()
    assert {version(folder).weights()} == seen, "locks and folders are nothing of the model"
    for change in ("content", "time", "replaced", "more"):
        path = folder / "model.safetensors"
        if change == "content":
            path.write_bytes(b"other")
        elif change == "time":
            os.utime(path, ns=(1, 1))
        elif change == "replaced":
            (folder / "new").write_bytes(b"other")
            os.utime(folder / "new", ns=(1, 1))
            (folder / "new").replace(path)
        else:
            (folder / "tokenizer.json").write_text("{}")
        assert version(folder).weights() not in seen, change
        seen.add(version(folder).weights())


def test_links_are_followed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    linked = tmp_path_factory.mktemp("linked")
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    before = version(linked).weights()
    (folder / "model.safetensors").write_bytes(b"other")
    assert version(linked).weights() != before


def test_a_folder_that_is_gone_proves_nothing(tmp_path: Path) -> None:
    assert version(tmp_path / "gone").weights() == ""
    assert version(None).weights() == version(None).weights() != ""


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ("{}", None),
        ('{"max_position_embeddings": 512}', 512),
        ('{"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 1}', 64),
        ('{"max_position_embeddings": "many"}', None),
        ('{"max_position_embeddings": -1}', None),
    ],
)
def test_positions(tmp_path: Path, config: str, found: int | None) -> None:
    (tmp_path / "config.json").write_text(config)
    assert positions(tmp_path) == found


@pytest.mark.parametrize("config", [None, "", "{", "[]", '"text"', '{"text_config": 7}', "[" * 100_000])
def test_what_is_no_model(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"is no model folder: config\.json"):
        positions(tmp_path)


def test_editions_are_noted_with_who_made_them() -> None:
    def ready(path: str, **details: object) -> Ready:
        return Ready(0, 1, 1, {"stages": [{"name": "weights", "path": path, "why": "so", "details": details}]})

    made = version(None)
    made.note(ready("attached", edition="a"))
    made.note(ready("loaded", edition="b", published=True))
    made.note(ready("loaded", published=False))
    made.note(Ready(0, 1, 1, {}))
    assert made.editions == {"a", "b"} and made.published == {"b"}
    assert unpublished(ready("loaded", published=False)) == "so"
    assert unpublished(ready("loaded", published=True)) == unpublished(Ready(0, 1, 1, {})) == ""
