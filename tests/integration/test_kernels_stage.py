"""The kernels stage over several starts, each a process of its own: compiled once, then found, wherever it lies."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fer.kernels import coverage, store, unpack
from fer.kernels.manager import SPEC
from tests.support import kernel_entries as made
from tests.support.processes import ROOT, WAIT_S

pytest.importorskip("triton")
BLOCKS = [128, 256]

Start = Callable[..., dict[str, Any]]


def started(tmp_path: Path, cache: str, environ: dict[str, str] | None, request: dict[str, Any]) -> dict[str, Any]:
    """One start in a process of its own; its cache is a folder below the test's."""
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / cache), **(environ or {})}
    variables = {name: value for name, value in variables.items() if value}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels_child", json.dumps(request)],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S * 4,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return {**answer, "err": done.stderr}


FIRST = {"blocks": [128]}


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The start that most tests begin with, done once: what it answered, its home and its cache."""
    place = tmp_path_factory.mktemp("first")
    return started(place, "cache", {"FER_HOME": str(place / "home")}, FIRST), place


@pytest.fixture
def start(tmp_path: Path, first_start: tuple[dict[str, Any], Path]) -> Start:
    """Runs one start; its cache is ``cache`` below the test's folder unless it says otherwise."""

    def run(cache: str = "cache", environ: dict[str, str] | None = None, **request: Any) -> dict[str, Any]:
        home = Path(os.environ["FER_HOME"])
        if request == FIRST and not environ and not home.exists() and not (tmp_path / cache).exists():
            answer, place = first_start
            shutil.copytree(place / "home", home)
            shutil.copytree(place / "cache", tmp_path / cache)
            return {**answer, "details": dict(answer["details"])}
        return started(tmp_path, cache, environ, request)

    return run


def test_a_second_start_in_another_place_compiles_nothing(start: Start, tmp_path: Path) -> None:
    first = start(blocks=BLOCKS)
    assert (first["hits"], first["compiled"], first["path"]) == (0, 2, "loaded")
    assert first["details"]["compiled"] == 2
    assert "no kernel of this function is kept" in first["why"]
    (folder,) = store.starts()
    records = coverage.read(folder)
    assert [(record.name, record.hit) for record in records] == [("add", False)] * 2
    assert all(record.ms > 0 and record.parts["arch"] == 90 for record in records)
    (archive,) = store.archives()
    assert archive.name.endswith(".90.ferkernels")
    assert oct(archive.parent.stat().st_mode)[-3:] == "700"

    second = start("elsewhere", blocks=BLOCKS)
    assert (second["hits"], second["compiled"], second["path"]) == (2, 0, "restored")
    assert second["binaries"] == first["binaries"]
    assert not second["imported"]  # the stage itself needs no Triton
    assert second["details"] | {"record": ""} == {
        **dict.fromkeys(("kept", "restored", "hits"), 2),
        "compiled": 0,
        "compile_s": 0.0,
        "record": "",
    }

    stamp = archive.stat()
    third = start("elsewhere", blocks=BLOCKS)
    assert (third["details"]["restored"], third["details"]["kept"], third["hits"]) == (0, 2, 2)
    assert archive.stat().st_mtime_ns == stamp.st_mtime_ns  # nothing new, nothing written


def test_what_is_new_is_added_and_the_reason_is_told(start: Start) -> None:
    start(blocks=[128])
    second = start("elsewhere", blocks=BLOCKS)
    assert (second["hits"], second["compiled"]) == (1, 1)
    assert "add compiled: constants: " in second["why"]
    (archive,) = store.archives()
    assert len(unpack.peek(archive)[0].entries) == 2
    assert start("third", blocks=BLOCKS)["compiled"] == 0


def test_a_start_that_compiles_nothing_leaves_nothing(start: Start, tmp_path: Path) -> None:
    answer = start()
    assert (answer["path"], answer["why"]) == ("loaded", "no kernel was asked for")
    assert not answer["imported"]
    assert answer["manager"] == SPEC
    assert not store.archives()
    assert not list((tmp_path / "cache").iterdir())


def test_off_leaves_the_environment_alone(start: Start, tmp_path: Path) -> None:
    for options in ({"kernels": False}, {"mode": "off"}):
        answer = start(options=options)
        assert (answer["path"], answer["manager"]) == ("off", None)
    assert not (tmp_path / "cache").exists()


def test_a_users_manager_is_asked_after_ours(start: Start, tmp_path: Path) -> None:
    start(blocks=[128])
    theirs = {
        "TRITON_CACHE_MANAGER": "tests.support.kernels_managers:Shared",
        "TEST_MANAGER_FOLDER": str(tmp_path / "theirs"),
    }
    answer = start("elsewhere", environ=theirs, blocks=BLOCKS)
    assert (answer["details"]["restored"], answer["hits"], answer["compiled"]) == (1, 1, 1)
    assert answer["manager"] == SPEC
    assert "kernels_managers:Shared is asked where FER's cache has nothing" in answer["why"]
    assert len(list((tmp_path / "theirs").glob("*/__grp__*"))) == 1  # what was compiled
    fallen = start("third", environ=theirs | {"TRITON_CACHE_MANAGER": "no.such:Manager"}, blocks=BLOCKS)
    assert (fallen["hits"], fallen["compiled"]) == (2, 0)
    assert "no.such:Manager failed and is left out" in fallen["why"]


def test_a_broken_archive_costs_no_more_than_compiling(start: Start) -> None:
    first = start(blocks=[128])
    (archive,) = store.archives()
    sound = archive.read_bytes()
    flipped = bytearray(sound)
    flipped[len(sound) // 2] ^= 1
    for number, data in enumerate((sound[: len(sound) // 2], bytes(flipped), b"something else")):
        archive.write_bytes(data)
        answer = start(f"elsewhere{number}", blocks=[128])
        assert (answer["hits"], answer["compiled"]) == (0, 1)
        assert answer["binaries"] == first["binaries"]
        assert str(archive) in answer["why"]
        assert len(unpack.verify(archive).entries) == 1  # replaced by a sound one


def test_an_archive_of_another_triton_is_a_miss_that_says_so(start: Start) -> None:
    start(blocks=[128])
    (archive,) = store.archives()
    made.with_manifest(archive, lambda data: data["targets"][0].update(version="3.5.0"))
    answer = start("elsewhere", blocks=[128])
    assert answer["compiled"] == 1
    assert "Triton's version: 3.5.0 -> " in answer["why"]


def test_every_moved_line_is_told(start: Start, tmp_path: Path) -> None:
    """K17: a blank line above the kernel is another key to Triton."""
    package = tmp_path / "lib" / "tests" / "support"
    package.mkdir(parents=True)
    for name in ("__init__.py", "../__init__.py"):
        (package / name).write_text("")
    for name in ("kernels.py", "kernels_child.py"):
        (package / name).write_text((ROOT / "tests" / "support" / name).read_text())
    code = "import sys, json; sys.path.insert(0, sys.argv[1]); from tests.support import kernels_child as child\n"
    code += "print(json.dumps(child.main({'blocks': [128]})))"

    def run(cache: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, str(package.parent.parent)],
            cwd=tmp_path,
            env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path / cache), "PYTHONPATH": os.pathsep.join(sys.path[1:])},
            capture_output=True,
            text=True,
            timeout=WAIT_S * 4,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    assert run("a")["compiled"] == 1
    source = (package / "kernels.py").read_text()
    (package / "kernels.py").write_text(source.replace("@triton.jit\ndef add", "\n@triton.jit\ndef add"))
    line = source[: source.index("@triton.jit\ndef add")].count("\n") + 2
    answer = run("b")
    assert answer["compiled"] == 1
    assert f"source/line changed: kernels.py:{line}: line {line - 1} -> line {line}" in answer["why"]


def test_a_variable_that_is_part_of_the_key_is_told(start: Start) -> None:
    start(blocks=[128])
    answer = start("elsewhere", blocks=[128], environ={"TRITON_F32_DEFAULT": "ieee"})
    assert answer["compiled"] == 1
    assert "TRITON_F32_DEFAULT: unset -> ieee" in answer["why"]
    zero = start("third", blocks=[128], environ={"DISABLE_PTXAS_OPT": "0"})
    assert "DISABLE_PTXAS_OPT: unset -> " in zero["why"]


def test_kernels_are_prepared_from_what_was_recorded(start: Start) -> None:
    """Warm: the second start has them in memory before the first call, from the cache."""
    first = start(blocks=BLOCKS, jit=True)
    assert first["compiled"] == 2
    (archive,) = store.archives()
    manifest = unpack.peek(archive)[0]
    assert all(each.parts.get("specialization") for each in manifest.entries)
    second = start("elsewhere", blocks=BLOCKS, jit=True, warm=True)
    assert (second["hits"], second["compiled"]) == (2, 0)  # by the preparation; the calls asked nobody
    assert second["binaries"] == first["binaries"]


def test_two_architectures_have_an_archive_each(start: Start) -> None:
    start(blocks=[128])
    start(blocks=[128], arch=100)
    assert sorted(path.name.split(".")[1] for path in store.archives()) == ["100", "90"]
    for path in store.archives():
        manifest = unpack.verify(path)
        assert {manifest.parts_of(each)["arch"] for each in manifest.entries} == {int(path.name.split(".")[1])}


def test_a_killed_writer_leaves_the_archive_as_it_was(start: Start, tmp_path: Path) -> None:
    start(blocks=[128])
    (archive,) = store.archives()
    before = archive.read_bytes()
    request = {"root": str(tmp_path / "cache"), "out": str(archive), "keys": [], "arch": 90}
    made.make(tmp_path / "cache", "other")
    request["keys"] = [made.key_of("other90")]
    code = (
        "import os, sys, signal, json; from fer.kernels import container, writer\n"
        "container._member = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('begun', flush=True); writer.write(writer.Request(**json.loads(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(request)], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout) == (-9, "begun\n")
    assert archive.read_bytes() == before
    assert start("cache", blocks=[256])["compiled"] == 1  # the next writer is not in the way of the dead one's lock
    assert len(unpack.verify(archive).entries) >= 2


def test_a_cache_that_others_can_write_to_is_told(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    answer = start()
    assert "everybody can write to" in answer["why"]
    assert answer["cache"] == str(tmp_path / "cache")


def test_a_disk_that_is_full_costs_no_archive(start: Start, tmp_path: Path) -> None:
    """The archive is sound; it is the cache that takes nothing."""
    start(blocks=[128])
    (archive,) = store.archives()
    (key,) = (each.path for each in unpack.peek(archive)[0].entries)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / key).symlink_to(tmp_path / "nowhere" / "at" / "all")
    answer = start("elsewhere", blocks=[256])
    assert "cannot be unpacked" in answer["why"]
    assert len(unpack.verify(archive).entries) == 2


def test_a_closed_home_stops_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = start(blocks=[128], environ={"FER_HOME": str(tmp_path / "file")})
    assert answer["compiled"] == 1
    assert "not recorded" in answer["why"]


def test_other_caches_come_back_too(start: Start, tmp_path: Path) -> None:
    """What an engine adds to DeepGEMM's cache during a start is written back and restored with the kernels."""
    old = tmp_path / "dg" / "cache" / "kernel.old.aa"
    old.mkdir(parents=True)
    (old / "kernel.cubin").write_bytes(made.binary())
    (old / "kernel.cu").write_text("source")
    for path in (*old.iterdir(), old):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    start(blocks=[128], deep_gemm="kernel.gemm.ab", environ={"SGLANG_DG_CACHE_DIR": str(tmp_path / "dg")})
    (archive,) = store.archives()
    found = [(each.component, each.path) for each in unpack.verify(archive).entries if each.component != "triton"]
    assert found == [("deepgemm", "cache/kernel.gemm.ab")]  # what was there before is another engine's
    second = start("elsewhere", blocks=[128], environ={"SGLANG_DG_CACHE_DIR": str(tmp_path / "dg2")})
    assert second["details"]["restored"] == 2
    assert (tmp_path / "dg2" / "cache" / "kernel.gemm.ab" / "kernel.cubin").read_bytes() == made.binary()


def test_a_source_is_restored_where_nothing_is_kept(start: Start, tmp_path: Path) -> None:
    start(blocks=[128])
    (archive,) = store.archives()
    source = archive.rename(tmp_path / "published.ferkernels")
    answer = start("elsewhere", blocks=[128], options={"kernels_source": str(source)})
    assert (answer["hits"], answer["compiled"], answer["path"]) == (1, 0, "restored")
    missing = start("third", blocks=[128], options={"kernels_source": f"{source}@sha256:{'0' * 64}"}, model="other")
    assert missing["compiled"] == 1
    assert "not what it must be" in missing["why"]


def test_processes_that_an_engine_spawns_are_recorded(tmp_path: Path) -> None:
    """They have the variables and nothing else of FER; the very first lookup counts too, since it is to be kept."""
    records = store.new_start()
    code = "import sys; from tests.support import kernels\nfor block in (128, 256): kernels.compile_add(block)\n"
    variables = {
        "TRITON_CACHE_MANAGER": SPEC,
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        coverage.VARIABLE: str(records),
    }
    for expected in (False, True):
        for path in records.iterdir():
            path.unlink()
        command = [sys.executable, "-c", code]
        environ = {**os.environ, **variables}
        subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True, timeout=WAIT_S * 2)
        found = coverage.read(records)
        assert [(record.name, record.hit) for record in found] == [("add", expected)] * 2
        assert {record.key for record in found} == {path.name for path in (tmp_path / "cache").iterdir()}
