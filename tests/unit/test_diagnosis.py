"""The checks of ``fer doctor`` on made-up machines."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fer import diagnosis
from fer.diagnosis import Finding, Machine, examine, file_system, uses_expandable_segments
from fer.errors import DriverError, KeeperUnavailable, PeerRefused
from fer.memory.gpus import Gpu
from fer.weights.keeper import sockets

UUID = "GPU-11111111-2222-3333-4444-555555555555"
H200 = Gpu(uuid=UUID, pci_bus="0000:1b:00.0", index=0, name="NVIDIA H200", total=141 << 30, free=140 << 30)


def machine(*, gpus: Any = None, keeper: Any = None, **fields: Any) -> Machine:
    """A machine with the given facts; by default without GPU and keeper."""
    made = Machine(**fields)
    made.__dict__["gpus"] = DriverError("NVML is missing") if gpus is None else gpus
    made.__dict__["keeper"] = keeper or KeeperUnavailable("no keeper listens")
    return made


def only(check: diagnosis.Check, on: Machine) -> Finding:
    (found,) = check(on)
    return found


def test_every_check_runs_here_and_none_breaks(runtime_dir: Path) -> None:
    findings = examine(runtime_dir)
    assert not [found for found in findings if "check itself failed" in found.found]
    assert {found.level for found in findings} <= {"ok", "warn", "fail"}


def test_what_is_not_ok_says_what_to_do(runtime_dir: Path) -> None:
    assert not [found for found in examine(runtime_dir) if found.level != "ok" and not found.fix]


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_broken(on: Machine) -> Any:
        raise ValueError("oh")

    monkeypatch.setattr(diagnosis, "CHECKS", (check_broken,))
    (found,) = examine()
    assert (found.check, found.level) == ("broken", "warn")
    assert "ValueError: oh" in found.found


def test_no_gpu_is_fine() -> None:
    found = only(diagnosis.check_gpus, machine())
    assert found.level == "ok"
    assert "host memory is used" in found.found
    assert not list(diagnosis.check_visible_devices(machine()))
    assert not list(diagnosis.check_sharing(machine()))


@pytest.mark.parametrize(
    ("setting", "level", "words"),
    [
        (None, "ok", f"cuda:0 is {UUID}"),
        ("0", "ok", f"cuda:0 is {UUID}"),
        (UUID, "ok", f"cuda:0 is {UUID}"),
        ("1", "fail", "CUDA sees no device"),
        ("", "fail", "CUDA sees no device"),
        ("0,7", "warn", "'7'"),
        ("GPU-99", "fail", "GPU-99"),
    ],
)
def test_visible_devices(setting: str | None, level: str, words: str) -> None:
    environ = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    found = only(diagnosis.check_visible_devices, machine(gpus=[H200], environ=environ))
    assert found.level == level
    assert words in found.found


def test_a_full_gpu_is_pointed_out_and_who_may_hold_it() -> None:
    full = Gpu(uuid=UUID, pci_bus="0000:1b:00.0", index=0, name="NVIDIA H200", total=141 << 30, free=2 << 30)
    found = only(diagnosis.check_gpus, machine(gpus=[full]))
    assert (found.level, "fer evict" in found.fix) == ("warn", True)
    assert "2.0 of 141.0 GiB free" in found.found
    keeper = SimpleNamespace(editions=[SimpleNamespace(gpu=UUID)])
    assert "editions of the keeper" in only(diagnosis.check_gpus, machine(gpus=[full], keeper=keeper)).found


def test_mig_is_pointed_out() -> None:
    mig = Gpu(uuid=UUID, pci_bus="0000:1b:00.0", index=0, name="NVIDIA H200", mig=True, instances=("MIG-1", "MIG-2"))
    found = only(diagnosis.check_gpus, machine(gpus=[mig]))
    assert found.level == "warn"
    assert "2 instances" in found.found


def test_a_gpu_without_bindings_is_a_failure_with_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise DriverError("the Python bindings are missing", fix="pip install 'fast-engine-recovery[cuda]'")

    monkeypatch.setattr(diagnosis, "_cuda_devices", missing)
    found = only(diagnosis.check_sharing, machine(gpus=[H200]))
    assert found.level == "fail"
    assert "pip install" in found.fix


@pytest.mark.parametrize(
    ("missing", "setting", "level"),
    [
        ([], "", "ok"),
        (["memory behind descriptors"], "", "warn"),
        (["memory behind descriptors"], "expandable_segments:True", "fail"),
    ],
)
def test_sharing(monkeypatch: pytest.MonkeyPatch, missing: list[str], setting: str, level: str) -> None:
    monkeypatch.setattr(diagnosis, "_cuda_devices", lambda: iter([(0, "NVIDIA H200", missing)]))
    found = only(diagnosis.check_sharing, machine(gpus=[H200], environ={"PYTORCH_CUDA_ALLOC_CONF": setting}))
    assert found.level == level


@pytest.mark.parametrize(
    ("environ", "used"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:true"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_expandable_segments_are_seen(environ: dict[str, str], used: bool) -> None:
    assert uses_expandable_segments(environ) is used


def test_expandable_segments_and_legacy_ipc_do_not_go_together() -> None:
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert only(diagnosis.check_allocator, machine(gpus=[H200], environ=environ)).level == "ok"
    environ["FER_TRANSPORT"] = "cuda-ipc"
    assert only(diagnosis.check_allocator, machine(gpus=[H200], environ=environ)).level == "fail"


def test_a_bad_setting_is_a_failure_that_names_it() -> None:
    found = only(diagnosis.check_settings, machine(environ={"FER_VERIFY": "maybe"}))
    assert found.level == "fail"
    assert "FER_VERIFY" in found.found


def test_settings_name_their_source() -> None:
    found = only(diagnosis.check_settings, machine(environ={"FER_VERIFY": "full"}))
    assert found.found == "verify=full (FER_VERIFY)"


@pytest.mark.parametrize("given", ["variable", "file"])
def test_a_bad_setting_of_the_keeper_is_a_failure_that_names_it(tmp_path: Path, given: str) -> None:
    (tmp_path / "fer.toml").write_text('[keeper]\nbudget_editions = "a"\n')
    environ = {"FER_CONFIG": str(tmp_path / "fer.toml")} if given == "file" else {"FER_KEEPER_BUDGET_EDITIONS": "a"}
    found = only(diagnosis.check_settings, machine(environ=environ))
    assert found.level == "fail"
    assert "budget_editions" in found.found.lower()
    assert found.fix


def test_settings_of_the_keeper_name_their_source() -> None:
    found = only(diagnosis.check_settings, machine(environ={"FER_KEEPER_BUDGET_EDITIONS": "2"}))
    assert (found.level, found.found) == ("ok", "keeper.budget_editions=2 (FER_KEEPER_BUDGET_EDITIONS)")


@pytest.mark.parametrize("there", [True, False])
def test_a_full_file_system_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    place = tmp_path / "fer"
    if there:
        place.mkdir(mode=0o700)
    facts = SimpleNamespace(f_blocks=100, f_bfree=0, f_files=100, f_ffree=50)
    monkeypatch.setattr(os, "statvfs", lambda path: facts)
    found = only(diagnosis.check_socket_directory, machine(runtime_dir=place))
    assert (found.level, "is full" in found.found) == ("fail", True)
    facts.f_blocks = facts.f_files = facts.f_ffree = 0  # one that counts neither
    assert only(diagnosis.check_socket_directory, machine(runtime_dir=place)).level == "ok"


def test_a_keeper_that_hangs_is_a_failure_that_names_it(runtime_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as hung:
        hung.bind(str(runtime_dir / "keeper.sock"))
        hung.listen()
        (runtime_dir / sockets.LOCK).write_text("4711")
        found = only(diagnosis.check_keeper, machine())
    assert found.level == "fail"
    assert f"the keeper in {runtime_dir} (pid 4711)" in found.found
    assert "kill -CONT 4711" in found.fix


def test_socket_directories(tmp_path: Path) -> None:
    good, open_to_all, link = tmp_path / "good", tmp_path / "open", tmp_path / "link"
    good.mkdir(mode=0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    link.symlink_to(good)
    assert only(diagnosis.check_socket_directory, machine(runtime_dir=good)).level == "ok"
    assert only(diagnosis.check_socket_directory, machine(runtime_dir=tmp_path / "later")).level == "ok"
    for place in (open_to_all, link):
        found = only(diagnosis.check_socket_directory, machine(runtime_dir=place))
        assert found.level == "fail"
        assert found.fix


def test_a_place_others_could_take_is_a_failure(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    found = only(diagnosis.check_socket_directory, machine(runtime_dir=tmp_path / "fer"))
    assert found.level == "fail"
    assert "sticky" in found.found


def test_a_shared_file_system_is_a_failure(tmp_path: Path) -> None:
    place, proc = tmp_path / "fer", tmp_path / "proc"
    place.mkdir(mode=0o700)
    (proc / "self").mkdir(parents=True)
    (proc / "self/mounts").write_text(f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n")
    found = only(diagnosis.check_socket_directory, machine(runtime_dir=place, proc=proc))
    assert found.level == "fail"
    assert "nfs4" in found.found


def test_the_longest_mount_point_wins_and_names_are_whole(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mounts").write_text(
        "a / ext4 rw 0 0\nb /run tmpfs rw 0 0\nc /runtime nfs rw 0 0\nd /run xfs rw 0 0\n"
    )
    assert file_system(Path("/run/fer"), tmp_path) == "xfs"
    assert file_system(Path("/runt"), tmp_path) == "ext4"
    assert file_system(Path("/x"), tmp_path / "absent") == "unknown"


def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 1024))
    found = only(diagnosis.check_open_files, machine())
    assert (found.level, found.found) == ("warn", "256 open files, up to 1024")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, resource.RLIM_INFINITY))
    assert only(diagnosis.check_open_files, machine()).level == "ok"


def _kept(protection: str, size: int = 1 << 30) -> SimpleNamespace:
    return SimpleNamespace(pid=os.getpid(), protection=protection, editions=[SimpleNamespace(bytes=size)])


@pytest.mark.parametrize(
    ("keeper", "level", "words"),
    [
        (KeeperUnavailable("no keeper listens"), "ok", "none runs"),
        (PeerRefused("it is a symbolic link"), "fail", "symbolic link"),
        (_kept("none"), "warn", "unprotected"),
        (_kept("minder"), "ok", "1.0 GiB, protected by minder"),
        (_kept("minder", 32 << 20), "ok", "1 edition(s), 32.0 MiB, protected"),
    ],
)
def test_the_keeper_s_protection(keeper: Any, level: str, words: str) -> None:
    found = only(diagnosis.check_keeper, machine(keeper=keeper))
    assert found.level == level
    assert words in found.found


def test_a_user_manager_gives_keepers_a_unit_of_their_own(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert only(diagnosis.check_isolation, machine(environ=environ)).level == "warn"
    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd/private").touch()
    assert only(diagnosis.check_isolation, machine(environ=environ)).level == "ok"
