"""``fer serve`` on a GPU: engines die, standbys take over, and clients get the answers they get undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fer.cudagraph import store
from fer.weights.client import KeeperClient
from tests.support import engine_models, serve_models
from tests.support.descriptors import open_descriptors
from tests.support.keeper import read_line, wait_until
from tests.support.launcher import Launcher
from tests.support.memory_gpu import free_bytes, wait_for_free
from tests.support.processes import Children, kill_and_wait, with_variable
from tests.support.serving import Service

pytestmark = pytest.mark.timeout(600)

COUNT, LIMIT_S = 600, 120.0  # tokens: a small model is fast, and something has to happen in the middle
PROMPT = "w5 w7 w11"
DEFAULT_IMPORTS = ("torch", "transformers.models.llama.modeling_llama", "fer.engines.transformers", "fer.standby.duty")


class Served(Service):
    """The command itself, with an engine on the first GPU."""

    def __init__(self, children: Children, folder: Path, log: Path, *more: str) -> None:
        self.log = log
        command = [sys.executable, "-m", "fer", "serve", "--model", folder, "--name", "tiny", "--port", "0"]
        command += [
            "--device",
            "cuda:0",
            "--dtype",
            "bfloat16",
            "--max-length",
            "4096",
            "--batch-sizes",
            "1,2,4",
            *more,
        ]
        with log.open("wb") as file:
            self.process = children.spawn(command, stderr=file)
        self.address = read_line(self.process.stdout, LIMIT_S)

    def ready(self, engines: int) -> dict[str, Any]:
        """Wait until so many engines have recovered, one of them active."""

        def holds() -> bool:
            roles = [member["role"] for member in self.status()["members"]]
            return "active" in roles and sum(role in ("active", "standby") for role in roles) == engines

        wait_until(holds, f"{engines} engines: {self.log.read_text()[-3000:]}", LIMIT_S)
        return self.status()

    def path(self, stage: str) -> str:
        """Which path a stage of the active engine's start took."""
        active = next(member for member in self.status()["members"] if member["role"] == "active")
        return str(active["recovery"]["stages"][stage]["path"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = engine_models.llama(tmp_path / "tiny", seed=3, eos_token_id=None, max_position_embeddings=4096)
    return serve_models.add_words(made)


def proven(children: Children, folder: Path, log: Path, *more: str) -> str:
    """The first start: weights are published, graphs saved and proven; the undisturbed answer."""
    served = Served(children, folder, log, "--launcher", "off", *more)
    served.ready(1)
    answer = served.stream(PROMPT, COUNT).rest().text
    wait_until(
        lambda: bool(store.find()) and store.look(store.find()[0]).proof.startswith(("proven", "failed")),
        "the proof ends",
        LIMIT_S,
    )
    assert store.look(store.find()[0]).proof == "proven", store.look(store.find()[0])
    assert served.end() == 0
    return answer


def test_engines_die_and_every_answer_is_the_same(
    children: Children, folder: Path, runtime_dir: Path, tmp_path: Path, warm_gpu: None
) -> None:
    free = free_bytes()
    answer = proven(children, folder, tmp_path / "first.log")
    launcher = Launcher(children, imports=DEFAULT_IMPORTS)
    alone(children, folder, tmp_path / "alone.log", answer)

    served = Served(children, folder, tmp_path / "serve.log", "--standbys", "1")
    served.ready(2)
    assert (served.path("weights"), served.path("cudagraph")) == ("attached", "restored"), served.status()
    for disturb in ("engine", "keeper", "both", "launcher", "engine"):
        status = served.ready(2)
        stream = served.stream(PROMPT, COUNT).read(5)
        if disturb == "keeper":
            with KeeperClient.connect(runtime_dir) as client:
                kill_and_wait(client.status().pid)
        if disturb == "launcher":
            children.kill(launcher.process)
        if disturb == "both":
            for pid in [int(process["pid"]) for member in status["members"] for process in member["processes"]]:
                kill_and_wait(pid)
        else:
            served.kill_worker()
        assert stream.rest().text == answer, (disturb, served.log.read_text()[-3000:])
        if disturb != "both":
            status = served.until_status("a standby took over", _by_standby)
            assert status["last_outage"]["kept_rows"] > 0, "it goes on with the cache of the one before"

    assert served.status()["requests"]["resumed"] >= 4, "answers were in the middle"

    served.ready(2)
    stream = served.stream(PROMPT, COUNT).read(5)
    switch = subprocess.run([sys.executable, "-m", "fer", "switch"], capture_output=True, text=True, timeout=LIMIT_S)
    assert switch.returncode == 0, switch.stderr
    assert stream.rest().text == answer
    assert served.status()["switches"] == 1

    served.ready(2)
    assert served.end() == 0
    assert not [pid for pid in with_variable("FER_RUNTIME_DIR", os.environ["FER_RUNTIME_DIR"]) if _is_worker(pid)]
    with KeeperClient.connect(runtime_dir) as client:
        client.stop(force=True)
    wait_for_free(free)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_an_engine_on_another_gpu_than_the_first(
    children: Children, folder: Path, runtime_dir: Path, tmp_path: Path, warm_gpu: None
) -> None:
    second = ("--device", "cuda:1")
    answer = proven(children, folder, tmp_path / "first.log", *second)
    Launcher(children, imports=DEFAULT_IMPORTS)
    served = Served(children, folder, tmp_path / "serve.log", *second)
    for _ in range(2):
        served.ready(1)
        waiting(served)
        assert (served.path("weights"), served.path("cudagraph")) == ("attached", "restored"), served.status()
        stream = served.stream(PROMPT, COUNT).read(5)
        served.kill_worker()
        assert stream.rest().text == answer
        assert served.stream(PROMPT, COUNT).rest().text == answer, "a prompt of its own"
    assert served.end() == 0
    with KeeperClient.connect(runtime_dir) as client:
        client.stop(force=True)


def alone(children: Children, folder: Path, log: Path, answer: str) -> None:
    """One engine without a standby, which the launcher forks again; then a spare is its successor."""
    served = Served(children, folder, log)
    for spared in (False, True, True):
        status = served.ready(1)
        spare = waiting(served) if spared else 0
        assert [process["via"] for process in status["members"][0]["processes"]] == ["launcher"], log.read_text()
        assert (served.path("weights"), served.path("cudagraph")) == ("attached", "restored"), status
        stream = served.stream(PROMPT, COUNT).read(5)
        served.kill_worker()
        assert stream.rest().text == answer
        if spared:
            status = served.until_status("it serves again", lambda status: status["state"] == "active")
            assert status["pid"] == spare and status["last_outage"]["kept_rows"] > 0, log.read_text()[-3000:]
    assert served.end() == 0


def waiting(served: Served) -> int:
    """The pid of a spare that has the driver's library, and no device."""

    def spare() -> int:
        return int(served.status()["members"][0]["spare"] or 0)

    def has_driver() -> bool:
        return bool(spare()) and "libcuda.so" in Path(f"/proc/{spare()}/maps").read_text()

    wait_until(has_driver, f"a spare waits: {served.log.read_text()[-3000:]}", LIMIT_S)
    opened = open_descriptors(spare()).values()
    assert not [path for path in opened if path.startswith("/dev/nvidia")], "what opens a device holds on to it"
    return spare()


def _by_standby(status: dict[str, Any]) -> bool:
    return status["last_outage"] is not None and status["last_outage"]["path"] == "standby"


def _is_worker(pid: int) -> bool:
    try:
        return b"fer.standby.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
