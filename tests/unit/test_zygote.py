"""Forked children are like started ones, and end with whoever wanted them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.descriptors import open_descriptors
from tests.support.keeper import read_line, wait_until
from tests.support.processes import WAIT_S, Children
from tests.support.zygote import Forked, Zygote

RUN = "tests.support.run_code"
IDLE = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"


@pytest.fixture
def idle(children: Children) -> Iterator[Forked]:
    """A child that waits; it has started."""
    child = children.fork(RUN, IDLE, stdin=subprocess.PIPE)
    assert read_line(child.stdout) == str(child.pid)
    yield child


def test_a_child_gets_its_arguments_streams_and_whole_environment(children: Children) -> None:
    code = (
        "import os, sys; print(sys.argv[2:], sorted(os.environ), os.getsid(0) == os.getpid(), 'torch' in sys.modules);"
        "print(sys.stdin.read(), file=sys.stderr); os.execvp('sh', ['sh', '-c', 'echo $A'])"
    )
    child = children.fork(RUN, code, "x", "y z", env={"A": "1", "PATH": os.defpath})
    out, err = child.communicate(WAIT_S)
    assert out.splitlines() == ["['x', 'y z'] ['A', 'PATH'] True True", "1"]
    assert err == "\n"


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(lambda: print('end'))", 0, ""),
    ],
)
def test_a_child_ends_as_an_interpreter_does(children: Children, code: str, status: int, said: str) -> None:
    child = children.fork(RUN, code)
    out, err = child.communicate(WAIT_S)
    assert child.wait(WAIT_S) == child.poll() == status
    assert err.endswith(said) and bool(err) == bool(said)
    assert out == ("end\n" if "atexit" in code else "")


def test_torch_has_its_threads_in_a_child(children: Children) -> None:
    code = (
        "import torch; torch.set_num_threads(2); x = torch.ones(1000, 1000); "
        "print((x + x).sum().item(), (x @ x).sum().item(), torch.get_num_threads())"
    )
    assert children.fork(RUN, code).communicate(WAIT_S) == ("2000000.0 1000000000.0 2\n", "")


def test_a_child_holds_nothing_of_the_others(children: Children, idle: Forked) -> None:
    """Their pipes would never end; the connection to the zygote would keep it from ending."""
    code = "import os; print(*(os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)), len(os.listdir('/proc/self/fd')))"
    out, _ = children.fork(RUN, code).communicate(WAIT_S)
    assert out.split()[-1] == "4", "its streams and the listing"
    theirs = {what for what in open_descriptors(idle.pid).values() if what.startswith("pipe:")}
    assert not theirs & set(out.split())


def test_killed_children_are_reported(idle: Forked) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        idle.wait(0.0)
    assert idle.poll() is None
    idle.kill()
    assert idle.wait(WAIT_S) == -signal.SIGKILL
    idle.kill()
    assert idle.poll() == -signal.SIGKILL


def test_a_child_leaves_no_descriptors(children: Children, idle: Forked) -> None:
    before = open_descriptors()
    child = children.fork(RUN, "print('x')")
    child.communicate(WAIT_S)
    assert open_descriptors() == before


def test_all_end_with_the_zygote_and_it_with_its_user(children: Children, tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; from tests.support import zygote;"
        f"child = zygote.shared.fork({RUN!r}, {IDLE!r}, stdin=subprocess.PIPE);"
        "print(child.stdout.readline().strip(), zygote.shared._process.pid, flush=True); sys.stdin.read()"
    )
    user = children.python(code, stdin=subprocess.PIPE)
    child, zygote = map(int, read_line(user.stdout, 5 * WAIT_S).split())
    user.kill()
    user.wait(WAIT_S)
    wait_until(lambda: not Path(f"/proc/{child}").exists(), "the end of the child")
    wait_until(lambda: not _alive(zygote), "the end of the zygote")


def _alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped by a lazy init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_cannot_be_imported_is_said() -> None:
    own = Zygote()
    with pytest.raises(AssertionError, match="No module named 'nothing_like_it'"):
        own.fork(RUN, "pass", preload=("nothing_like_it",))
    own.end()
