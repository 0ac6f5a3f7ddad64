"""What ``fer demo`` does, step by step, each engine and the keeper being processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from fer.cli.output import count, emit, err, escape, out, save, size
from fer.cli.processes import DEATH_LIMIT_S, kill_and_wait, line_of, sweep, terminated_like_interrupted
from fer.errors import FerError, IntegrityError, from_dict
from fer.report import Report, chrome_trace, comparison_table

START_LIMIT_S = 1800.0
"""Seconds an engine may take to start: large models load for many minutes from slow disks."""


@dataclass(kw_only=True)
class EngineStart:
    """One start of the engine, as the demo saw it from outside."""

    label: str
    process: subprocess.Popen[bytes]
    report: Report
    answer: str
    tokens: list[int]
    device: str

    @property
    def path(self) -> str:
        return self.report.stages["weights"].path

    @property
    def why(self) -> str:
        return self.report.stages["weights"].why

    def to_json(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "pid": self.process.pid,
            "device": self.device,
            "path": self.path,
            "why": self.why,
            "answer": self.answer,
            "tokens": self.tokens,
            "report": self.report.to_json(),
        }


@dataclass
class Stage:
    """Where the demo happens: its own runtime directory, and all the processes it started."""

    runtime_dir: Path
    home: Path
    model: Path
    device: str
    question: str
    console: Console
    engines: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.console.print(text)

    def start(self, label: str) -> EngineStart:
        """Start an engine and wait for its answer.

        Raises:
            FerError: the engine's own error, or that it ended without a word.
            WaitTimeout: no answer within :data:`START_LIMIT_S`.
        """
        command = [sys.executable, "-m", "fer.cli.demo_engine", "--model", str(self.model), "--device", self.device]
        command += ["--question", self.question, "--label", label]
        environment = os.environ | {"FER_RUNTIME_DIR": str(self.runtime_dir), "FER_HOME": str(self.home)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self.engines.append(process)
        with self.console.status(f"starting ({label})"):
            said = json.loads(line_of(process, START_LIMIT_S) or "{}")
        if "error" in said:
            raise from_dict(said["error"])
        if not said:
            raise FerError(
                f"the {label} engine ended without an answer",
                why=f"its exit code was {process.wait(DEATH_LIMIT_S)}",
                fix="Its own message is above",
            )
        report = Report.from_json(said["report"])
        started = EngineStart(
            label=label,
            process=process,
            report=report,
            answer=said["answer"],
            tokens=said["tokens"],
            device=said["device"],
        )
        weights_s = report.phase_s("weights")
        self.say(f"  pid {process.pid}: weights [bold]{started.path}[/] in {weights_s:.3f} s of {report.total_s:.2f} s")
        self.say(f"  {escape(started.why)}")
        self.say(f"  {_steps(report)}")
        self.say(f"  answer: [green]{escape(started.answer)}[/]")
        return started

    def kill(self, start: EngineStart) -> None:
        """SIGKILL an engine, as a crash would."""
        start.process.send_signal(signal.SIGKILL)
        start.process.wait(DEATH_LIMIT_S)
        self.say(f"SIGKILL to engine {start.process.pid}: dead.\n")

    def kill_keeper(self) -> None:
        """SIGKILL the keeper, and wait until its successor has everything back."""
        from fer.weights.client import KeeperClient

        with KeeperClient.connect(self.runtime_dir, label="fer demo") as client:
            old = client.status()
        kill_and_wait(old.pid)
        # The listening socket lives on in the store: this connect waits in its queue for the successor.
        with KeeperClient.connect(self.runtime_dir, label="fer demo", timeout=DEATH_LIMIT_S) as client:
            new = client.status()
        held = sum(edition.bytes for edition in new.editions)
        self.say(
            f"SIGKILL to keeper {old.pid}: dead. Its successor {new.pid} holds {count(len(new.editions), 'edition')}, "
            f"{size(held)}, by the descriptors that its {new.protection} kept.\n"
        )

    def end(self) -> None:
        """End everything that was started, in whatever state it is."""
        for process in self.engines:
            process.kill()
            process.wait(DEATH_LIMIT_S)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        from fer.weights.client import KeeperClient

        # Nothing listens where no engine came far enough to start a keeper.
        with contextlib.suppress(FerError), KeeperClient.connect(self.runtime_dir, label="fer demo") as client:
            client.stop(force=True)
        sweep(self.runtime_dir)
        shutil.rmtree(self.runtime_dir, ignore_errors=True)


def _steps(report: Report) -> str:
    """The steps of the weights phase with their times, in order."""
    steps = [span for span in report.spans if span.parent == "weights"]
    return ", ".join(f"{span.name} {1000 * span.seconds:.1f} ms" for span in sorted(steps, key=lambda span: span.start))


def run(
    model: Path | None,
    *,
    device: str,
    question: str,
    html: Path | None,
    trace: Path | None,
    home: Path | None,
    as_json: bool,
) -> None:
    """Run the demo and print what it found.

    Args:
        html: file for the waterfall, by default one in ``home``.
        trace: file for a Chrome trace of all starts; by default none is written.
        home: folder of the demonstration model, None: where :func:`fer.paths.home` says.

    Raises:
        IntegrityError: a recovered engine answered with other tokens.
        FerError: a start failed, or loaded where it should have attached.
    """
    from fer import paths
    from fer.waterfall import render

    home = home or paths.home()
    console = err() if as_json else out()
    if model is None:
        with console.status("writing the demonstration model (once)"):
            model = demonstration_model(home)
        console.print("Model: SmolLM2-135M-Instruct")
    else:
        console.print(f"Model: {escape(str(model))}")
    page = html or home / "demo" / "waterfall.html"
    with terminated_like_interrupted():
        runtime_dir = Path(tempfile.mkdtemp(prefix="fer-demo-"))
        stage = Stage(runtime_dir, home, model, device, question, console)
        try:
            starts = _play(stage)
        finally:
            stage.end()
    _check(starts)
    reports = [start.report for start in starts]
    save(page, render(reports))
    if trace is not None:
        save(trace, json.dumps(chrome_trace(reports)))
    data = {"same_tokens": True, "starts": [start.to_json() for start in starts], "html": str(page)}

    def text(console: Console) -> None:
        print(comparison_table(*reports))
        console.print(f"\nAll three engines gave the same {len(starts[0].tokens)} tokens.")
        console.print(f"Waterfall: {escape(str(page))}")
        if trace is not None:
            console.print(f"Trace: {escape(str(trace))}")

    emit(as_json, data, text)


def _play(stage: Stage) -> list[EngineStart]:
    stage.say(f"Question: {escape(stage.question)}\n")
    stage.say("[bold]1. Cold start:[/] nothing is kept yet; the engine loads from disk and publishes its weights")
    cold = stage.start("cold")
    stage.kill(cold)
    stage.say("[bold]2. Recovered start:[/] a new process, the weights are attached where they are")
    recovered = stage.start("recovered")
    stage.kill(recovered)
    stage.kill_keeper()
    stage.say("[bold]3. Recovered start after the keeper's death[/]")
    again = stage.start("after keeper's death")
    stage.kill(again)
    return [cold, recovered, again]


def _check(starts: list[EngineStart]) -> None:
    cold, *recovered = starts
    for start in recovered:
        if start.path != "attached":
            raise FerError(
                f"the start {start.label!r} did not attach the weights",
                why=start.why,
                fix="See fer doctor",
                path=start.path,
            )
        if start.tokens != cold.tokens:
            raise IntegrityError(
                f"the start {start.label!r} gave other tokens than the cold start",
                why=f"{start.tokens} in place of {cold.tokens}",
                fix="Please report this with the model's name",
            )


def demonstration_model(home: Path) -> Path:
    """SmolLM2-135M, written in a process of its own: this one stays light, and may be interrupted at any moment."""
    program = """if True:
        import json, sys
        from pathlib import Path
        from fer.engines.demo_model import smollm2
        from fer.errors import FerError
        try:
            made = {"folder": str(smollm2(Path(sys.argv[1])))}
        except FerError as error:
            made = {"error": error.to_dict()}
        print(json.dumps(made))
    """
    done = subprocess.run([sys.executable, "-c", program, str(home)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FerError(
            "the demonstration model could not be written",
            why=done.stderr.strip().rpartition("\n")[2],
            fix="Install what it needs with scripts/install, or give --model a Hugging Face folder",
        )
    made = json.loads(done.stdout.splitlines()[-1])
    if "error" in made:
        raise from_dict(made["error"])
    return Path(made["folder"])
