"""Standing by on a GPU: the cache's memory goes and comes under graphs that stay, and the answers stay the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import engine_models, serve_models
from tests.support.memory_gpu import SLACK
from tests.support.processes import ROOT

pytestmark = pytest.mark.timeout(600)

CODE = """
import json, sys, torch
from fer.engines.transformers import TransformersEngine
from fer.errors import OutOfMemory
from fer.orchestrator import recover_for_duty
folder, parked = sys.argv[1], sys.argv[2] == "parked"
engine = TransformersEngine(folder, device="cuda:0", dtype="bfloat16", max_length=65536, batch_sizes=[1, 2, 4, 8])
recovered = recover_for_duty(engine, parked=parked)
free = lambda: torch.cuda.mem_get_info(0)[0]
found = {"path": recovered.report.stages["cudagraph"].path, "why": recovered.report.stages["cudagraph"].why}
need = engine._cache_bytes()
if parked:
    before = free()
    found["held"] = {each.name: each.mapped for each in recovered._graphs._plan.ranges.all}
    hog = torch.empty(before - need // 2, dtype=torch.uint8, device="cuda:0")
    try:
        recovered.unpark()
        found["refused"] = False
    except OutOfMemory as error:
        found["refused"] = error.fields["needed"] > 0 and error.fields["free"] < need
    del hog
    torch.cuda.empty_cache()
    parts = recovered.unpark()
    found["backed"] = before - free()
answers = [engine.generate("Once upon a time", 40)]
for _ in range(2):
    full = free()
    assert recovered.park()
    found["freed"] = free() - full
    found.update(recovered.unpark())
    answers.append(engine.generate("Once upon a time", 40))
found["same"] = all(answer == answers[0] for answer in answers)
found["answer"], found["need"] = answers[0], need
found["session"] = [] if engine.graphs().session is None else engine.graphs().session.verify_owners()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = engine_models.llama(
        tmp_path_factory.mktemp("standby") / "tiny", seed=3, eos_token_id=None, max_position_embeddings=65536
    )
    return serve_models.add_tokenizer(made)


def engine(folder: Path, how: str) -> dict[str, Any]:
    import json

    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), how], capture_output=True, text=True, timeout=240, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_parked_engines_take_memory_when_they_serve(folder: Path) -> None:
    first = engine(folder, "serving")  # captures, saves, has it proven beside
    found = engine(folder, "parked")
    assert found["refused"] is True, "with too little memory it stays parked"
    assert found["need"] >= 4 * SLACK
    assert found["backed"] >= found["need"] - SLACK
    assert found["freed"] >= found["need"] - SLACK
    assert found["held"]["kv"] == 0, "no slab is left of the start"
    assert found["same"] is True and found["answer"] == first["answer"]
    assert found["session"] == []
