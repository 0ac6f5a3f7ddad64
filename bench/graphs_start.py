"""CUDA graphs in whole starts: what saving and proving cost a serving engine, what restoring saves the next one.

python -m bench.graphs_start [FOLDER]   # makes a model of 8B shape in FOLDER (16 GB), then starts it in processes

Every start is a process of its own. The first one publishes the weights, captures, saves, and decodes while its child
proves the archive; the next ones restore. The last two are beside them: FER without graphs kept, and no FER at all.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256]
LENGTH = 512
PROMPTS = [[1, 5, 9, 200, 31], [1, 7], [1, 44, 300, 8, 90, 17, 6]]
RESTORES = 2


def make(folder: Path, layers: int) -> None:
    """A Qwen3 of 8B shape with random weights, made on the GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = None  # random weights end nothing
    model.save_pretrained(folder)


def _decode(engine: Any, seconds: float, until: Any = None) -> list[tuple[float, float]]:
    """Decode at batch size 32 for a while, or until ``until()``: when each step ended and how long it took."""
    decode = engine.graphs()
    for row in range(32):
        decode.prompt(row, PROMPTS[row % len(PROMPTS)])
    begin, found = time.perf_counter(), []
    asked, over = begin, False
    while not over:
        if int(decode.slots.position[0]) > LENGTH - 8:
            decode.slots.position[:32] = 8
        at = time.perf_counter()
        decode.advance(32)
        now = time.perf_counter()
        found.append((now, now - at))
        if until is not None and now - asked > 0.05:
            asked, over = now, until()
        over = over or now - begin > (seconds if until is None else 200)
    return found


def start(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """One start; the row it prints."""
    import fer
    from fer.cudagraph import state, store
    from fer.cudagraph.archive import facts_of
    from fer.engines.transformers import TransformersEngine

    engine = TransformersEngine(folder, device="cuda:0", max_length=LENGTH, batch_sizes=SIZES)
    begin = time.perf_counter()
    report = fer.recover(engine, **asked.get("options", {}))
    row: dict[str, Any] = {"recover_s": time.perf_counter() - begin}
    row["answers"] = engine.generate_many(PROMPTS, 24)
    row["first_answers_s"] = time.perf_counter() - begin
    decode = engine.graphs()
    if decode is not None and decode.session is not None:
        decode.session.wait(60)
    stage = report.stages["cudagraph"]
    row |= {"path": stage.path, "why": stage.why, "stage": dict(stage.details)}
    row["weights"] = report.stages["weights"].path
    row["spans"] = {span.path: [round(span.start / 1e9, 3), round(span.seconds, 4)] for span in report.spans}
    if asked.get("proof"):

        def known() -> bool:
            path = store.find()[0]
            return state.load(path, facts_of(path)[1]).proof != "unproven"

        serving = time.perf_counter()
        during = _decode(engine, 0, known)
        row["proof_s"] = time.perf_counter() - serving
        row["proof"] = store.look(store.find()[0]).proof
        row["archive_bytes"] = store.find()[0].stat().st_size
        row["step_ms_during_proof"] = _spread(during)
        row["step_ms_after_proof"] = _spread(_decode(engine, 5.0))
    else:
        row["step_ms"] = _spread(_decode(engine, 2.0))
    return row


def _spread(steps: list[tuple[float, float]]) -> dict[str, float]:
    values = sorted(seconds * 1e3 for _, seconds in steps)
    if not values:
        return {}
    high = values[min(len(values) - 1, int(len(values) * 0.99))]
    total = sum(values)
    return {
        "steps": len(values),
        "median": round(statistics.median(values), 3),
        "p99": round(high, 3),
        "worst": round(values[-1], 3),
        "steps_per_s": round(1e3 * len(values) / total, 2),
    }


def _child(folder: Path, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "bench.graphs_start", "start", str(folder), json.dumps(asked)],
        check=False,
        capture_output=True,
        text=True,
        timeout=400,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        print(name, "failed:", done.returncode, done.stdout[-2000:], done.stderr[-4000:])
        return {}
    row: dict[str, Any] = json.loads(lines[-1])
    brief = {key: value for key, value in row.items() if key not in ("answers", "spans")}
    print(name, json.dumps(brief), flush=True)
    return row


def main() -> int:
    if sys.argv[1:2] == ["start"]:
        print(json.dumps(start(Path(sys.argv[2]), json.loads(sys.argv[3])), default=str), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1:2] == ["make"]:
        make(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp/fer-graphs-model")
    with tempfile.TemporaryDirectory(prefix="fer-bench-") as place:
        os.environ |= {"FER_HOME": f"{place}/home", "FER_RUNTIME_DIR": f"{place}/run"}
        try:
            return compare(folder)
        finally:
            subprocess.run([sys.executable, "-m", "fer", "keeper", "stop", "--force"], check=False)


def compare(folder: Path) -> int:
    """All starts, one after another."""
    if not (folder / "config.json").exists():
        subprocess.run(
            [sys.executable, "-m", "bench.graphs_start", "make", str(folder), os.environ.get("FER_BENCH_LAYERS", "36")],
            check=True,
        )
    rows = {"saves": _child(folder, "saves", {"proof": True})}
    for number in range(RESTORES):
        rows[f"restores {number}"] = _child(folder, f"restores {number}", {})
    rows["checks all"] = _child(folder, "checks all", {"options": {"verify": "full"}})
    rows["captures"] = _child(folder, "captures", {"options": {"cudagraph": False}})
    answers = {name: json.dumps(row.get("answers")) for name, row in rows.items()}
    same = len(set(answers.values())) == 1
    print("the same tokens in every start:", same)
    out = os.environ.get("FER_BENCH_OUT")
    if out:
        (Path(out) / "graphs_start.json").write_text(json.dumps(rows))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
