"""A model that two ranks share, behind ``fer serve`` and a launcher: answers outlive either rank, bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fer.engines.transformers import TransformersEngine
from fer.weights.client import KeeperClient
from tests.support import engine_models, serve_models
from tests.support.descriptors import open_descriptors
from tests.support.launcher import Launcher
from tests.support.processes import Children, kill_and_wait, with_variable
from tests.support.serving_tp import LIMIT_S, TensorParallel

pytestmark = pytest.mark.timeout(240)
PROMPT, COUNT = "Once upon a time", 100
HERE = ("--device", "cpu", "--max-length", "128", "--batch-sizes", "1,2")


def listening(pid: int) -> set[str]:
    """Local addresses, as the kernel writes them, that a process listens at by TCP."""
    mine = {str(what) for what in open_descriptors(pid).values()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and any(f"socket:[{fields[9]}]" in what for what in mine):
                found.add(fields[1].partition(":")[0])
    return found


def test_answers_outlive_either_rank(children: Children, tmp_path: Path, runtime_dir: Path) -> None:
    folder = serve_models.add_tokenizer(
        engine_models.qwen3(tmp_path / "tiny", seed=3, dtype="float32", eos_token_id=None)
    )
    launcher = Launcher(children, imports=())
    service = TensorParallel(children, folder, tmp_path / "serve.log", *HERE, "--standbys", "1")
    alone = TransformersEngine(folder, max_length=128, batch_sizes=(1, 2))
    alone.adopt(alone.load())
    alone.load_tokenizer()
    whole = alone.tokenizer.decode(alone.generate(PROMPT, COUNT), skip_special_tokens=True)

    service.whole(2)
    assert service.how() == {"launcher"}
    assert service.complete(PROMPT, COUNT).text == whole
    for number, rank in enumerate((1, 0), 1):
        before = service.ranks()
        assert set.union(*map(listening, before)) == {"0100007F"}, "127.0.0.1 and nothing else"
        stream = service.stream(PROMPT, COUNT).read(15)
        kill_and_wait(before[rank])
        assert stream.rest().text == whole, f"rank {rank} was killed"
        status = service.whole(2, number)
        assert status["last_outage"]["path"] == "standby" and not {*before} & {*service.ranks()}
        recovery = [member["recovery"]["stages"]["weights"]["path"] for member in status["members"]]
        assert recovery.count("attached") >= 1
        with KeeperClient.connect(label="test") as client:
            found = client.status()
            assert [[p.pid for p in held.processes] for held in found.services] == [service.ranks()]
            assert len(found.editions) == 2, "one of each rank, however many engines there were"
    assert service.status()["requests"]["differed"] == 0
    assert service.end() == 0, service.log.read_text()

    refused = serve_models.add_tokenizer(engine_models.llama(tmp_path / "tied", tied=True))
    service = TensorParallel(children, refused, tmp_path / "tied.log", *HERE)
    assert service.process.wait(LIMIT_S) == 2
    assert "embeddings are tied" in (tmp_path / "tied.log").read_text()

    with KeeperClient.connect(label="test") as client:
        found = client.status()
        assert found.services == [] and not any(edition.holders for edition in found.editions)
        keeper = found.pid
    left = {*with_variable("FER_RUNTIME_DIR", os.environ["FER_RUNTIME_DIR"])} - {launcher.pid, keeper}
    assert all("fer.weights.keeper" in Path(f"/proc/{pid}/cmdline").read_text() for pid in left), "the minder"
    assert not list(runtime_dir.glob("serve-*"))
