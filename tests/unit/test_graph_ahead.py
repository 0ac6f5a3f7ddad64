"""What a start has of its graphs before there is a context: an archive that a spare read, binaries that are loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fer.cudagraph import ahead, load, store
from fer.cudagraph import archive as archives
from fer.cudagraph import plan as planning
from fer.cudagraph.records import Image
from fer.cudagraph.restore import Restorer
from fer.errors import ArchiveError
from tests.support.cudagraph_driver import FakeDriver
from tests.support.cudagraph_stage import Bench
from tests.support.keeper import wait_until
from tests.unit.test_graph_roundtrip import prepared

RECORDED = Path(__file__).parent.parent / "data" / "h200.fergraph"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    return Bench(monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def nothing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_read", {})


def saved(home: Path, name: str, model: str, *, engine: str = "transformers", mark: int = 0) -> Path:
    path = store.folder(home) / f"{name}{archives.SUFFIX}"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    archive = archives.read(RECORDED)
    archive.facts["fingerprint"] = {"group": {"engine": {"name": engine}, "model": model}}
    archive.facts["mark"] = mark
    archives.write(path, archive)
    return path


def engine(model: str) -> Any:
    return SimpleNamespace(identity=lambda: SimpleNamespace(engine="transformers", model=model))


def marks() -> set[int]:
    return {archive.facts["mark"] for archive in ahead._read.values()}


def test_archives_of_the_model_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    model = str(tmp_path / "model")
    for number, (of, by) in enumerate([(model, "transformers"), ("another", "transformers"), (model, "sglang")]):
        saved(tmp_path, str(number), of, engine=by, mark=number)
    (store.folder(tmp_path) / f"bad{archives.SUFFIX}").write_bytes(b"no archive")
    monkeypatch.chdir(tmp_path)
    ahead.read(engine("model"), tmp_path)
    assert marks() == {0}, "the same folder by another name is the same model"


def test_no_more_than_a_host_has_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MOST", 2)
    for number in range(4):
        saved(tmp_path, str(number), "m", mark=number)
    ahead.read(engine("m"), tmp_path)
    assert len(marks()) == 2


def test_none_is_read_from_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    saved(tmp_path, "a", "m").parent.chmod(0o777)
    ahead.read(engine("m"), tmp_path)
    ahead.read(engine("m"), tmp_path / "nothing")
    assert not ahead._read


def test_what_was_read_is_taken_if_it_is_still_the_same(tmp_path: Path) -> None:
    path = saved(tmp_path, "a", "m", mark=1)
    ahead.read(engine("m"), tmp_path)
    (kept,) = ahead._read.values()
    assert ahead.take(path, archives.facts_of(path)[1]) is kept
    saved(tmp_path, "a", "m", mark=2)
    assert ahead.take(path, archives.facts_of(path)[1]).facts["mark"] == 2
    ahead.forget()
    assert not ahead._read
    path.write_bytes(b"damaged")
    with pytest.raises(ArchiveError):
        ahead.take(path, "another")


@pytest.mark.parametrize("damaged", [False, True])
def test_binaries_are_checked_once_and_without_a_context(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    fake = FakeDriver()
    archive = prepared(fake, tmp_path)
    archive.facts |= {"order": ["decode/9", "decode/4"], "refused": {"decode/9": "no"}}
    if damaged:
        images = archive.tables.images
        images[:] = [Image(bytes(image.data) + b"!", image.digest) for image in images]
    asked: list[Image] = []

    def check(image: Image) -> None:
        asked.append(image)
        archives.check_image(image)

    monkeypatch.setattr(load, "check_image", check)
    monkeypatch.setattr(planning, "open_cuda", lambda *, restoring: fake.cuda)
    bench.restoring(quarantined={})
    bench.plan.archive = archive
    binaries = planning._check_ahead(bench.plan)
    wait_until(lambda: len(asked) == len(archive.tables.images), "the check of all binaries")
    assert not fake.libraries
    restorer = Restorer(archive, fake.cuda, lambda *_: None, order=bench.plan.order, context=1, binaries=binaries)
    restorer.run()
    assert len(asked) == len(archive.tables.images), "once"
    assert set(restorer.progress.failed if damaged else restorer.progress.ready) == {"decode/4"}
    restorer.abandon()
    assert not fake.libraries
