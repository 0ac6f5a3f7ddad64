"""A spare behind ``fer serve`` and a launcher, with a real model: whoever is killed, answers are the model's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fer.engines.transformers import TransformersEngine
from fer.weights.client import KeeperClient
from tests.support import engine_models, serve_models
from tests.support.keeper import wait_until
from tests.support.launcher import Launcher, await_end
from tests.support.processes import Children, kill_and_wait, with_variable
from tests.support.serving import START_S, RealService

pytestmark = pytest.mark.timeout(240)
PROMPT, COUNT = "w5 w7 w11", 100
HERE = ("--device", "cpu", "--max-length", "128", "--batch-sizes", "1,2")


def answer(folder: Path) -> str:
    """The model's own, without a server around it."""
    engine = TransformersEngine(folder, max_length=128, batch_sizes=(1, 2))
    engine.adopt(engine.load())
    engine.load_tokenizer()
    return str(engine.tokenizer.decode(engine.generate(PROMPT, COUNT), skip_special_tokens=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, str]]:
    """Two models of one shape, and their answers."""
    base = tmp_path_factory.mktemp("models")
    folders = [engine_models.llama(base / f"seed{seed}", seed=seed, eos_token_id=None) for seed in (3, 4)]
    found = [(serve_models.add_words(folder), answer(folder)) for folder in folders]
    assert found[0][1] != found[1][1]
    return found


class Spared(RealService):
    """A service beside whose engine a process may wait."""

    @property
    def pid(self) -> int:
        return int(self.status()["pid"] or 0)

    @property
    def spare(self) -> int:
        return int(self.status()["members"][0]["spare"] or 0)

    def waiting(self) -> tuple[int, int]:
        """Pids of the engine and of its spare, once both are there."""

        def there() -> bool:
            return bool(self.pid and self.spare)

        wait_until(there, f"a spare waits: {self.log.read_text()}", START_S)
        return self.pid, self.spare

    def disturbed(self, kill: Callable[[], object]) -> str:
        """An answer in the middle of which something is killed."""
        stream = self.stream(PROMPT, COUNT).read(15)
        kill()
        return stream.rest().text

    def after(self, *pids: int) -> int:
        """The pid of the engine that serves when these do no more."""
        wait_until(lambda: self.pid not in (0, *pids), f"another one serves: {self.log.read_text()}", START_S)
        return self.pid


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, 9)
    for pid in pids:
        kill_and_wait(pid)


def test_answers_outlive_engine_and_spare(
    children: Children, tmp_path: Path, runtime_dir: Path, models: list[tuple[Path, str]]
) -> None:
    (source, whole), (other, others) = models
    folder = shutil.copytree(source, tmp_path / "tiny")
    launcher = Launcher(children, imports=())
    service = Spared(children, folder, tmp_path / "serve.log", *HERE)
    service.until("active")
    assert service.complete(PROMPT, COUNT).text == whole

    engine, spare = service.waiting()
    assert service.disturbed(lambda: kill(engine)) == whole
    assert service.after(engine) == spare, service.log.read_text()
    status = service.status()
    assert (
        status["restarts"] == 1 and status["last_outage"]["path"] == "launcher" and status["requests"]["resumed"] == 1
    )
    assert status["members"][0]["recovery"]["stages"]["weights"]["path"] == "attached"

    engine, spare = service.waiting()
    kill(spare)
    wait_until(lambda: not service.spare, "it is named no more")
    assert service.disturbed(lambda: kill(engine)) == whole
    service.after(engine, spare)

    engine, spare = service.waiting()
    assert service.disturbed(lambda: kill(engine, spare)) == whole
    engine = service.after(engine, spare)
    assert service.disturbed(lambda: kill(engine)) == whole, "whether or not there is a spare again"
    service.after(engine)

    engine, spare = service.waiting()
    content = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(content)
    os.utime(folder / "config.json", (1, 1))
    kill(engine)
    assert service.complete(PROMPT, COUNT).text == whole
    assert service.after(engine) != spare and await_end(spare)

    engine, spare = service.waiting()
    shutil.copy(other / "model.safetensors", folder / "new")
    os.replace(folder / "new", folder / "model.safetensors")
    kill(engine)
    assert service.complete(PROMPT, COUNT).text == others, "the folder's answer, not that of what was there before"
    assert service.after(engine) != spare and await_end(spare)

    engine, spare = service.waiting()
    children.kill(launcher.process)
    assert service.disturbed(lambda: kill(engine)) == others
    assert service.after(engine) == spare, "it outlives its launcher, as engines do"
    assert service.disturbed(lambda: kill(spare)) == others
    service.after(spare)
    assert service.status()["last_outage"]["path"] == "exec" and not service.spare
    assert service.status()["requests"]["differed"] == 0
    assert service.end() == 0, service.log.read_text()
    nothing_is_left(service, runtime_dir)
    assert not list(runtime_dir.glob("serve-*"))


def nothing_is_left(service: Spared, runtime_dir: Path, *but: int) -> None:
    """After the service's end: what is left is the keeper and its minder."""

    def of_keeper(pid: int) -> bool:
        try:
            return "fer.weights.keeper" in Path(f"/proc/{pid}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True  # it has just ended

    def only_the_keeper() -> bool:
        left = {*with_variable("FER_RUNTIME_DIR", os.environ["FER_RUNTIME_DIR"])} - {*but}
        return all(of_keeper(pid) for pid in left)

    wait_until(only_the_keeper, "engine and spare are gone")
    with KeeperClient.connect(label="test") as client:
        wait_until(lambda: client.status().services == [], "the keeper knows of no service")
        assert not any(edition.holders for edition in client.status().editions)


def test_it_ends_with_the_service(
    children: Children, tmp_path: Path, runtime_dir: Path, models: list[tuple[Path, str]]
) -> None:
    (folder, whole), (other, others) = models
    launcher = Launcher(children, imports=())
    shared = {*os.listdir("/dev/shm")}

    service = Spared(children, folder, tmp_path / "first.log", *HERE)
    before = service.waiting()
    assert service.complete(PROMPT, COUNT).text == whole
    assert service.admin("POST", "/admin/update", {"model": str(other)}).status == 200
    assert all(await_end(pid) for pid in before), "the spare of a model that is served no more"
    now = service.waiting()
    assert service.disturbed(lambda: kill(now[0])) == others and service.after(now[0]) == now[1]
    pids = service.waiting()
    assert service.end() == 0, service.log.read_text()
    assert all(await_end(pid, 0.0) for pid in pids), "all end before it does"
    nothing_is_left(service, runtime_dir, launcher.pid)
    assert not list(runtime_dir.glob("serve-*"))

    service = Spared(children, folder, tmp_path / "second.log", *HERE)
    pids = service.waiting()
    children.kill(service.process)
    assert all(await_end(pid) for pid in pids)
    nothing_is_left(service, runtime_dir, launcher.pid)
    assert not launcher.leaked()
    assert not {name for name in {*os.listdir("/dev/shm")} - shared if "fer" in name}
