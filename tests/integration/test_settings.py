"""Every setting has its effect from the settings file and from its variable alike."""

from __future__ import annotations

import contextlib
import io
import logging
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fer
from fer.cli.settings import settings as of_a_command
from fer.memory.host import HostBackend
from fer.options import KeeperOptions, Options
from fer.weights import edition
from tests.support import recovery_model
from tests.support.cli import fer as run_fer
from tests.support.keeper import Keeper, key, publish, read_line, wait_until
from tests.support.processes import WAIT_S, Children
from tests.support.recovery import EngineProcess

Set = Callable[..., None]


@pytest.fixture(params=["file", "variable"])
def put(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Set:
    """Sets settings, in the file or in the environment of this process and its children."""

    def put(**values: str | float | bool | list[int]) -> None:
        tables: dict[str, list[str]] = {"": [], "keeper": []}
        for name, value in values.items():
            keepers = name in {setting.name for setting in KeeperOptions.settings()}
            variable = f"FER_{'KEEPER_' if keepers else ''}{name.upper()}"
            if request.param == "variable":
                monkeypatch.setenv(variable, ",".join(map(str, value)) if isinstance(value, list) else str(value))
                continue
            monkeypatch.delenv(variable, raising=False)
            text = str(value).lower() if isinstance(value, bool) else repr(value)
            tables["keeper" if keepers else ""].append(f"{name} = {text}")
        if request.param == "file":
            file = tmp_path / "settings.toml"
            file.write_text("\n".join([*tables[""], "[keeper]", *tables["keeper"]]))
            monkeypatch.setenv("FER_CONFIG", str(file))

    return put


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return recovery_model.make_checkpoint(tmp_path / "model")


@pytest.fixture
def level() -> Iterator[logging.Logger]:
    """FER's logger, afterwards as it was before."""
    logger = logging.getLogger("fer")
    before, handlers = logger.level, [*logger.handlers]
    yield logger
    logger.setLevel(before)
    logger.handlers[:] = handlers


def start(children: Children, folder: Path, **asked: Any) -> dict[str, Any]:
    return EngineProcess(children, folder, **asked).result()


def test_each_setting_is_tested_here() -> None:
    names = [setting.name for cls in (Options, KeeperOptions) for setting in cls.settings()]
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert not [name for name in names if not any(test.startswith(name) for test in tests)]


# --- of an engine ---


def test_mode(put: Set, children: Children, folder: Path) -> None:
    put(mode="off")
    assert start(children, folder)["path"] == "off"


def test_on_miss(put: Set, children: Children, folder: Path) -> None:
    put(on_miss="fail")
    assert start(children, folder)["error"]["kind"] == "Miss"


def test_verify(put: Set, children: Children, folder: Path) -> None:
    put(verify="full")
    assert start(children, folder)["path"] == "loaded"
    assert start(children, folder)["details"]["verified"].startswith("every byte")


def test_transport(put: Set, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It matters on a GPU only, so this sees it on its way there."""
    put(transport="cuda-ipc")
    opened: list[str] = []

    def open_backend(device: str, transport: str = "") -> HostBackend:
        opened.append(transport)
        return HostBackend()

    monkeypatch.setattr(edition, "open_backend", open_backend)
    edition.Workshop(recovery_model.engine(folder), Options.load(), fer.Report())
    assert opened == ["cuda-ipc"]


def test_wait_s(put: Set, children: Children, folder: Path) -> None:
    first = EngineProcess(children, folder, fault={"at": "load", "when": "after", "do": "hang"})
    assert first.row() == {"fired": "load"}
    put(wait_s="0.2")
    row = start(children, folder)
    assert row["path"] == "loaded"
    assert "loads the same weights" in row["why"]


def test_on_wait_timeout(put: Set, children: Children, folder: Path) -> None:
    first = EngineProcess(children, folder, fault={"at": "load", "when": "after", "do": "hang"})
    assert first.row() == {"fired": "load"}
    put(wait_s="0.2", on_wait_timeout="fail")
    assert start(children, folder)["error"]["kind"] == "WaitTimeout"


def test_weights(put: Set, children: Children, folder: Path) -> None:
    put(weights=False)
    row = start(children, folder)
    assert (row["path"], row["why"]) == ("off", "weights=false")


def _other_stages(folder: Path) -> dict[str, str]:
    report = fer.recover(recovery_model.engine(folder))
    return {name: stage.path for name, stage in report.stages.items() if name != "weights"}


def test_kernels(put: Set, folder: Path) -> None:
    put(weights=False, kernels=False)
    assert _other_stages(folder) == {"kernels": "off", "distinit": "absent", "cudagraph": "absent"}


def test_kernels_source(put: Set) -> None:
    """What it does is tested with the kernels' stage; here it is on its way there."""
    put(kernels_source="s3://bucket/a.ferkernels")
    assert Options.load().kernels_source == "s3://bucket/a.ferkernels"


def test_cudagraph(put: Set, folder: Path) -> None:
    put(weights=False, cudagraph=False)
    assert _other_stages(folder) == {"kernels": "absent", "distinit": "absent", "cudagraph": "off"}


def test_distinit(put: Set, folder: Path) -> None:
    put(weights=False, distinit=False)
    assert _other_stages(folder) == {"kernels": "absent", "distinit": "off", "cudagraph": "absent"}


def test_slab_bytes(put: Set, children: Children, folder: Path) -> None:
    usual = start(children, folder)["details"]["slabs"]
    put(slab_bytes="64KiB")
    other = recovery_model.make_checkpoint(folder.with_name("other"), seed=1)
    assert start(children, other)["details"]["slabs"] > usual


def test_log_of_recover(put: Set, folder: Path, level: logging.Logger) -> None:
    level.setLevel(logging.CRITICAL)
    fer.recover(recovery_model.engine(folder), mode="off")
    assert level.level == logging.CRITICAL, "what nobody asked for is left alone"
    put(log="debug")
    fer.recover(recovery_model.engine(folder), mode="off")
    assert level.level == logging.DEBUG


# --- of commands ---


def test_log_of_commands(put: Set, level: logging.Logger) -> None:
    put(log="error")
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        of_a_command(log="info")
        level.warning("not this")
        level.error("but this")
    assert said.getvalue() == "fer: but this\n"


def test_runtime_dir(put: Set, children: Children, tmp_path: Path) -> None:
    """One ``fer.toml`` is enough: the keeper listens there, and every command looks there."""
    place = tmp_path / "run"
    put(runtime_dir=str(place))
    keeper = children.spawn([sys.executable, "-m", "fer", "keeper", "run"])
    assert str(place) in read_line(keeper.stdout)
    for command in (["status"], ["evict", "--all"], ["verify"]):
        done = run_fer(*command)
        assert done.code == 0, (command, done.err)
    checks = {check["check"]: check for check in run_fer("doctor", "--json").json["checks"]}
    assert "protected by minder" in checks["keeper"]["found"]
    assert f"socket directory {place}" in checks
    assert run_fer("keeper", "stop").code == 0
    assert keeper.wait(WAIT_S) == 0


def test_home(put: Set, tmp_path: Path) -> None:
    place = tmp_path / "another home"
    model = place / "models" / "smollm2-135m-instruct-bf16"
    model.mkdir(parents=True)  # an empty one: the demo says where it looked
    put(home=str(place))
    done = run_fer("demo", "--device", "cpu")
    assert done.code == 2
    assert str(model) in done.err


# --- of the keeper ---


def _edition_goes(keeper: Keeper) -> None:
    with keeper.client() as client:
        publish(client, key())
        assert len(keeper.status().editions) == 1
    wait_until(lambda: not keeper.status().editions, "the edition goes when nobody uses it")


def test_budget_editions(put: Set, children: Children, runtime_dir: Path) -> None:
    put(budget_editions=0, grace_s=0)
    _edition_goes(Keeper(children, runtime_dir))


def test_budget_bytes(put: Set, children: Children, runtime_dir: Path) -> None:
    put(budget_bytes=0, grace_s=0)
    _edition_goes(Keeper(children, runtime_dir))


def test_grace_s(put: Set, children: Children, runtime_dir: Path) -> None:
    put(budget_editions=0, grace_s=0.2)
    _edition_goes(Keeper(children, runtime_dir))


def test_allow_uids(put: Set, children: Children, runtime_dir: Path) -> None:
    put(allow_uids=[12345])
    Keeper(children, runtime_dir)
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o711


def test_allow_uids_of_the_file_beside_the_engine(runtime_dir: Path, tmp_path: Path) -> None:
    """A keeper that an engine starts leaves the engine's folder, and reads its ``fer.toml`` all the same."""
    (tmp_path / "fer.toml").write_text("[keeper]\nallow_uids = [12345]\n")
    program = "from fer.weights.keeper.start import start_keeper; start_keeper(unit=False)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=WAIT_S, check=True)
    assert stat.S_IMODE(runtime_dir.stat().st_mode) == 0o711


def test_a_bad_settings_file_stops_commands_and_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("runtimedir = 'x'")
    monkeypatch.setenv("FER_CONFIG", str(file))
    for command in (["status"], ["keeper", "run"], ["evict", "--all"]):
        done = run_fer(*command)
        assert done.code == 2
        assert "runtime_dir" in done.err
