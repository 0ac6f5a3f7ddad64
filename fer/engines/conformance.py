"""The suite every engine adapter must pass.

An adapter conforms if an engine that attached kept weights cannot be told from one that loaded them. The suite starts
the engine in processes of its own, each killed by SIGKILL: once without FER, once publishing, twice attaching, and
compares what they see, place by place and bit by bit::

    check_engine("my_package.engines:make", {"folder": "/models/small"}, probe="my_package.engines:outputs")

The comparison walks the module by itself (:mod:`fer.engines.conformance_snapshot`): not through the manifest, and not
through the digest that attaching relies on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fer.errors import FerError

STEPS = ("plain", "publish", "attach", "attach-again")
"""The processes of one check, in order."""

SHOWN = 20
"""Differences that a failure spells out."""


class NotConforming(AssertionError):
    """An adapter failed the suite. ``findings`` says where, one line each."""

    def __init__(self, findings: Sequence[str]) -> None:
        self.findings = list(findings)
        shown = "\n".join(f"  {finding}" for finding in self.findings[:SHOWN])
        more = f"\n  and {len(self.findings) - SHOWN} more" if len(self.findings) > SHOWN else ""
        super().__init__(f"{len(self.findings)} findings:\n{shown}{more}")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the processes of a passed check saw: step to one result a rank, as plain data."""

    results: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def check_engine(
    make: Callable[..., Any] | str,
    arguments: Mapping[str, Any] | None = None,
    *,
    probe: Callable[..., Any] | str = "",
    world: int = 1,
    unsupported: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    read_only: bool = True,
    timeout_s: float = 300.0,
) -> Outcome:
    """Check one engine; must be called where no engine runs with the same ``FER_RUNTIME_DIR``.

    Args:
        make: module-level function (or ``"module:function"``) that makes the engine, in every process anew.
        arguments: for ``make``, as JSON can hold them.
        probe: module-level function from the started engine to named tensors: its outputs, compared bitwise.
        world: ranks of the launch; each gets ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and
            ``MASTER_PORT``.
        unsupported: arguments for ``make`` that give an engine whose quantisation must be refused before any load.
        options: settings for ``fer.recover``, such as ``{"slab_bytes": 1 << 20}``. Not the transport
            cuda-ipc: its memory ends with the publisher, and every process here is killed before the next starts.
        read_only: whether attached memory must be mapped read-only.
        timeout_s: seconds that one process may take.

    Raises:
        NotConforming: with every finding.
        FerError: a process failed or took too long; says what it printed last.
    """
    suite = _Suite(_reference(make), dict(arguments or {}), _reference(probe), dict(options or {}), world, timeout_s)
    results = suite.run(unsupported)
    findings = [
        finding
        for rank in range(world)
        for finding in _judge({step: ranks[rank] for step, ranks in results.items() if step in STEPS}, read_only)
    ]
    for result in results.get("refuse", ()):
        if not result["refused"]:
            findings.append(f"an unsupported quantisation was not refused: {result['other']}")
        if result["loads"]:
            findings.append("load() was called before an unsupported quantisation was refused")
    if findings:
        raise NotConforming(findings)
    return Outcome(results=results)


def compare(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    """Every place where two snapshots differ, one line each, in order."""
    return [
        f"{path or '(module)'}: {left.get(path, 'absent')} became {right.get(path, 'absent')}"
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


def _judge(seen: Mapping[str, Mapping[str, Any]], read_only: bool) -> list[str]:
    """Findings about one rank."""
    plain = seen["plain"]
    findings = []
    for step, path in zip(STEPS, ("off", "loaded", "attached", "attached"), strict=True):
        if seen[step]["path"] != path:
            findings.append(f"{step}: its path was {seen[step]['path']}, not {path} ({seen[step]['why']})")
    if seen["publish"]["details"].get("published") != "True":
        findings.append(f"publish: nothing was published ({seen['publish']['why']})")
    for step, result in seen.items():
        findings += [f"{step}: {path} holds no bytes" for path in result["on_meta"]]
        if not result["identity_stable"]:
            findings.append(f"{step}: identity() says two things when asked twice")
        if result["identity"] != plain["identity"]:
            findings.append(f"{step}: identity() differs from that of another process")
        if step == "plain":
            continue
        findings += [f"{step}: {difference}" for difference in compare(plain["places"], result["places"])]
        findings += [f"{step}: output {line}" for line in compare(plain["outputs"], result["outputs"])]
        if read_only:
            findings += _rights(step, result, seen["attach"]["written"])
    return findings


def _rights(step: str, result: Mapping[str, Any], mutable: Sequence[str]) -> list[str]:
    """Kept memory must be read-only, and what the engine writes must not be."""
    findings = []
    for path, writable in result["writable"].items():
        if any(fnmatchcase(path, name) for name in mutable):
            if step != "publish" and not writable:
                findings.append(f"{step}: {path} is declared mutable and cannot be written")
        elif writable:
            findings.append(f"{step}: {path} could be written")
    return findings


@dataclass(frozen=True)
class _Suite:
    make: str
    arguments: dict[str, Any]
    probe: str
    options: dict[str, Any]
    world: int
    timeout_s: float

    def run(self, unsupported: Mapping[str, Any] | None) -> dict[str, list[dict[str, Any]]]:
        with tempfile.TemporaryDirectory(prefix="fer-conformance-") as folder:
            out = Path(folder)
            results = {"plain": self._step("plain", out, {**self.options, "mode": "off"})}
            # Outputs of the publisher come from the memory that it handed over.
            for step in STEPS[1:]:
                results[step] = self._step(step, out, self.options)
            if unsupported is not None:
                refusing = _Suite(self.make, dict(unsupported), "", self.options, 1, self.timeout_s)
                results["refuse"] = refusing._step("refuse", out, self.options)
            return results

    def _step(self, step: str, out: Path, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        job = {
            "step": step,
            "make": self.make,
            "arguments": self.arguments,
            "probe": self.probe,
            "options": dict(options),
            "out": str(out),
            "write": step == "attach",
        }
        port = _free_port() if self.world > 1 else 0
        processes = [self._spawn(job, rank, port, out) for rank in range(self.world)]
        try:
            for rank, process in enumerate(processes):
                self._await(step, rank, process, out)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads((out / f"{step}.{rank}.json").read_text()) for rank in range(self.world)]

    def _spawn(self, job: Mapping[str, Any], rank: int, port: int, out: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        if self.world > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world)}
            environment |= {"LOCAL_WORLD_SIZE": str(self.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with (out / f"{job['step']}.{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "fer.engines.conformance_worker", json.dumps(job)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _await(self, step: str, rank: int, process: subprocess.Popen[bytes], out: Path) -> None:
        why = ""
        try:
            code = process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            why = f"it took more than {self.timeout_s:g} s"
        else:
            if code == -signal.SIGKILL and (out / f"{step}.{rank}.json").exists():
                return
            why = f"it ended with code {code}"
        tail = (out / f"{step}.{rank}.log").read_text(errors="replace")[-3000:]
        raise FerError(f"the engine's process of step {step} failed", why=f"{why}; it printed:\n{tail}")


def _reference(function: Callable[..., Any] | str) -> str:
    """``module:function`` of a module-level function."""
    if isinstance(function, str):
        return function
    return f"{function.__module__}:{function.__qualname__}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
