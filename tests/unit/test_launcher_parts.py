"""Variables that imports read, files that change, faults in ``/proc``, ties, and exit statuses of strangers."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from fer.errors import OptionError, ProtocolError
from fer.memory.fd import Fd
from fer.standby import inheritance, pidfd, tie
from fer.standby import launcher_environment as environment
from fer.standby import launcher_fit as fit
from fer.standby import launcher_wire as wire
from fer.standby.launcher_files import Files
from fer.standby.launcher_place import check_name
from tests.support.keeper import read_line
from tests.support.processes import WAIT_S, Children


class TestEnvironment:
    def test_every_way_of_reading_one_variable_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THERE", "1")
        reads = environment.Reads()
        with reads.watched():
            assert os.environ["THERE"] == "1"
            os.environ.get("MISSING")
            os.getenv("BY_GETENV")
            "BY_IN" in os.environ  # noqa: B015 - reading is all it is for
            os.environ.setdefault("BY_DEFAULT", "x")
        monkeypatch.delenv("BY_DEFAULT")
        assert set(reads.by) == {"THERE", "MISSING", "BY_GETENV", "BY_IN", "BY_DEFAULT"}
        assert set(reads.by.values()) == {__name__}
        os.environ.get("AFTERWARDS")
        assert "AFTERWARDS" not in reads.by

    def test_a_copy_of_everything_is_no_reading(self) -> None:
        reads = environment.Reads()
        with reads.watched():
            copies = [dict(os.environ), os.environ.copy(), {**os.environ}, dict(os.environ.items())]
            assert all(copy == copies[0] for copy in copies)
            assert len(list(os.environ.values())) == len(copies[0])
        assert reads.by == {}

    def test_what_differs_is_named_with_its_reader(self) -> None:
        reads = environment.Reads()
        reads.by = {"A": "one", "B": "two", "TERM": "three"}
        theirs = {"A": "2", "C": "3", "TERM": "vt100", "OMP_NUM_THREADS": "4", "PYTHONUTF8": "1"}
        assert reads.differences({"A": "1", "B": "1"}, theirs) == {
            "A": "one",
            "B": "two",
            "OMP_NUM_THREADS": "the OpenMP runtime",
            "PYTHONUTF8": "the interpreter",
        }


def test_files_tell_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    files = Files([path, tmp_path / "missing"])
    assert len(files) > 50 and files.changed() == ""
    path.write_text("[]")
    assert files.changed() == str(path)
    path.unlink()
    assert files.changed() == str(path)


class TestFit:
    def test_threads_are_named(self) -> None:
        before, done = set(fit.threads()), threading.Event()
        thread = threading.Thread(target=done.wait, name="mine")
        thread.start()
        try:
            assert set(fit.threads()) - before == {f"thread {thread.native_id} (mine)"}
        finally:
            done.set()
            thread.join()

    @pytest.mark.parametrize(
        ("path", "counts"),
        [
            ("/dev/nvidia0", True),
            ("/dev/nvidiactl", True),
            ("/dev/nvidia-uvm", True),
            ("/dev/nvidia-caps/nvidia-cap1", False),
            ("/dev/null", False),
            ("/tmp/dev/nvidia0", False),
        ],
    )
    def test_gpus_are_known_by_their_path(self, path: str, counts: bool) -> None:
        assert fit.devices({7: path}) == ([f"descriptor 7 ({path})"] if counts else [])

    def test_a_trial_that_works(self, children: Children) -> None:
        assert _trial(children, "[('first', 2.0, lambda: None), ('second', 2.0, lambda: None)]") == ""

    @pytest.mark.parametrize(
        ("step", "says"),
        [
            ("lambda: signal.pause()", "hangs in its step"),
            ("lambda: os._exit(0)", "died in its step"),
            ("lambda: 1 / 0", "failed in its step: ZeroDivisionError: division by zero"),
        ],
    )
    def test_a_trial_that_does_not(self, children: Children, step: str, says: str) -> None:
        assert says in _trial(children, f"[('step', 0.2, {step})]")

    def test_a_slow_step_that_computes_is_not_taken_for_one_that_hangs(self, children: Children) -> None:
        busy = "lambda: [None for _ in iter(lambda: time.process_time() > 0.6, True)]"
        assert _trial(children, f"[('step', 0.2, {busy})]") == ""


def _trial(children: Children, steps: str) -> str:
    """In a process of its own: this one may have threads."""
    code = f"import os, signal, time\nfrom fer.standby import launcher_fit as fit\nprint(fit.trial({steps}))"
    out, err = children.python(code).communicate(timeout=WAIT_S)
    assert not err
    return out.strip()


class TestTie:
    def test_the_bound_process_is_killed_when_the_other_end_closes(self, children: Children) -> None:
        held, alarm = tie.make()
        with held:
            child = children.python("import signal; signal.pause()", pass_fds=[held.fileno()])
            tie.bind(held.fileno(), child.pid)
        assert child.poll() is None
        alarm.close()
        assert child.wait(WAIT_S) == -signal.SIGKILL

    def test_who_binds_too_late_is_told(self, children: Children) -> None:
        held, alarm = tie.make()
        alarm.close()
        code = "import sys\nfrom fer.standby import tie\nprint(tie.bind_myself(int(sys.argv[1])))"
        with held:
            child = children.python(code, str(held.fileno()), pass_fds=[held.fileno()])
        assert child.communicate(timeout=WAIT_S)[0] == "False\n"

    APART = """
import os, sys, threading
from pathlib import Path
from fer.standby import tie
before = {*os.listdir("/proc/self/task")}
said = [tie.show_end_at_once(), sys.argv[1] in os.listdir("/proc/self/fd")]
if said[0]:
    (own,) = {*os.listdir("/proc/self/task")} - before
    said.append(os.listdir(f"/proc/self/task/{own}/fd") == [sys.argv[1]])
print(*said, flush=True)
sys.stdin.read()
"""

    def test_its_end_is_seen_though_other_threads_have_lost_the_pipe(self, children: Children) -> None:
        held, alarm = tie.make()
        with held, alarm:
            child = children.python(self.APART, str(held.fileno()), pass_fds=[held.fileno()])
            tie.bind(held.fileno(), child.pid)
            held.close()
            assert read_line(child.stdout) == "True False True"
            hang_up = select.poll()
            hang_up.register(alarm.fileno(), 0)  # POLLERR always counts
            assert not hang_up.poll(0)
            child.kill()
            assert hang_up.poll(WAIT_S * 1000)

    def test_it_is_killed_all_the_same_when_the_other_end_closes(self, children: Children) -> None:
        held, alarm = tie.make()
        with held:
            child = children.python(self.APART, str(held.fileno()), pass_fds=[held.fileno()])
            tie.bind(held.fileno(), child.pid)
        assert read_line(child.stdout) == "True False True"
        alarm.close()
        assert child.wait(WAIT_S) == -signal.SIGKILL

    def test_where_no_table_can_be_had_all_is_as_it_was(self, children: Children) -> None:
        held, alarm = tie.make()
        refused = self.APART.replace("before =", "tie._SYS_CLOSE_RANGE = 100_000\nbefore =")
        with held, alarm:
            child = children.python(refused, str(held.fileno()), pass_fds=[held.fileno()])
            tie.bind(held.fileno(), child.pid)
            held.close()
            assert read_line(child.stdout) == "False True"
            alarm.close()
            assert child.wait(WAIT_S) == -signal.SIGKILL

    def test_who_is_bound_to_nobody_shows_nothing(self, children: Children) -> None:
        child = children.python("from fer.standby import tie\nprint(tie.show_end_at_once())")
        assert child.communicate(timeout=WAIT_S)[0] == "False\n"


class TestPidfd:
    @pytest.mark.parametrize(("end", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)])
    def test_the_status_of_a_process_that_nobody_reaped(self, children: Children, end: str, status: int) -> None:
        child = children.python(f"import os, sys\n{end}")
        with Fd(os.pidfd_open(child.pid)) as fd:
            assert pidfd.ended(fd.fileno(), WAIT_S)
            assert pidfd.exit_status(fd.fileno(), child.pid) == status
            child.wait(WAIT_S)
            known = pidfd.exit_status(fd.fileno(), child.pid)
            assert known in (status, None)  # None before Linux 6.15
            pidfd.send(fd.fileno(), signal.SIGTERM)
            pidfd.send_to_group(fd.fileno(), child.pid, signal.SIGTERM)

    def test_a_process_that_runs_has_none(self, children: Children) -> None:
        child = children.python("import signal; signal.pause()")
        with Fd(os.pidfd_open(child.pid)) as fd:
            assert not pidfd.ended(fd.fileno())
            assert pidfd.exit_status(fd.fileno(), child.pid) is None
            pidfd.send_to_group(fd.fileno(), child.pid, signal.SIGUSR1)
            assert child.wait(WAIT_S) == -signal.SIGUSR1


def test_signals_come_through_the_descriptor_with_their_sender(children: Children) -> None:
    code = """
import os, signal, sys
from fer.standby.signalfd import SignalFd
signals = SignalFd({signal.SIGUSR1, signal.SIGRTMAX})
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGRTMAX)
print(sorted(signals.read()), list(signals.read()))
signals.close()
print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
    out, err = children.python(code).communicate(timeout=WAIT_S)
    assert out == f"[(10, False), ({int(signal.SIGRTMAX)}, False)] []\nset()\n", err


class TestInheritance:
    def test_this_process_is_like_itself(self) -> None:
        ours = inheritance.fixed()
        assert inheritance.differences(ours, inheritance.fixed()) == []
        assert inheritance.differences(ours, {**ours, "mount namespace": "0:0"}) == ["mount namespace"]
        assert "PID namespace" in ours and "effective capabilities" in ours

    def test_it_can_be_given_what_it_has(self) -> None:
        inheritance.take(inheritance.handed())

    def test_a_control_group_that_is_not_there_is_named(self) -> None:
        given = inheritance.handed()
        given = msgspec.structs.replace(given, cgroup=["0::/fer/there/is/none"])
        with pytest.raises(OSError, match="its control group cannot be given to a forked child"):
            inheritance.take(given)

    def test_signals_that_the_interpreter_ignores_are_not_counted(self) -> None:
        before = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        try:
            assert inheritance.ignored_signals() == [signal.SIGUSR2]
        finally:
            signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("name", ["", "off", "auto", "a/b", ".hidden", "x" * 65])
def test_names_that_no_launcher_can_have(name: str) -> None:
    with pytest.raises(OptionError):
        check_name(name)
    assert check_name("gpu-0.a") == "gpu-0.a"


@pytest.mark.parametrize("payload", [b"", b"x", b"\x81\xa4type\xa3run", wire.pack(wire.Ended(status=1))])
def test_only_requests_are_requests(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.unpack_request(payload)
    assert not wire.is_go(payload)
    assert wire.is_go(wire.pack(wire.Go()))


def test_every_message_comes_back_as_it_went() -> None:
    run = wire.Run(
        version=1,
        fixed={"a": "b"},
        handed=inheritance.handed(),
        pid=1,
        program=os.fsencode(sys.executable),
        numbers=[7],
    )
    assert wire.unpack_request(wire.pack(run)) == run
    for request in (wire.Ask(), wire.Stop()):
        assert wire.unpack_request(wire.pack(request)) == request
    for answer in (wire.Refused(why="a"), wire.Failed(why="b"), wire.Ready(pid=3), wire.Ended(status=-9)):
        assert wire.unpack_answer(wire.pack(answer)) == answer
    with pytest.raises(ProtocolError):
        wire.unpack_answer(wire.pack(run))
