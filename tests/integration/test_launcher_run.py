"""``fer run`` behaves as the engine would, forked or not: output, exit codes, signals, terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
from pathlib import Path

import pytest

from fer.standby import launcher_imports
from tests.support.keeper import read_line, wait_until
from tests.support.launcher import Launcher, await_end, fer_run, finish, script
from tests.support.processes import WAIT_S, Children, stopped

FORKED = "forked as process"
PLAIN = "plain exec"

DESCRIBE = """
import json, os, signal, sys, resource
print(json.dumps({
    "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path[0], "executable": sys.executable, "main": __name__,
    "file": globals().get("__file__"), "spec": __spec__ is not None, "cwd": os.getcwd(), "umask": os.umask(0),
    "is_main": vars(sys.modules["__main__"]) is globals(), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "environment": dict(os.environ), "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "limit": resource.getrlimit(resource.RLIMIT_CORE), "affinity": sorted(os.sched_getaffinity(0)),
    "leads": os.getpid() == os.getsid(0) == os.getpgrp(), "comm": open("/proc/self/comm").read().strip(),
    "cmdline": open("/proc/self/cmdline").read().split("\\0")[:-1],
    "shown": open("/proc/self/environ").read().split("\\0")[:-1],
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "hup": signal.getsignal(signal.SIGHUP),
    "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    "encoding": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors], "buffering": sys.stdout.line_buffering,
}))
"""


@pytest.fixture
def launcher(children: Children) -> Launcher:
    return Launcher(children)


def test_a_script_that_is_named_from_its_folder_knows_where_it_lies(
    launcher: Launcher, children: Children, tmp_path: Path
) -> None:
    script(tmp_path, "import sys\nprint(__file__, sys._getframe().f_code.co_filename, sys.argv[0])\n", "here.py")
    seen = []
    for way in ("auto", "off"):
        process = fer_run(children, sys.executable, "here.py", options=("--launcher", way), cwd=tmp_path)
        code, out, err = finish(process)
        assert code == 0 and (FORKED in err) == (way == "auto"), err
        seen.append(out)
    assert seen[0] == seen[1] and str(tmp_path) in seen[0]


def test_a_forked_script_sees_what_a_plain_one_sees(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    path = script(tmp_path, DESCRIBE)
    seen = []
    for way in ("auto", "off"):
        process = fer_run(
            children,
            sys.executable,
            path,
            "a",
            "b c",
            options=("--launcher", way),
            cwd=tmp_path,
            umask=0o027,
            env={**os.environ, "ONLY_HERE": "ä"},
            preexec_fn=lambda: (os.nice(3), os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})),
        )
        code, out, err = finish(process)
        assert code == 0, err
        assert (FORKED in err) == (way == "auto"), err
        seen.append(json.loads(out))
    forked, plain = seen
    assert forked.pop("leads") and forked.pop("shown")
    plain.pop("leads")
    plain.pop("shown")
    assert forked == plain
    assert forked["argv"] == [str(path), "a", "b c"] and forked["environment"]["ONLY_HERE"] == "ä"


def test_a_module_and_a_console_script_are_forked(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    script(tmp_path / "mine", DESCRIBE, "__main__.py")
    console = script(tmp_path, f"#!{sys.executable}\nimport sys\nprint(sys.argv)\n", "tool")
    console.chmod(0o755)
    seen = []
    for way in ("auto", "off"):
        process = fer_run(children, sys.executable, "-m", "mine", "x", options=("--launcher", way), cwd=tmp_path)
        code, out, err = finish(process)
        assert code == 0 and (FORKED in err) == (way == "auto"), err
        seen.append({name: value for name, value in json.loads(out).items() if name not in ("leads", "shown")})
    assert seen[0] == seen[1]
    code, out, err = finish(fer_run(children, console, "y"))
    assert (code, out) == (0, f"{[str(console), 'y']}\n") and FORKED in err


def test_a_worker_is_not_imported_before_it_runs(children: Children) -> None:
    """Python warns where a module that is to run as ``__main__`` has been imported: it would be there twice."""
    mine = [name for name in launcher_imports.DEFAULT if name.startswith("fer.standby.")]
    assert mine
    Launcher(children, *(f"--import={name}" for name in (*mine, "fer.standby.lead", "fer.standby.follow")))
    code, out, err = finish(fer_run(children, sys.executable, "-m", "fer.standby.worker", "--help"))
    assert code == 0 and "--max-length" in out, err
    assert FORKED in err and "Warning" not in err, err


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit('told why')", 1, "told why"),
        ("raise ValueError('wrong')", 1, "ValueError: wrong"),
        ("os.kill(os.getpid(), 15)", 128 + 15, ""),
        ("os.kill(os.getpid(), 9)", 128 + 9, ""),
        ("raise KeyboardInterrupt", 128 + 2, "KeyboardInterrupt"),
        ("os._exit(9)", 9, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, ""),
    ],
)
def test_the_exit_code_is_the_engines(
    launcher: Launcher, children: Children, tmp_path: Path, ending: str, code: int, says: str
) -> None:
    path = script(tmp_path, f"import os, sys\nprint('begun', flush=True)\n{ending}\n")
    found, out, err = finish(fer_run(children, sys.executable, path))
    assert FORKED in err
    assert (found, out.splitlines()[0]) == (code, "begun") and says in err
    assert "fer/standby" not in err  # a traceback shows the program's frames only
    assert ("at the end" in out) == ("atexit" in ending)


def test_streams_may_be_files_and_pipes(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    path = script(tmp_path, "import sys\nprint(sys.stdin.read().upper(), end='')\nprint('aside', file=sys.stderr)\n")
    (tmp_path / "in").write_text("from a file\n")
    with open(tmp_path / "in") as source, open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        process = fer_run(children, sys.executable, path, stdin=source, stdout=out, stderr=err)
        assert process.wait(WAIT_S) == 0
    assert (tmp_path / "out").read_text() == "FROM A FILE\n"
    assert FORKED in (tmp_path / "err").read_text() and "aside" in (tmp_path / "err").read_text()


def test_further_descriptors_keep_their_numbers(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    path = script(tmp_path, "import os, sys\nos.write(int(sys.argv[1]), b'through')\n")
    reading, writing = os.pipe()
    try:
        process = fer_run(children, sys.executable, path, str(writing), pass_fds=[writing])
        code, _, err = finish(process)
        assert code == 0 and FORKED in err, err
        assert os.read(reading, 100) == b"through"
    finally:
        os.close(reading)
        os.close(writing)


def test_low_numbers_are_free_for_the_program(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    path = script(tmp_path, "import os\nfor number in range(3, 10):\n    os.write(number, b'%d ' % number)\n")
    command = [sys.executable, "-m", "fer", "run", "--", sys.executable, path]
    more = " ".join(f"{number}>&1" for number in range(3, 10))
    code, out, err = finish(children.spawn(["sh", "-c", f'exec "$@" {more}', "sh", *command]))
    assert (code, out) == (0, "3 4 5 6 7 8 9 ") and FORKED in err, err


SIGNALLED = """
import os, signal, sys
def told(number, frame):
    print(signal.Signals(number).name, flush=True)
for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH, signal.SIGCONT, signal.SIGINT):
    signal.signal(number, told)
print(os.getpid(), flush=True)
while True:
    signal.pause()
"""


def test_signals_reach_the_engine(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    process = fer_run(children, sys.executable, script(tmp_path, SIGNALLED))
    engine = int(read_line(process.stdout, WAIT_S))
    for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGWINCH", "SIGINT"):
        process.send_signal(getattr(signal, name))
        assert read_line(process.stdout, WAIT_S).strip() == name
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 128 + signal.SIGTERM
    assert await_end(engine)


def test_what_nohup_ignores_stays_ignored(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    path = script(tmp_path, "import signal\nprint(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)\n")
    process = fer_run(children, sys.executable, path, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    code, out, err = finish(process)
    assert (code, out) == (0, "True\n") and FORKED in err


class Terminal:
    """A pseudo-terminal whose session leader runs ``fer run`` as a shell does, in the foreground or as a job."""

    def __init__(self, arguments: list[str], *, background: bool = False) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            job = os.fork()
            if job == 0:
                os.setpgid(0, 0)
                if not background:
                    os.tcsetpgrp(0, os.getpid())
                signal.signal(signal.SIGTTOU, signal.SIG_DFL)
                os.execv(sys.executable, [sys.executable, "-m", "fer", "run", "--", *arguments])
            while os.WIFSTOPPED(status := os.waitpid(job, os.WUNTRACED)[1]):
                os.tcsetpgrp(0, os.getpid())
                os.write(1, b"the shell sees a stopped job\n")
                os.read(0, 1)  # the test looks at the engine meanwhile
                os.tcsetpgrp(0, job)
                os.killpg(job, signal.SIGCONT)
            os._exit(os.waitstatus_to_exitcode(status))
        self.seen = ""

    def until(self, text: str) -> str:
        """Read until a text was shown; everything shown so far."""
        poll = select.poll()
        poll.register(self.master, select.POLLIN)
        while text not in self.seen:
            assert poll.poll(WAIT_S * 1000), f"{text!r} was not shown: {self.seen}"
            try:
                piece = os.read(self.master, 4096)
            except OSError:  # nobody has the other side open any more
                piece = b""
            assert piece, f"{text!r} was not shown: {self.seen}"
            self.seen += piece.decode()
        return self.seen

    def status(self) -> int:
        """The exit code of what ran there."""
        assert await_end(self.pid)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self.master)


ON_TERMINAL = """
import os, signal, sys, time
signal.signal(signal.SIGWINCH, lambda *_: print(f"resized {os.get_terminal_size().columns}"))
signal.signal(signal.SIGCONT, lambda *_: print("goes on"))
print(f"terminal {sys.stdin.isatty()} {sys.stdout.isatty()} {sys.stdout.line_buffering}")  # in one piece
print(f"read {input()}")
try:
    while True:
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(5)
"""


def test_the_terminal_is_the_engines(launcher: Launcher, children: Children, tmp_path: Path) -> None:
    import fcntl
    import struct
    import termios

    terminal = Terminal([sys.executable, str(script(tmp_path, ON_TERMINAL))])
    try:
        terminal.until("terminal True True True")
        terminal.until(FORKED)  # two processes write, in any order
        os.write(terminal.master, b"a line\n")
        terminal.until("read a line")
        fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 77, 0, 0))
        terminal.until("resized 77")
        engine = int(terminal.until("\n").split(FORKED)[1].split()[0])
        os.write(terminal.master, b"\x1a")
        terminal.until("the shell sees a stopped job")
        wait_until(lambda: stopped(engine), "the engine stops too")
        os.write(terminal.master, b"\n")
        terminal.until("goes on")
        os.write(terminal.master, b"\x03")
        terminal.until("interrupted")
        assert terminal.status() == 5
    finally:
        terminal.close()


def test_a_background_job_that_might_read_the_terminal_is_plain(
    launcher: Launcher, children: Children, tmp_path: Path
) -> None:
    terminal = Terminal([sys.executable, str(script(tmp_path, "print('done')"))], background=True)
    try:
        assert "background job" in terminal.until("done")
        assert terminal.status() == 0
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["sh", "-c", "exit 4"], "is no Python program"),
        ([sys.executable, "-c", "raise SystemExit(4)"], "option -c is decided at its start"),
        ([sys.executable, "-O", "{script}"], "option -O is decided at its start"),
        (["{foreign}", "{script}"], "is no Python program"),
    ],
)
def test_what_cannot_be_forked_runs_plainly_and_says_why(
    launcher: Launcher, children: Children, tmp_path: Path, command: list[str], why: str
) -> None:
    path = script(tmp_path, "raise SystemExit(4)")
    foreign = tmp_path / "bin" / "python"
    foreign.parent.mkdir()
    foreign.symlink_to(os.path.realpath(sys.executable))  # the same program, but not the same environment
    words = [word.format(script=path, foreign=foreign) for word in command]
    code, _, err = finish(fer_run(children, *words))
    assert code == 4 and PLAIN in err and why in err


def test_a_missing_program_is_127_and_one_that_cannot_run_126(children: Children, tmp_path: Path) -> None:
    code, _, err = finish(fer_run(children, "no-such-program"))
    assert code == 127 and "no such program" in err
    code, _, err = finish(fer_run(children, script(tmp_path, "")))
    assert code == 126 and "cannot be executed" in err
    code, _, err = finish(fer_run(children))
    assert code == 2 and "there is no command" in err


def test_a_script_that_is_missing_or_wrong_is_pythons_to_complain_about(
    launcher: Launcher, children: Children, tmp_path: Path
) -> None:
    code, _, err = finish(fer_run(children, sys.executable, tmp_path / "missing.py"))
    assert code == 2 and "can't open file" in err and PLAIN in err
    code, _, err = finish(fer_run(children, sys.executable, script(tmp_path, "def (")))
    assert code == 1 and "SyntaxError" in err and PLAIN in err
    assert not launcher.leaked()
