"""Two GPUs, a rank on each, behind ``fer serve``: either rank dies, and clients get what they get undisturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fer.weights.client import KeeperClient
from tests.support import engine_models, serve_models
from tests.support.keeper import wait_until
from tests.support.processes import ROOT, Children, halt, kill_and_wait, with_variable
from tests.support.serving_tp import TensorParallel

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed, a rank on each"),
]
COUNT = 1500  # tokens: a small model is fast, and something has to happen in the middle
PROMPT = "w5 w7 w11"
HERE = ("--dtype", "bfloat16", "--max-length", "4096", "--batch-sizes", "1,2,4")

FAILING = """
import os, sys, torch
from pathlib import Path
from fer.cudagraph.capture import capture
from fer.engines import ranks
from fer.errors import FerError
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
device = f"cuda:{rank}"
launch = ranks.Launch(rank=rank, world=2, store=folder / "store")
os.environ.update(launch.variables(device))
ranks.start(device, launch)
ranks.DISSENT_S = 5.0

class Graphs:
    warm_ups = 2
    at = 0
    def step(self, size):
        self.at += 1
        if rank == 1 and self.at == 2:  # between the other's collective and its own
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        made = torch.ones(size, device=device)
        torch.distributed.all_reduce(made)
        return {"sum": made}

try:
    capture(Graphs(), [4, 2], None, keep=False, agree=lambda flag: ranks.agree(flag, device))
    print("captured", flush=True)
except FerError as error:
    print(type(error).__name__, flush=True)
os._exit(0)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = engine_models.llama(tmp_path / "tiny", seed=3, eos_token_id=None, max_position_embeddings=4096)
    return serve_models.add_words(made)


def free() -> list[int]:
    """Free bytes of both GPUs, as a process of its own sees them: this one must not keep contexts there."""
    code = "import json, torch; print(json.dumps([torch.cuda.mem_get_info(n)[0] for n in range(2)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def test_answers_outlive_either_rank(children: Children, tmp_path: Path, folder: Path) -> None:
    before, shared = free(), {*os.listdir("/dev/shm")}
    service = TensorParallel(children, folder, tmp_path / "serve.log", *HERE, "--standbys", "1")
    service.whole(2)
    answer = service.stream(PROMPT, COUNT).rest().text
    assert answer and service.stream(PROMPT, COUNT).rest().text == answer
    for number, rank in enumerate((1, 0), 1):
        ranks = service.ranks()
        stream = service.stream(PROMPT, COUNT).read(100)
        kill_and_wait(ranks[rank])
        assert stream.rest().text == answer, f"rank {rank} was killed"
        status = service.whole(2, number)
        assert status["last_outage"]["path"] == "standby"
        with KeeperClient.connect(label="test") as client:
            found = client.status()
            assert [[p.pid for p in held.processes] for held in found.services] == [service.ranks()]
            assert len({edition.gpu for edition in found.editions}) == 2, "one on each GPU"
            assert len(found.editions) == 2
    assert service.admin("POST", "/admin/switch").status == 200
    service.whole(2, 2)
    assert service.stream(PROMPT, COUNT).rest().text == answer
    assert service.end() == 0, service.log.read_text()
    with KeeperClient.connect(label="test") as client:
        client.stop(force=True)
    wait_until(lambda: not list(with_variable("FER_RUNTIME_DIR", os.environ["FER_RUNTIME_DIR"])), "all have ended")
    assert {*os.listdir("/dev/shm")} <= shared, "NCCL's shared memory, of ranks that were killed too"
    # A driver may keep a few MiB for processes to come; an engine's context alone would be hundreds.
    assert all(now > then - (64 << 20) for now, then in zip(free(), before, strict=True))


def test_a_rank_that_stands_still_in_a_collective_is_ended(children: Children, tmp_path: Path, folder: Path) -> None:
    service = TensorParallel(children, folder, tmp_path / "serve.log", *HERE, "--stall-s", "5")
    service.whole(1)
    answer = service.stream(PROMPT, COUNT).rest().text
    ranks = service.ranks()
    stream = service.stream(PROMPT, COUNT).read(100)
    halt(ranks[1])
    assert stream.rest().text == answer
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    service.whole(1, 1)
    assert service.end() == 0


def test_lack_of_memory_in_one_ranks_warm_up_leaves_the_other_in_no_step(children: Children, tmp_path: Path) -> None:
    started = [children.spawn([sys.executable, "-c", FAILING, str(rank), str(tmp_path)], cwd=ROOT) for rank in range(2)]
    said = [child.communicate(timeout=240)[0].splitlines()[-1:] for child in started]
    assert said == [["PeerRankFailed"], ["OutOfMemory"]]
