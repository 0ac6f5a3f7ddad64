"""Which torch ``scripts/install`` asks pip for; the interpreter it calls only writes down what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import ROOT, WAIT_S

pytestmark = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="with a GPU the CUDA build is what is wanted")

PYTHON = """#!/usr/bin/env bash
echo "$@" >>asked
case "$*" in *+cpu) exit {cpu};; esac
"""


def install(folder: Path, *, has_cpu_build: bool, **environment: str) -> tuple[list[str], str]:
    """What pip was asked to install of torch, and what a person was told."""
    (folder / "scripts").mkdir()
    (folder / ".venv/bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/install", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = folder / ".venv/bin/python"
    python.write_text(PYTHON.format(cpu=0 if has_cpu_build else 1))
    python.chmod(0o755)
    env = {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run(
        [folder / "scripts/install"], env=env, capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    assert done.stdout == f"{python}\n"
    asked = (folder / "asked").read_text().splitlines()
    return [line.partition("bar off ")[2] for line in asked if "torch" in line], done.stderr


def test_the_cpu_build_is_taken_where_pip_finds_one(tmp_path: Path) -> None:
    asked, told = install(tmp_path, has_cpu_build=True)
    assert asked == ["torch==2.13.0+cpu"]
    assert "FER_TORCH_INDEX" not in told


def test_else_the_default_build_and_a_hint(tmp_path: Path) -> None:
    asked, told = install(tmp_path, has_cpu_build=False)
    assert asked == ["torch==2.13.0+cpu", "torch==2.13.0"]
    assert "FER_TORCH_INDEX" in told


def test_an_index_that_is_named_is_used(tmp_path: Path) -> None:
    asked, told = install(tmp_path, has_cpu_build=False, FER_TORCH_INDEX="file:///wheels")
    assert asked == ["--index-url file:///wheels torch==2.13.0"]
    assert "FER_TORCH_INDEX" not in told
