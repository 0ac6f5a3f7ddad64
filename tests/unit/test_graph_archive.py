"""Archives on disk: whole or refused by section, never half believed; the command line that looks at them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fer.cli.main import app
from fer.cudagraph import archive as archives
from fer.cudagraph import compare, sections, state, store
from fer.cudagraph.probe import NUMBERS, digest_of, hexed, probe_name
from fer.cudagraph.records import Tables
from fer.errors import ArchiveError

RECORDED = Path(__file__).parent.parent / "data" / "h200.fergraph"
ENTRIES = sections.Sections(RECORDED).entries


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    path = store.folder(tmp_path) / f"model{archives.SUFFIX}"
    path.parent.mkdir()
    shutil.copy(RECORDED, path)
    return path


def test_what_is_written_is_read(copy: Path) -> None:
    first = archives.read(copy)
    archives.write(copy, first)
    second = archives.read(copy)
    assert compare.compare(first, second) == []
    assert second.facts == first.facts
    assert [bytes(i.data) for i in second.tables.images] == [bytes(i.data) for i in first.tables.images]


def test_the_recorded_digests_are_those_of_the_tables() -> None:
    archive = archives.read(RECORDED)
    found = {graph.name: archive.tables.digest(graph) for graph in archive.tables.top()}
    assert found == archive.facts["digests"]


def test_recorded_outputs_are_what_plain_torch_makes_of_the_recorded_inputs() -> None:
    archive = archives.read(RECORDED)
    for name, recorded in archive.facts["golden"]["fixture"].items():
        for number, wanted in zip(NUMBERS, recorded, strict=True):
            inputs = {
                label: torch.frombuffer(bytearray(content.data), dtype=torch.bfloat16)
                for content in archive.probes
                for label in ("x", "weight")
                if content.name == probe_name(name, number) + label
            }
            x = inputs["x"].reshape(2, 256)[: int(name.split("/")[1])]
            for _ in range(2):
                wide = x.float()
                scale = torch.rsqrt((wide * wide).sum(-1, keepdim=True) / 256 + 1e-6)
                x = (wide * scale * inputs["weight"].float()).to(torch.bfloat16)
            assert hexed(digest_of({"out": x})) == wanted


def test_an_archive_none_of_whose_graphs_is_kept_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a.fergraph"
    archives.write(path, archives.Archive(Tables(), {"refused": {"decode/1": "collective kernel"}}))
    assert archives.read(path).facts == {"refused": {"decode/1": "collective kernel"}}
    assert store.damage(path) == []


def test_any_bit_of_an_output_changes_its_digest() -> None:
    tensor = torch.arange(40, dtype=torch.float32)
    seen = {tuple(digest_of({"out": tensor}).flatten().tolist())}
    raw = tensor.view(torch.uint8)
    for place in range(raw.numel()):
        for bit in range(8):
            raw[place] ^= 1 << bit
            seen.add(tuple(digest_of({"out": tensor}).flatten().tolist()))
            raw[place] ^= 1 << bit
    assert len(seen) == 1 + 8 * raw.numel()
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert tuple(digest_of({"out": swapped}).flatten().tolist()) not in seen


@pytest.mark.parametrize("name", [name for name, entry in ENTRIES.items() if entry.stored])
def test_a_flipped_bit_is_found_in_every_section(copy: Path, name: str) -> None:
    data = bytearray(copy.read_bytes())
    entry = ENTRIES[name]
    data[entry.offset + entry.stored // 2] ^= 4
    copy.write_bytes(data)
    assert store.damage(copy) == [name]
    if name == "binaries":  # checked when the binary is loaded
        with pytest.raises(ArchiveError, match="binary"):
            for image in archives.read(copy).tables.images:
                archives.check_image(image)
    else:
        with pytest.raises(ArchiveError, match=name):
            archives.read(copy)


@pytest.mark.parametrize("at", [0, 9, 20, 40, 70, 100])
def test_a_flipped_bit_in_header_or_directory_is_found(copy: Path, at: int) -> None:
    data = bytearray(copy.read_bytes())
    data[at] ^= 1
    copy.write_bytes(data)
    with pytest.raises(ArchiveError):
        archives.read(copy)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 500, 4096, 13000])
def test_a_truncated_archive_is_refused(copy: Path, size: int) -> None:
    os.truncate(copy, size)
    with pytest.raises(ArchiveError):
        archives.read(copy)
    assert store.damage(copy)


def test_another_format_is_refused_as_such(copy: Path) -> None:
    data = bytearray(copy.read_bytes())
    data[8] = 99
    copy.write_bytes(data)
    with pytest.raises(ArchiveError, match="format is 99"):
        archives.read(copy)


def test_sound_checksums_around_unsound_tables_are_refused(copy: Path) -> None:
    file = sections.Sections(copy)
    parts = {name: bytes(file.read(name)) for name in file.entries}
    for name, change in (
        ("used", b"\xff" * len(parts["used"])),
        ("edges", b"\xff" * len(parts["edges"])),
        ("names", b"[]"),
    ):
        sections.write(copy, {**parts, name: change}, raw=frozenset({"binaries"}))
        with pytest.raises(ArchiveError):
            archives.read(copy)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError):
        archives.write(tmp_path / "file" / "a.fergraph", archives.read(RECORDED))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_archive_is_private(tmp_path: Path) -> None:
    archives.write(tmp_path / "new" / "a.fergraph", archives.read(RECORDED))
    assert (tmp_path / "new" / "a.fergraph").stat().st_mode & 0o077 == 0


def test_state_belongs_to_one_archive(copy: Path) -> None:
    state.save(copy, state.State("one", "proven", "", {"decode/1": "differs"}))
    assert state.load(copy, "one").quarantined == {"decode/1": "differs"}
    assert state.load(copy, "another") == state.State("another")
    state.beside(copy).write_text("{")
    assert state.load(copy, "one").proof == "unproven"


def test_prune_removes_what_cannot_be_used(copy: Path, tmp_path: Path) -> None:
    sound, failed = copy.with_name(f"sound{archives.SUFFIX}"), copy.with_name(f"failed{archives.SUFFIX}")
    shutil.copy(copy, sound)
    shutil.copy(copy, failed)
    state.save(failed, state.State(sections.Sections(failed).digest, "failed", "wrong"))
    os.truncate(copy, 300)
    assert {path.name for path in store.prune(tmp_path)} == {copy.name, failed.name}
    assert store.find(tmp_path) == [sound]
    assert store.prune(tmp_path, everything=True) == [sound]


def run(*arguments: str) -> tuple[int, dict[str, object]]:
    done = CliRunner().invoke(app, ["graphs", *arguments, "--json"])
    return done.exit_code, json.loads(done.stdout)


def test_inspect_says_what_is_in_it(copy: Path, tmp_path: Path) -> None:
    code, found = run("inspect", "--home", str(tmp_path))
    assert code == 0
    (row,) = found["archives"]  # type: ignore[misc]
    assert row["graphs"] == {"decode/2": 3, "decode/1": 3}  # type: ignore[index]
    assert row["proof"] == "unproven"  # type: ignore[index]


def test_verify_exits_with_the_code_of_damage(copy: Path) -> None:
    assert run("verify", str(copy))[0] == 0
    os.truncate(copy, 5000)
    assert run("verify", str(copy))[0] == 7


def test_diff_leads_to_the_parameter(copy: Path) -> None:
    assert run("diff", str(copy), str(RECORDED))[0] == 0
    archive = archives.read(copy)
    graph = archive.graph("decode/1")
    graph.params = graph.params.copy()
    graph.params[9] ^= 1
    archives.write(copy, archive)
    code, found = run("diff", str(copy), str(RECORDED))
    assert code == 3
    (row,) = found["differences"]  # type: ignore[misc]
    assert row["what"] == "decode/1: node 0, rms_norm, parameters at byte 8"  # type: ignore[index]


def test_a_missing_archive_is_a_mistake_of_the_caller(tmp_path: Path) -> None:
    assert run("inspect", str(tmp_path / "none"))[0] == 2
