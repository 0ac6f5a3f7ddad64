"""Compiled kernels on one GPU: a model under torch.compile and SGLang, cold, with moved caches, and from FER's archive.

python -m bench.kernels_gpu [PART ...] [--minutes 9] [--layers 8]
    parts: small, 8b (TransformersEngine under torch.compile), sglang, fp8 (need --sglang-env, and a model each)
    --sglang-env FILE    shell file after which `python -m sglang.launch_server` works
    --model, --fp8-model folders of checkpoints for SGLang

Each step has a limit of its own and its figures are written at once: a run that is stopped has told what it knew. Cold
starts and FER's come first, those with moved caches have what time is left.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Results

ROOT = Path(__file__).resolve().parent.parent
PROMPT = [785, 662, 315, 962, 374, 120, 11, 323, 279, 672, 315, 153, 374, 5, 6, 7, 8]
STEPS = 16


@dataclass
class Step:
    """One row: the seconds it takes at most, at least, and leaves for a later one; what it does with its limit.

    Attributes:
        rank: steps of rank 0 come first, in every part.
    """

    name: str
    limit_s: float
    work: Callable[[float], object]
    least_s: float
    needs: str = ""
    reserve_s: float = 0.0
    rank: int = 0


class Plan:
    """Steps in the order of their worth, within one limit for all."""

    def __init__(self, results: Results, minutes: float) -> None:
        self.results, self.deadline = results, time.monotonic() + 60 * minutes
        self.steps: list[Step] = []
        self.done: set[str] = set()

    def add(self, name: str, limit_s: float, work: Callable[[float], object], **more: Any) -> None:
        """One more step; see :class:`Step`."""
        self.steps.append(Step(name, limit_s, work, **more))

    def run(self) -> None:
        """Every step that there is time for; a failure is a row, and costs those that need the step."""
        self.steps.sort(key=lambda step: step.rank)
        total = sum(step.limit_s for step in self.steps)
        left = self.deadline - time.monotonic()
        print(f"# plan: {len(self.steps)} steps, {total:.0f} s at most, {left:.0f} s there are")
        for step in self.steps:
            print(f"#   {step.limit_s:5.0f} s  {step.name}", flush=True)
        for step in self.steps:
            left = self.deadline - time.monotonic() - step.reserve_s
            if step.needs and step.needs not in self.done:
                self.results.add(step.name, f"left out: {step.needs} is missing")
            elif left < step.least_s:
                self.results.add(step.name, f"left out: {left:.0f} s are left")
            else:
                begin = time.monotonic()
                try:
                    step.work(min(step.limit_s, left))
                    self.done.add(step.name)
                except Exception as error:  # the next row is as good as it was
                    self.results.add(f"{step.name}: failed", f"{type(error).__name__}: {error}"[:2000])
                print(f"#   {step.name}: {time.monotonic() - begin:.1f} s", flush=True)
            self.results.save()


def run(command: list[str], environ: Mapping[str, str], limit_s: float, log: Path) -> str:
    """A process's standard output; RuntimeError with the end of its log where it fails or takes too long.

    Through files: torch's compile workers may hold a pipe open for a while after the engine has ended.
    """
    said = log.with_suffix(".out")
    with log.open("wb") as errors, said.open("wb") as out:
        child = subprocess.Popen(
            command, cwd=ROOT, env=dict(environ), stdout=out, stderr=errors, start_new_session=True
        )
        try:
            status = child.wait(limit_s)
            why = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"not done in {limit_s:.0f} s"
        finally:
            end(child)
    if why:
        raise RuntimeError(f"{why}: {log.read_bytes()[-1500:].decode(errors='replace')}")
    return said.read_text()


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait(30)


def environment(base: Path, caches: Path) -> dict[str, str]:
    """Of an engine's process: every cache below one folder, bytecode kept, FER to be had."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FER_", "TRITON_"))}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    for folder in (caches / "triton", caches / "inductor", base / "pyc"):
        folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    return {
        **kept,
        "PYTHONPATH": path,
        "PYTHONPYCACHEPREFIX": str(base / "pyc"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_DEFAULT_FP_FUSION": "1",
        "HF_HUB_OFFLINE": "1",
    }


def logs() -> Path:
    """Where processes' own words go."""
    where = Path(os.environ.get("FER_BENCH_OUT") or tempfile.gettempdir(), "kernels_gpu_logs")
    where.mkdir(parents=True, exist_ok=True)
    return where


# -- TransformersEngine under torch.compile


def make_model(folder: Path, *, layers: int, small: bool, device: str) -> Path:
    """A Qwen3 with random weights: of 8B shape with as many layers, or a small one."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = (
        {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4}
        if small
        else {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
    )
    config = Qwen3Config(
        **shape,
        head_dim=64 if small else 128,
        num_hidden_layers=layers,
        vocab_size=2048 if small else 151936,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        dtype="bfloat16",
        architectures=["Qwen3ForCausalLM"],
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    made = {}
    generator = torch.Generator(device=device).manual_seed(0)
    for name, tensor in model.state_dict().items():
        if name.endswith("norm.weight"):
            made[name] = torch.ones(tensor.shape, dtype=torch.bfloat16)
        else:
            values = torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)
            made[name] = values.normal_(0, 0.02, generator=generator).cpu()
    folder.mkdir(parents=True)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder


def engine(request: dict[str, Any]) -> None:
    """One start in this process, stock or by FER; prints what it took and a digest of all logits."""
    import hashlib
    import threading

    import torch

    import fer
    from fer.engines.transformers import TransformersEngine

    made = TransformersEngine(
        request["folder"], device=request["device"], compile=request["backend"], max_length=256, attention="sdpa"
    )
    made.import_code()
    torch.zeros(1, device=made.device)
    begin = time.perf_counter()
    answer: dict[str, Any] = {}
    if request["fer"]:
        options = fer.Options(home=Path(request["home"]), weights=False, cudagraph=False, distinit=False)
        report = fer.recover(made, options)
        told = report.stages["kernels"]
        answer["kernels"] = {"path": told.path, "why": told.why, **told.details}
        answer["phases"] = {span.name: round(span.seconds, 3) for span in report.phases}
    else:
        made.adopt(made.load())
        made.allocate_kv()
        loaded = time.perf_counter()
        made.warm_up()
        answer["phases"] = {"graphs": round(time.perf_counter() - loaded, 3)}
    answer["start_s"] = round(time.perf_counter() - begin, 3)
    digest = hashlib.sha256()
    steps = [made.prefill(PROMPT), *(made.advance(token) for token in PROMPT[:STEPS])]
    for logits in steps:
        digest.update(logits.float().cpu().numpy().tobytes())
    answer["logits"] = digest.hexdigest()
    counters = torch._dynamo.utils.counters
    answer["inductor"] = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
    answer["programs"] = counters["stats"]["unique_graphs"]
    for thread in threading.enumerate():  # what was compiled is written back by a process of its own
        if thread.name in ("fer-kernels-finish", "fer-kernels-writer"):
            thread.join(60)
    for thread in threading.enumerate():
        if thread.name == "fer-kernels-writer":
            thread.join(60)
    print(json.dumps(answer))


class CompiledModel:
    """The rows of one model under torch.compile."""

    def __init__(self, plan: Plan, base: Path, name: str, arguments: argparse.Namespace, *, layers: int) -> None:
        self.plan, self.base, self.name = plan, base / name, name
        self.arguments, self.layers = arguments, layers
        self.logits: dict[str, str] = {}

    def schedule(self, limit_s: float) -> None:
        """A cold start by FER, whose caches are then moved; the archive in another place, first of what matters."""
        name, add = self.name, self.plan.add
        add(f"{name}: model", 90, self.model, least_s=10)
        add(f"{name}: cold", limit_s, self.cold, least_s=30, needs=f"{name}: model")
        add(f"{name}: FER, archive in another place", limit_s, self.restored, least_s=20, needs=f"{name}: cold")
        add(f"{name}: stock, caches moved", limit_s, self.moved, least_s=20, needs=f"{name}: cold", rank=1)
        if name == "small":
            add(f"{name}: stock, cold", limit_s, self.stock, least_s=20, needs=f"{name}: cold", rank=2)
            add(f"{name}: stock, same place", limit_s, self.again, least_s=20, needs=f"{name}: stock, cold", rank=2)

    def model(self, limit_s: float) -> None:
        begin = time.monotonic()
        request = {"folder": str(self.base / "model"), "layers": self.layers, "small": self.name == "small"}
        command = [sys.executable, "-m", "bench.kernels_gpu", "model", json.dumps(request | {"device": self.device})]
        run(command, environment(self.base.parent, self.base / "none"), limit_s, logs() / f"{self.name}-model.log")
        size = (self.base / "model" / "model.safetensors").stat().st_size / 2**30
        self.plan.results.add(
            f"{self.name}: model", f"{self.layers} layers, {size:.2f} GiB, {time.monotonic() - begin:.1f} s"
        )

    def cold(self, limit_s: float) -> None:
        self._row("cold", self.base / "cold", limit_s, fer=True)

    def restored(self, limit_s: float) -> None:
        self._row("FER, archive in another place", self.base / "restored", limit_s, fer=True)

    def moved(self, limit_s: float) -> None:
        (self.base / "cold").rename(self.base / "moved")
        self._row("stock, caches moved", self.base / "moved", limit_s, fer=False)

    def stock(self, limit_s: float) -> None:
        self._row("stock, cold", self.base / "stock", limit_s, fer=False)

    def again(self, limit_s: float) -> None:
        self._row("stock, same place", self.base / "stock", limit_s, fer=False)

    @property
    def device(self) -> str:
        return str(self.arguments.device)

    def _row(self, name: str, caches: Path, limit_s: float, *, fer: bool) -> None:
        environ = environment(self.base.parent, caches)
        lookups = self.base / "lookups" / name.replace(" ", "-")
        lookups.mkdir(parents=True)
        if not fer:
            environ |= {"TRITON_CACHE_MANAGER": "bench.kernels_lookups:Telling", "BENCH_LOOKUPS": str(lookups)}
        request = {
            "folder": str(self.base / "model"),
            "device": self.device,
            "backend": self.arguments.backend,
            "fer": fer,
            "home": str(self.base / "home"),
        }
        command = [sys.executable, "-m", "bench.kernels_gpu", "engine", json.dumps(request)]
        log = logs() / f"{self.name}-{name.replace(' ', '-').replace(',', '')}.log"
        answer = json.loads(run(command, environ, limit_s, log).splitlines()[-1])
        from bench.kernels_lookups import counted

        answer["triton"] = counted(
            Path(answer["kernels"]["record"]) if answer.get("kernels", {}).get("record") else lookups
        )
        self.logits[name] = answer.pop("logits")
        same = len(set(self.logits.values())) == 1
        answer["logits"] = f"{self.logits[name][:12]}, {'bitwise the same in all rows' if same else 'DIFFERENT'}"
        self.plan.results.add(f"{self.name}: {name}", answer)


# -- the whole


def main(arguments: argparse.Namespace) -> None:
    results = Results("kernels_gpu")
    plan = Plan(results, arguments.minutes)
    with tempfile.TemporaryDirectory(prefix="fer-bench-", dir=arguments.scratch, ignore_cleanup_errors=True) as folder:
        base = Path(folder)
        parts = arguments.parts or ["small", "8b", *(["sglang", "fp8"] if arguments.sglang_env else [])]
        for part in parts:
            if part == "small":
                CompiledModel(plan, base, part, arguments, layers=2).schedule(50)
            elif part == "8b":
                CompiledModel(plan, base, part, arguments, layers=arguments.layers).schedule(120)
            else:
                from bench.kernels_sglang import Served

                model = arguments.fp8_model if part == "fp8" else arguments.model
                Served(plan, base / part, part, Path(arguments.sglang_env), model, arguments).schedule()
        plan.run()
    results.save()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.kernels_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["small", "8b", "sglang", "fp8", []], help="all by default")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together")
    parser.add_argument("--layers", type=int, default=8, help="of the model of 8B shape; the 8B has 36")
    parser.add_argument("--device", default="cuda:0", help="cpu tries the steps out where no GPU is")
    parser.add_argument("--backend", default="inductor", help="torch's name of the compiler")
    parser.add_argument("--scratch", default=None, help="folder for models and caches")
    parser.add_argument("--sglang-env", default="", help="shell file after which SGLang can be started")
    parser.add_argument("--model", default="", help="checkpoint for SGLang")
    parser.add_argument("--fp8-model", default="", help="block-wise FP8 checkpoint for SGLang")
    parser.add_argument(
        "--fp8-compile-s", type=float, default=150.0, help="for compiling in block-wise FP8; 300 at most"
    )
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine(json.loads(sys.argv[2]))
    elif sys.argv[1:2] == ["model"]:
        wanted = json.loads(sys.argv[2])
        make_model(Path(wanted["folder"]), layers=wanted["layers"], small=wanted["small"], device=wanted["device"])
    else:
        main(parsed())
