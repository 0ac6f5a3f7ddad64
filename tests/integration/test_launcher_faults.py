"""Deaths and strange requesters: an engine never outlives who it stands for, and always outlives its launcher."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fer.errors import LauncherError, PeerRefused
from fer.memory import fdpass
from fer.standby import inheritance, launcher_client
from fer.standby import launcher_place as place
from fer.standby import launcher_wire as wire
from fer.standby.launcher_client import NotForked, fork, spawn
from tests.support.descriptors import leaked, open_descriptors
from tests.support.keeper import read_line
from tests.support.launcher import Launcher, alive, await_end, fer_run, finish, script
from tests.support.processes import WAIT_S, Children, halt, kill_and_wait

WAITS = """
import os, sys, time
print(os.getpid(), flush=True)
sys.stdin.read()
sys.exit(6)
"""


def started(children: Children, tmp_path: Path) -> tuple[subprocess.Popen[str], int]:
    """``fer run`` with an engine that runs until its input ends, and the engine's pid."""
    process = fer_run(children, sys.executable, script(tmp_path, WAITS), stdin=subprocess.PIPE)
    return process, int(read_line(process.stdout, WAIT_S))


def test_the_engine_ends_with_who_stands_for_it(children: Children, tmp_path: Path) -> None:
    launcher = Launcher(children)
    process, engine = started(children, tmp_path)
    assert process.pid != engine and alive(engine)
    children.kill(process)
    assert await_end(engine)
    assert launcher.status().engines == []
    assert not launcher.leaked()


def test_the_engine_ends_with_who_stands_for_it_also_after_its_launcher(children: Children, tmp_path: Path) -> None:
    launcher = Launcher(children)
    process, engine = started(children, tmp_path)
    children.kill(launcher.process)
    assert alive(engine)
    children.kill(process)
    assert await_end(engine)


@pytest.mark.parametrize("way", ["SIGKILL", "fer launcher stop"])
def test_engines_outlive_their_launcher_and_the_next_start_is_plain(
    children: Children, tmp_path: Path, runtime_dir: Path, way: str
) -> None:
    launcher = Launcher(children)
    process, engine = started(children, tmp_path)
    if way == "SIGKILL":
        children.kill(launcher.process)
        assert place.socket_of(runtime_dir, "default").exists()  # left behind, and in nobody's way
    else:
        code, out, _ = finish(children.spawn([sys.executable, "-m", "fer", "launcher", "stop"]))
        assert code == 0 and "1 engine it has forked" in out
        assert launcher.process.wait(WAIT_S) == 0
        assert not place.socket_of(runtime_dir, "default").exists()
    assert alive(engine)
    code, _, err = finish(fer_run(children, sys.executable, script(tmp_path, "print()", "other.py")))
    assert code == 0 and "plain exec" in err
    assert ("has died" if way == "SIGKILL" else "no socket") in err
    assert Launcher(children).status().state == "ready"  # another one takes the place
    assert process.stdin is not None
    process.stdin.close()
    status = process.wait(WAIT_S)
    assert await_end(engine)
    assert status == (6 if kernel() >= (6, 15) else launcher_client.UNKNOWN)


def kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


def test_a_second_launcher_of_one_name_is_refused(children: Children, runtime_dir: Path) -> None:
    launcher = Launcher(children)
    code, _, err = finish(children.spawn([sys.executable, "-m", "fer", "launcher", "run", "--import", "json"]))
    assert code == 4 and f"process {launcher.pid}" in err
    other = Launcher(children, "--name", "other")
    assert launcher_client.ask("other").pid == other.pid


def test_a_launcher_that_hangs_holds_nobody_up_for_long(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = Launcher(children)
    monkeypatch.setattr(launcher_client, "FORK_S", 0.5)
    halt(launcher.process.pid)
    try:
        with pytest.raises(NotForked, match="did not answer within"):
            fork([sys.executable, str(script(tmp_path, "print()"))])
    finally:
        launcher.process.send_signal(signal.SIGCONT)
    # What it forks for the request that was given up ends without having run anything.
    with spawn([sys.executable, str(script(tmp_path, "raise SystemExit(3)", "three.py"))]) as child:
        assert (child.via, child.wait(WAIT_S)) == ("launcher", 3)
    while launcher.status().engines:
        pass
    assert not launcher.leaked()


def test_a_launcher_killed_in_the_middle_of_a_request_leaves_no_engine(
    children: Children, tmp_path: Path, runtime_dir: Path
) -> None:
    launcher = Launcher(children)
    marker = tmp_path / "ran"
    path = script(tmp_path, f"open({str(marker)!r}, 'w')")
    halt(launcher.process.pid)
    run = fer_run(children, sys.executable, path)
    assert _queued(launcher.pid, run)  # the request is in its socket, unread
    children.kill(launcher.process)
    code, _, err = finish(run)
    assert code == 0 and "plain exec" in err and "died over the request" in err
    assert marker.exists()


def _queued(launcher: int, run: subprocess.Popen[str]) -> bool:
    """Wait until ``fer run`` waits for an answer: its process sleeps in a receive."""
    for _ in range(100_000):
        where = Path(f"/proc/{run.pid}/stat").read_text().rpartition(")")[2].split()[0]
        if where == "S" and any("socket:" in os.readlink(e) for e in Path(f"/proc/{run.pid}/fd").iterdir()):
            return True
    return False


def test_a_child_whose_requester_has_gone_never_begins(children: Children, tmp_path: Path, runtime_dir: Path) -> None:
    """The requester dies between its request and the go."""
    launcher = Launcher(children)
    marker = tmp_path / "ran"
    code = f"""
import os, signal
from fer.standby import inheritance, launcher_client
real = launcher_client.fdpass.send
def send(sock, payload, fds=(), **options):
    if b"go" in payload[:16]:
        os.kill(os.getpid(), signal.SIGKILL)
    real(sock, payload, fds, **options)
launcher_client.fdpass.send = send
launcher_client.fork([{sys.executable!r}, {str(script(tmp_path, f"open({str(marker)!r}, 'w')"))!r}])
"""
    assert children.python(code).wait(WAIT_S) == -signal.SIGKILL
    while launcher.status().engines:
        pass
    assert launcher.status().forked == 1 and not marker.exists()
    assert not launcher.leaked()


@pytest.mark.parametrize("payload", [b"\x00", wire.pack(wire.Go()), b"\x81\xa4type\xa3run"])
def test_nonsense_is_answered_and_leaves_nothing_open(children: Children, runtime_dir: Path, payload: bytes) -> None:
    launcher = Launcher(children)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(WAIT_S)
        fdpass.connect(sock, place.socket_of(runtime_dir, "default"))
        fdpass.send(sock, payload, [0, 1])
        answer, _, _ = fdpass.receive(sock, wire.LIMIT)
        assert isinstance(wire.unpack_answer(answer), wire.Refused)
        assert fdpass.receive(sock, wire.LIMIT)[0] == b""
    assert launcher.status().state == "ready"
    assert not launcher.leaked()


UNSHARED = [
    pytest.param(["--mount"], "mount namespace", id="mount"),
    pytest.param(["--net"], "network namespace", id="network"),
    pytest.param(["--ipc"], "IPC namespace", id="ipc"),
    pytest.param(["--uts"], "UTS namespace", id="uts"),
    pytest.param(["--pid", "--fork"], "PID namespace", id="pid"),
]


@pytest.mark.parametrize(("flags", "named"), UNSHARED)
def test_a_requester_in_another_namespace_runs_plainly(
    children: Children, tmp_path: Path, flags: list[str], named: str
) -> None:
    unshare = ["unshare", "--user", "--map-current-user", *flags]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("this kernel or container lets nobody make namespaces")
    launcher = Launcher(children)
    command = [*unshare, sys.executable, "-m", "fer", "run", "--"]
    code, _, err = finish(children.spawn([*command, sys.executable, script(tmp_path, "raise SystemExit(5)")]))
    assert code == 5 and "plain exec" in err and f"another {named}" in err.replace("and another", "another")
    assert "user namespace" in err
    assert launcher.status().forked == 0


def test_a_more_confined_requester_is_not_freed_by_a_fork(children: Children, tmp_path: Path) -> None:
    Launcher(children)
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    command = ["setpriv", "--no-new-privs", sys.executable, "-m", "fer", "run", "--", sys.executable]
    code, _, err = finish(children.spawn([*command, script(tmp_path, "raise SystemExit(5)")]))
    assert code == 5 and "plain exec" in err and "no_new_privs" in err


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group of version 2 that processes of this test may be in, beside the test's own."""
    where = inheritance._mounted("")
    line = next((line for line in inheritance._cgroup() if line.startswith("0::")), "")
    made = Path(f"{where}{line[3:]}", f"fer-test-{os.getpid()}")
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield made
    made.rmdir()


def test_an_engine_is_in_its_requesters_control_group(children: Children, tmp_path: Path, control_group: Path) -> None:
    launcher = Launcher(children)
    path = script(tmp_path, "print(open('/proc/self/cgroup').read())")

    def enter() -> None:
        (control_group / "cgroup.procs").write_text("0")

    run = fer_run(children, sys.executable, path, preexec_fn=enter)
    code, out, err = finish(run)
    assert code == 0 and "forked" in err, err
    assert control_group.name in out
    assert control_group.name not in Path(f"/proc/{launcher.pid}/cgroup").read_text()


def test_a_socket_or_directory_that_is_not_ours_is_not_trusted(children: Children, runtime_dir: Path) -> None:
    with pytest.raises(LauncherError, match="no launcher default listens"):
        launcher_client.ask("default")
    runtime_dir.chmod(0o770)
    with pytest.raises(PeerRefused, match="mode"):
        launcher_client.ask("default")
    runtime_dir.chmod(0o700)
    place.socket_of(runtime_dir, "default").write_text("")
    code, _, err = finish(children.spawn([sys.executable, "-m", "fer", "launcher", "run", "--import", "json"]))
    assert code == 4 and "no socket of this user" in err


def test_spawn_falls_back_and_is_tied_either_way(children: Children, tmp_path: Path) -> None:
    path = script(tmp_path, "import time\ntime.sleep(600)")
    launcher = Launcher(children)
    before = open_descriptors()
    for way in ("auto", "off"):
        child = spawn([sys.executable, str(path)], launcher=way)
        assert child.via == ("launcher" if way == "auto" else "exec") and child.poll() is None
        child.send_signal(signal.SIGUSR1)
        assert child.wait(WAIT_S) == -signal.SIGUSR1
        child.close()
        child = spawn([sys.executable, str(path)], launcher=way)
        child.close()
        assert child.returncode == -signal.SIGKILL
    gc.collect()
    assert not leaked(before, open_descriptors())
    assert not launcher.leaked()


@pytest.mark.parametrize("way", ["auto", "off"])
def test_a_spawned_engine_ends_with_its_starter(children: Children, tmp_path: Path, way: str) -> None:
    Launcher(children)
    path = script(tmp_path, "import time\ntime.sleep(600)")
    code = f"""
from fer.standby.launcher_client import spawn
child = spawn([{sys.executable!r}, {str(path)!r}], launcher={way!r})
print(child.pid, child.via, flush=True)
child.wait()
"""
    starter = children.python(code)
    pid, via = read_line(starter.stdout, WAIT_S).split()
    assert via == ("launcher" if way == "auto" else "exec") and alive(int(pid))
    kill_and_wait(starter.pid)
    assert await_end(int(pid))
