"""``fer kernels`` as its users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fer.cli import main
from fer.kernels import coverage, entry, store
from tests.support import kernel_entries as made
from tests.support.cli import Done, fer
from tests.support.processes import ROOT, WAIT_S


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    for name in ("add", "scale"):
        made.make(root, name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(root))
    return root


@pytest.fixture
def archive(cache: Path, tmp_path: Path) -> Path:
    path = tmp_path / "a.ferkernels"
    assert kernels("pack", path).code == 0
    return path


def kernels(*arguments: str | Path) -> Done:
    """The command in this process; :func:`test_as_a_process` shows that a process does the same."""
    done = CliRunner().invoke(main.app, ["kernels", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Done(done.exit_code, done.stdout, done.stderr)


def test_as_a_process(cache: Path, tmp_path: Path) -> None:
    packed = fer("kernels", "pack", tmp_path / "a", "--json")
    assert (packed.code, len(packed.json["entries"])) == (0, 2)
    assert fer("kernels", "inspect", tmp_path / "none").code == 7


def test_pack_inspect_verify(cache: Path, tmp_path: Path) -> None:
    done = kernels("pack", tmp_path / "a", "--json")
    assert (done.code, len(done.json["entries"]), done.json["left_out"]) == (0, 2, {})
    assert done.json["bytes"] == (tmp_path / "a").stat().st_size
    again = kernels("pack", tmp_path / "b")
    assert again.code == 0 and f"sha256:{done.json['sha256']}" in again.out
    told = kernels("inspect", tmp_path / "a")
    assert told.code == 0 and "Triton 3.9.0, cuda 90" in told.out and "model:add" in told.out
    assert kernels("verify", tmp_path / "a").out.endswith("0 of 2 entries damaged\n")
    assert kernels("verify").code == 0
    next(cache.rglob("add.cubin")).write_bytes(b"")
    broken = kernels("verify", "--json")
    assert (broken.code, list(broken.json["damaged"].values())) == (7, ["add.cubin has 0 bytes instead of 67"])


def test_inspect_needs_no_engine(archive: Path) -> None:
    code = "import sys; sys.argv[0] = 'fer'; from fer.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "assert not {'torch', 'triton', 'numpy', 'transformers'} & set(sys.modules)"
    command = [sys.executable, "-c", code, "kernels", "inspect", str(archive)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=WAIT_S)


def test_unpack_and_its_exit_codes(archive: Path, cache: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    done = kernels("unpack", archive, "--cache", target, "--no-compare", "--json")
    assert (done.code, len(done.json["restored"])) == (0, 2)
    assert made.content(target) == made.content(cache)
    assert len(kernels("unpack", archive, "--cache", target, "--no-compare", "--json").json["kept"]) == 2

    made.library(cache)
    kernels("pack", tmp_path / "code")
    untrusted = kernels("unpack", tmp_path / "code", "--cache", tmp_path / "t2", "--no-compare")
    assert untrusted.code == 9 and "--trust" in untrusted.err
    assert not (tmp_path / "t2").exists()
    assert kernels("unpack", tmp_path / "code", "--cache", tmp_path / "t2", "--no-compare", "--without-code").code == 0
    trusted = kernels("unpack", tmp_path / "code", "--cache", tmp_path / "t3", "--no-compare", "--trust", "--json")
    assert (trusted.code, len(trusted.json["restored"])) == (0, 3)

    archive.write_bytes(archive.read_bytes()[:-20])
    assert kernels("unpack", archive, "--cache", tmp_path / "t4", "--no-compare").code == 7
    assert kernels("unpack", tmp_path / "none", "--json").json["error"]["kind"] == "ArchiveError"


def test_an_archive_for_something_else_is_incompatible(archive: Path, tmp_path: Path) -> None:
    """The real comparison: these kernels were never made by the Triton that is here."""
    pytest.importorskip("triton")
    done = kernels("unpack", archive, "--cache", tmp_path / "target", "--json")
    assert done.code == 3
    assert done.json["error"]["kind"] == "ArchiveIncompatible"
    assert "Triton's build: build -> " in done.json["error"]["why"]
    assert not (tmp_path / "target").exists()


def test_diff_names_the_part_of_the_key(cache: Path, archive: Path, tmp_path: Path) -> None:
    assert kernels("diff", archive, archive).out == "They are equal.\n"
    other = tmp_path / "other"
    made.make(other, "add", arch=100)
    kernels("pack", tmp_path / "b", "--cache", other)
    done = kernels("diff", archive, tmp_path / "b", "--json")
    assert done.code == 3
    told = {
        each["what"].partition(" ")[0]: each["right"] for each in done.json["differences"] if each["left"] == "kept"
    }
    assert told["model:scale"] == "(absent): no kernel of this function is kept"
    assert told["model:add"].startswith("(absent): GPU architecture: 100 -> 90")


def test_coverage_of_an_archive_and_of_the_last_start(cache: Path, archive: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    done = kernels("coverage", archive, "--json")
    assert (done.code, done.json["missed"]) == (3, 2)  # by another Triton
    assert kernels("coverage", "--json").json["error"]["kind"] == "UsageError"
    folder = store.new_start()
    parts = {"function": "model:add", "arch": 100, "version": "3.9.0", "env": {}, "options": {}}
    lines = [vars(coverage.Record("K" * 52, "add", False, 12.5, "model:add", parts))]
    (folder / "1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"key": "cut o')
    done = kernels("coverage", "--json")
    assert (done.code, done.json["missed"], done.json["compile_s"]) == (0, 1, 0.0125)
    assert done.json["kernels"] == [{"kernel": "add", "why": "no kernel of this function is kept"}]


def test_prune(cache: Path, tmp_path: Path) -> None:
    old = made.make(cache, "old", version="3.5.0")
    damaged = made.make(cache, "damaged")
    fresh = made.make(cache, "fresh", version="3.5.0")
    (damaged / "damaged.cubin").write_bytes(b"")
    for folder in cache.iterdir():
        for path in [*folder.iterdir(), folder]:
            if folder != fresh:
                os.utime(path, (1_000_000_000, 1_000_000_000))
    broken = store.folder() / "x.90.ferkernels"
    broken.parent.mkdir(parents=True, mode=0o700)
    broken.write_bytes(b"broken")
    planned = kernels("prune", "--keep-version", "3.9.0", "--dry-run", "--json").json["removed"]
    assert {Path(each["path"]) for each in planned} == {old, damaged, broken}
    assert old.exists() and broken.exists()
    assert kernels("prune", "--keep-version", "3.9.0").code == 0
    assert not old.exists() and not damaged.exists() and not broken.exists()
    assert fresh.exists()  # too young: somebody may be writing it
    assert len(list(entry.entries_in(str(cache)))) == 3
    record = vars(coverage.Record(made.key_of("add90"), "add", True, 1.0))
    (store.new_start() / "1.jsonl").write_text(json.dumps(record) + "\n")
    kernels("prune", "--older-than", "1", "--max-size", "0")
    assert {each.name for each in entry.entries_in(str(cache))} == {made.key_of("add90"), fresh.name}


def test_mistakes_are_named(archive: Path) -> None:
    assert kernels("pack", archive, "--component", "nonsense").code == 2
    assert kernels("prune", "--max-size", "much").code == 2
    assert kernels("unpack", f"{archive}@sha256:12", "--no-compare").code == 2
