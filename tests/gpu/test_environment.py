"""Stamps of a real GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from fer.environment import environment
from fer.fingerprint import Fingerprint

ROOT = Path(__file__).parents[2]


def test_every_stamp_of_a_gpu_is_found() -> None:
    found = Fingerprint(environment("cuda:0"), {})
    assert found.unknown == []
    major, minor = torch.cuda.get_device_capability(0)
    assert found.group["gpu"] == torch.cuda.get_device_name(0)
    assert found.group["compute_capability"] == f"{major}.{minor}"
    assert found.group["cuda"] == torch.version.cuda
    assert re.fullmatch(r"\d+(\.\d+)+", found.group["driver"])


def test_another_process_finds_the_same_stamps() -> None:
    code = (
        "import sys; from fer.fingerprint import *;"
        "sys.stdout.buffer.write(Fingerprint(environment('cuda'), {}).to_json())"
    )
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, timeout=110, check=True, cwd=ROOT).stdout
    assert found == Fingerprint(environment("cuda:0"), {}).to_json()
