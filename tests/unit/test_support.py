"""The checkers that other tests rely on find what they are for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.descriptors import leaked, open_descriptors
from tests.support.keeper import read_line
from tests.support.processes import WAIT_S, Children, kill_all_with, with_variable


def test_a_left_descriptor_is_found() -> None:
    before = open_descriptors()
    number = os.open("/dev/null", os.O_RDONLY)
    try:
        assert leaked(before, open_descriptors()) == {number: "/dev/null"}
    finally:
        os.close(number)
    assert not leaked(before, open_descriptors())


def test_a_number_that_stands_for_another_file_is_found() -> None:
    assert leaked({5: "/dev/null"}, {5: "socket:[1]"}) == {5: "socket:[1]"}


def test_settings_from_outside_are_gone(runtime_dir: Path) -> None:
    assert {name for name in os.environ if name.startswith("FER_")} == {"FER_HOME", "FER_RUNTIME_DIR"}
    assert runtime_dir.stat().st_mode & 0o777 == 0o700


def test_a_detached_process_is_found_by_its_environment(children: Children, runtime_dir: Path) -> None:
    code = """if True:
        import os, sys
        if os.fork():
            os._exit(0)
        os.setsid()
        print(os.getpid(), flush=True)
        sys.stdin.read()
    """
    child = children.spawn([sys.executable, "-c", code], stdin=-1)
    pid = int(read_line(child.stdout))
    child.wait(WAIT_S)
    assert pid in set(with_variable("FER_RUNTIME_DIR", str(runtime_dir)))
    assert pid in kill_all_with("FER_RUNTIME_DIR", str(runtime_dir))
    assert pid not in set(with_variable("FER_RUNTIME_DIR", str(runtime_dir)))


def test_children_are_killed_at_the_end() -> None:
    started = Children()
    child = started.python("import sys; print('up', flush=True); sys.stdin.read()", stdin=-1)
    assert read_line(child.stdout) == "up"
    started.end()
    assert child.returncode == -9
