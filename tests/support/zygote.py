"""A process that has imported torch and forks: children that start in milliseconds instead of seconds.

``fork("package.module", ...)`` gives what ``python -m package.module ...`` gives, with the imports already done. The
zygote runs no torch operation itself: threads of a parallel one would be missing in its children, which then hang.
What must see the start of an interpreter, its imports, or its very end is started the plain way.

It ends with the process that started it, and its children end with it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
START_S = 100.0
"""Seconds; importing torch takes most of it on a busy machine of two cores, importing Transformers twice as much."""

PRELOADED = (
    "fer.orchestrator",
    "fer.weights.stage",
    "fer.engines.module",
    "fer.engines.conformance_snapshot",
    "tests.support.recovery_model",
)
WITH_TRANSFORMERS = (
    "tests.support.engine_models",
    "tests.support.engine_cases",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.integrations.finegrained_fp8",
)
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # A library that asks on import whether there is a GPU must not open the driver: no child could use it any more.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""What the zygote itself runs with."""
_LIMIT = 1 << 17
_PR_SET_PDEATHSIG = 1

Stream = int | IO[Any]


class Forked:
    """A child of the zygote, as much of a ``subprocess.Popen`` as tests need."""

    def __init__(self, pid: int, pidfd: int, status: int, pipes: Mapping[str, IO[str]]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = (pipes.get(name) for name in ("stdin", "stdout", "stderr"))
        self._pidfd, self._status = pidfd, status

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._read_status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; without a limit only where a limit was kept before.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self._read_status(timeout) is None:
            raise subprocess.TimeoutExpired(f"forked child {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal; nothing happens if it has ended."""
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it ended meanwhile

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Everything that it still writes until it ends."""
        assert self.stdin is None
        deadline = time.monotonic() + timeout
        texts = {pipe.fileno(): b"" for pipe in (self.stdout, self.stderr) if pipe is not None}
        poll = select.poll()
        for number in texts:
            poll.register(number, select.POLLIN)
        ended = 0
        while ended < len(texts):
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise subprocess.TimeoutExpired(f"forked child {self.pid}", timeout)
            for number, _ in ready:
                piece = os.read(number, 1 << 16)
                texts[number] += piece
                if not piece:
                    poll.unregister(number)
                    ended += 1
        self.wait(max(0.0, deadline - time.monotonic()))
        out, err = (b"" if pipe is None else texts[pipe.fileno()] for pipe in (self.stdout, self.stderr))
        for pipe in (self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        return out.decode(), err.decode()

    def _read_status(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()  # not select(): a test may have filled the low numbers
            poll.register(self._status, select.POLLIN)
            if poll.poll(None if timeout is None else timeout * 1000):
                text = os.read(self._status, 32)
                assert text, f"the zygote died, and with it child {self.pid}"
                self.returncode = int(text)
                os.close(self._status)
                os.close(self._pidfd)
        return self.returncode


class Zygote:
    """The forking process, seen from the one that started it. It starts with the first child."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()  # an answer is that to the last request
        self._log: IO[bytes] | None = None

    def fork(
        self,
        module: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
        preload: tuple[str, ...] = (),
    ) -> Forked:
        """Fork a child in a session of its own that runs a module as ``python -m`` does.

        Args:
            env: its whole environment; this process's own if None. What is read at the import of a preloaded module
                must not depend on it.
            stdin, stdout, stderr: as for ``subprocess.Popen``.
            preload: modules the zygote has to import first, once for this child and all later ones.
        """
        pipes: dict[str, IO[str]] = {}
        theirs: list[int] = []
        try:
            for name, kind in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
                theirs.append(_their_end(name, kind, theirs, pipes))
            status, their_status = os.pipe()
            theirs.append(their_status)
            request = {
                "module": module,
                "arguments": arguments,
                "environment": dict(os.environ if env is None else env),
                "preload": preload,
            }
            with self._asking:
                pid, pidfd = self._ask(request, theirs)
        finally:
            for number in theirs:
                os.close(number)
        return Forked(pid, pidfd, status, pipes)

    def end(self) -> None:
        """End the zygote and its children."""
        if self._process is None:
            return
        self._sock.close()
        self._process.wait(START_S)
        self._process = None
        assert self._log is not None
        self._log.close()

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> tuple[int, int]:
        if self._process is None:
            self._start()
        socket.send_fds(self._sock, [json.dumps(request).encode()], descriptors)
        try:
            answer, received, _, _ = socket.recv_fds(self._sock, _LIMIT, 1)
        except TimeoutError:
            answer, received = b"", []
        if not received:
            assert self._log is not None
            self._log.seek(0)
            raise AssertionError(f"the zygote forked nothing: {answer.decode()}\n{self._log.read().decode()[-3000:]}")
        return int(answer), received[0]

    def _start(self) -> None:
        # Neither a test's places, by which its processes are found and killed, nor anything else of it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FER_")}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the zygote
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(START_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=environment | QUIET,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _their_end(name: str, kind: Stream, earlier: list[int], pipes: dict[str, IO[str]]) -> int:
    """The child's end of one of its standard streams; ours goes to ``pipes``."""
    if kind == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR)
    if kind == subprocess.STDOUT:
        return os.dup(earlier[1])
    if kind != subprocess.PIPE:
        return os.dup(kind if isinstance(kind, int) else kind.fileno())
    reading, writing = os.pipe()
    pipes[name] = os.fdopen(writing, "w") if name == "stdin" else os.fdopen(reading)
    return reading if name == "stdin" else writing


shared = Zygote()
"""The one of this process; ended by the session's fixture."""


# --- inside the zygote ---


class _Server:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._children: dict[int, tuple[int, int]] = {}  # pidfd -> pid and status pipe

    def serve(self) -> dict[str, Any] | None:
        """Fork as asked until the other side is gone. Returns in each child with what it has to do, at the end None."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number in self._children:
                    poll.unregister(number)
                    self._bury(number)
                    continue
                message, received, _, _ = socket.recv_fds(self._sock, _LIMIT, 4)
                if not message:
                    self._end()
                    return None
                request = json.loads(message)
                pidfd = self._fork(request, received)
                if pidfd is None:
                    return dict(request)
                poll.register(pidfd, select.POLLIN)

    def _fork(self, request: dict[str, Any], received: list[int]) -> int | None:
        """The new child's pidfd; None in the child."""
        for name in request["preload"]:
            if name not in sys.modules:
                importlib.import_module(name)
                _freeze()
        *streams, status = received
        zygote, pid = os.getpid(), os.fork()
        if pid == 0:
            self._forget(status)
            _become(streams, request["environment"], zygote)
            return None
        for number in streams:
            os.close(number)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = (pid, status)
        socket.send_fds(self._sock, [str(pid).encode()], [pidfd])
        return pidfd

    def _forget(self, status: int) -> None:
        """Close, in a child, what is the zygote's."""
        self._sock.close()
        os.close(status)
        for pidfd, (_, pipe) in self._children.items():
            os.close(pidfd)
            os.close(pipe)
        self._children.clear()

    def _bury(self, pidfd: int) -> None:
        pid, status = self._children.pop(pidfd)
        _, how = os.waitpid(pid, 0)
        try:
            os.write(status, str(os.waitstatus_to_exitcode(how)).encode())
        except BrokenPipeError:
            pass  # nobody wants to know
        os.close(status)
        os.close(pidfd)

    def _end(self) -> None:
        for pidfd in list(self._children):
            try:
                os.killpg(self._children[pidfd][0], signal.SIGKILL)
            except ProcessLookupError:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # it has not got to setsid() yet
            self._bury(pidfd)


def _become(streams: list[int], environment: Mapping[str, str], parent: int) -> None:
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)


def _freeze() -> None:
    """Keep collections in the children from touching, and so copying, the pages of what is loaded here."""
    gc.collect()
    gc.freeze()


def main() -> None:
    """Serve on the descriptor given as argument; in a child, go on as the module that was asked for."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    _freeze()
    request = _Server(sock).serve()
    if request is None:
        os._exit(0)
    sys.argv[1:] = request["arguments"]
    _end(_run(request["module"]))


def _run(module: str) -> int:
    """Run a module as the interpreter does; the exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but leave to the kernel what it would destroy at last: thousands of modules."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
