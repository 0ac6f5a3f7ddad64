"""What an archive is compared with before it is used, and what differs is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fer.errors import ArchiveError
from fer.kernels import compat, pack, unpack
from fer.kernels.compat import Live
from fer.kernels.unpack import Terms
from tests.support import kernel_entries as made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return made.three(tmp_path / "cache")


@pytest.fixture
def archive(cache: Path, tmp_path: Path) -> Path:
    return made.packed(cache, tmp_path / "a.ferkernels")


# -- compatibility


def here(**changed: Any) -> Live:
    target = {"version": "3.9.0", "triton": "build", "env": made.ENV}
    facts: dict[str, Any] = {"target": target, "compilers": {90: "release 12.8, V12.8.93"}, "archs": (90,)}
    return Live(**(facts | changed))


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, ""),
        ({"target": {"version": "3.8.0"}}, "Triton's version: 3.9.0 -> 3.8.0"),
        ({"target": {"triton": "other"}}, "Triton's build: build -> other"),
        ({"target": {"env": {}}}, "TRITON_DEFAULT_FP_FUSION: 1 -> unset"),
        ({"target": {"env": {"TRITON_DEFAULT_FP_FUSION": "0"}}}, "TRITON_DEFAULT_FP_FUSION: 1 -> 0"),
        ({"compilers": {90: "release 13.4, V13.4.59"}}, "ptxas: V12.8.93 -> V13.4.59"),
        ({"archs": (100,)}, "GPU architecture: 90 -> 100"),
        ({"archs": None}, ""),
        ({"target": {}}, ""),
    ],
)
def test_what_differs_is_named(
    archive: Path, tmp_path: Path, changed: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    outcome = unpack.unpack(archive, made.places(tmp_path / "target"), Terms(here=here(**changed)))
    assert set(outcome.skipped.values()) == ({told} if told else set())
    assert len(outcome.restored) == (0 if told else 3)


def test_another_architecture_is_skipped_and_the_rest_kept(cache: Path, tmp_path: Path) -> None:
    """K18."""
    other = made.make(cache, "add", arch=100)
    pack.pack({"triton": cache}, tmp_path / "a")
    outcome = unpack.unpack(tmp_path / "a", made.places(tmp_path / "target"), Terms(here=here()))
    assert list(outcome.skipped) == [other.name]
    assert len(outcome.restored) == 3


def test_an_older_driver_tries_one_kernel(archive: Path, tmp_path: Path) -> None:
    """K18: the archive's compiler is newer than what the driver says it runs."""
    asked: list[bytes] = []

    def trial(data: bytes) -> str:
        asked.append(data)
        return "cuLibraryLoadData returned 222" if len(asked) > 1 else ""

    old = here(cuda=(12, 6))
    outcome = unpack.unpack(archive, made.places(tmp_path / "one"), Terms(here=old, trial=trial))
    assert (len(asked), len(outcome.restored)) == (1, 3)
    assert "12.6" in outcome.notes[0]
    with pytest.raises(ArchiveError, match="222"):
        unpack.unpack(archive, made.places(tmp_path / "two"), Terms(here=old, trial=trial))
    assert not list((tmp_path / "two").glob("*"))
    unpack.unpack(archive, made.places(tmp_path / "three"), Terms(here=here(cuda=(12, 8)), trial=trial))
    assert len(asked) == 2


def test_soft_facts_are_told_only(archive: Path, tmp_path: Path) -> None:
    made.with_manifest(archive, lambda data: data.update(soft={"gpu": ["H100"], "driver": "550"}))
    outcome = unpack.unpack(
        archive, made.places(tmp_path / "target"), Terms(here=here(soft={"gpu": ["H200"], "driver": "550"}))
    )
    assert outcome.notes == ["gpu: H100 -> H200"]
    assert len(outcome.restored) == 3


HOST = {
    "extension": ".cpython-311-x86_64-linux-gnu.so",
    "machine": "x86_64",
    "glibc": "2.31",
    "cuda_runtime": "12.8",
    "packages": "/opt/packages",
    "libcuda": ["/usr/lib"],
}


@pytest.mark.parametrize(
    ("field", "value", "fits"),
    [
        ("glibc", "2.39", True),
        ("glibc", "2.17", False),
        ("glibc", "", False),
        ("extension", ".cpython-312-x86_64-linux-gnu.so", False),
        ("machine", "aarch64", False),
        ("packages", "/other/packages", False),
        ("libcuda", ["/other"], False),
        ("cuda_runtime", "13.0", False),
    ],
)
def test_code_of_another_host_is_skipped_and_kernels_are_not(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any, fits: bool
) -> None:
    """K7."""
    library = made.library(cache)
    monkeypatch.setattr(compat, "host_facts", lambda: HOST)
    pack.pack({"triton": cache}, tmp_path / "a")
    live = here(host=HOST | {field: value})
    outcome = unpack.unpack(tmp_path / "a", made.places(tmp_path / "target"), Terms(code="take", here=live))
    assert (library.parent.name in outcome.skipped) is not fits
    if not fits:
        assert field in outcome.skipped[library.parent.name]
    assert len([path for path in outcome.restored if path != library.parent.name]) == 3


def test_an_unknown_fact_about_the_host_differs() -> None:
    assert compat.host_changes({}, {"glibc": "2.31"})
    assert compat.host_changes({"glibc": "2.31"}, {})
    assert not compat.host_changes(HOST, HOST)


def test_places_of_people_are_no_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """K10: another home, cache folder, temporary folder or working directory changes nothing."""
    before = compat.host_facts()
    for name in ("HOME", "XDG_CACHE_HOME", "TMPDIR", "PWD"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    assert compat.host_facts() == before


def test_a_toolkit_is_one_however_it_is_spelled(tmp_path: Path) -> None:
    """K11."""
    real = tmp_path / "cuda-13.0"
    (real / "bin").mkdir(parents=True)
    nvcc = real / "bin" / "nvcc"
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o755)
    (tmp_path / "cuda").symlink_to(real)
    spelled = [compat.toolkit({"CUDA_HOME": str(path)}) for path in (real, tmp_path / "cuda", tmp_path / "cuda" / ".")]
    assert spelled == [{"home": str(real), "nvcc": "release 13.0"}] * 3
    assert compat.toolkit({"CUDA_HOME": str(tmp_path / "none")}) == {"home": "", "nvcc": ""}


def test_a_triton_that_cannot_be_imported_leaves_its_version_to_compare(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that was installed for another C library."""

    def asked() -> dict[str, Any]:
        raise ImportError("libtriton.so: version `GLIBC_2.99' not found")

    monkeypatch.setattr(compat, "_asked", asked)
    monkeypatch.setattr(compat, "_version", lambda name: "3.9.0")
    found = compat.live(ask_triton=True, host=False, home=tmp_path)
    assert (found.target, found.compilers) == ({"version": "3.9.0"}, {})
    assert "GLIBC_2.99" in caplog.text
    assert len(unpack.unpack(archive, made.places(tmp_path / "target"), Terms(here=found)).restored) == 3


def test_code_of_the_host_meets_no_unknown_fact() -> None:
    known = {"machine": "x86_64", "packages": "/usr/lib"}
    assert compat.host_changes(known, known) == []
    assert compat.host_changes({**known, "machine": compat.UNKNOWN}, {**known, "machine": compat.UNKNOWN})
    assert compat.host_changes({**known, "extension": "a"}, known) == ["extension: a -> (unknown)"]
