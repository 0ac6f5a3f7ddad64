"""What makes a template unfit or stale, and what its engines get from it."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest

from fer import hush
from fer.standby.launcher_client import NotForked, fork, spawn
from tests.support.keeper import read_line
from tests.support.launcher import Launcher, alive, await_end, fer_run, finish, script
from tests.support.processes import WAIT_S, Children


def importable(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> None:
    """Modules that a launcher started from here can import."""
    for name, code in modules.items():
        script(folder, code, f"{name}.py")
    monkeypatch.setenv("PYTHONPATH", str(folder))


# --- spoiled ---


@pytest.mark.parametrize(
    ("code", "named"),
    [
        pytest.param(
            "import threading\nthreading.Thread(target=threading.Event().wait, name='mine', daemon=True).start()",
            r"it has threads: thread \d+ \(mine\), since the import of spoils",
            id="thread",
        ),
        pytest.param(
            "from fer.standby import launcher_fit as f\nold = f._open\nf._open = lambda: {**old(), 9: '/dev/nvidia0'}",
            r"it has a GPU open: descriptor 9 \(/dev/nvidia0\), since the import of spoils",
            id="gpu",
        ),
        pytest.param(
            "import sys, types, threading\n"
            "from fer.standby import launcher_fit as f\n"
            "lock = threading.Lock()\nlock.acquire()\n"
            "f.STALL_S = 0.2\nold = f.steps\nf.steps = lambda: [*old(), ('lock', 0.2, lock.acquire)]",
            r"a forked child hangs in its lock",
            id="lock",
        ),
        pytest.param(
            "import os\nos.register_at_fork(after_in_child=lambda: os._exit(3))",
            r"a forked child died in its fork",
            id="death in the fork",
        ),
    ],
)
def test_a_spoiled_template_is_named_and_engines_start_plainly(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, named: str
) -> None:
    importable(tmp_path, monkeypatch, spoils=code)
    launcher = Launcher(children, imports=("json", "spoils"))
    found = launcher.status()
    assert found.state == "spoiled"
    code_, _, err = finish(fer_run(children, sys.executable, script(tmp_path, "raise SystemExit(4)")))
    assert code_ == 4 and "plain exec: the template is spoiled" in err
    assert re.search(named, err) and re.search(named, found.why)


def test_a_thread_that_starts_later_is_noticed_before_the_fork(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = (
        "import signal, threading\n"
        "def start(*_): threading.Thread(target=threading.Event().wait, name='late', daemon=True).start()\n"
        "signal.signal(signal.SIGUSR1, start)\n"
    )
    importable(tmp_path, monkeypatch, later=later)
    launcher = Launcher(children, imports=("later",))
    os.kill(launcher.pid, 10)
    with pytest.raises(NotForked, match=r"it has threads: thread \d+ \(late\)"):
        while True:  # the signal may come behind the first request
            with fork([sys.executable, str(script(tmp_path, ""))]) as child:
                child.wait(WAIT_S)
    assert launcher.status().state == "spoiled"


def test_an_import_that_fails_is_named(children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    importable(tmp_path, monkeypatch, fails="raise RuntimeError('no luck')")
    code, _, err = finish(children.spawn([sys.executable, "-m", "fer", "launcher", "run", "--import", "fails"]))
    assert code == 2 and "fails cannot be imported: RuntimeError: no luck" in err


@pytest.mark.parametrize("name", hush.LOUD)
def test_complaints_about_optional_parts_are_not_told_by_the_template(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    importable(tmp_path, monkeypatch, loud=f"import logging\nlogging.getLogger({name!r}).warning('lacks a binary')\n")
    launcher = Launcher(children, imports=("loud",))
    own = script(tmp_path, f"import logging\nlogging.getLogger({name!r}).warning('of the program')\n")
    code, _, err = finish(fer_run(children, sys.executable, own))
    assert code == 0 and "forked" in err and "of the program" in err, "what runs in the engine is not ours to hush"
    launcher.process.terminate()
    assert "lacks a binary" not in finish(launcher.process)[2]


def test_it_ends_without_tidying_up_what_was_frozen(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importable(tmp_path, monkeypatch, lists="import atexit\natexit.register(print, 'leaked', flush=True)\n")
    launcher = Launcher(children, imports=("lists",))
    code, out, _ = finish(fer_run(children, sys.executable, script(tmp_path, "print('mine')\n")))
    assert (code, out) == (0, "mine\nleaked\n"), "a forked program's end is as any program's"
    launcher.process.terminate()
    assert finish(launcher.process)[:2] == (0, "")


# --- stale ---


def test_changed_code_replaces_the_template_and_engines_notice_nothing(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importable(tmp_path, monkeypatch, mine="VALUE = 1")
    launcher = Launcher(children, imports=("mine",))
    engine = script(tmp_path, "import mine, os, sys\nprint(mine.VALUE, os.getpid(), flush=True)\nsys.stdin.read(1)\n")
    before = fer_run(children, sys.executable, engine, stdin=subprocess.PIPE)
    value, pid = read_line(before.stdout, WAIT_S).split()
    assert value == "1"

    script(tmp_path, "VALUE = 22", "mine.py")
    code, out, err = finish(fer_run(children, sys.executable, engine, stdin=subprocess.DEVNULL))
    assert code == 0 and out.startswith("22 ")
    assert "plain exec: the template is stale and being replaced" in err and "mine.py changed" in err
    found = launcher.await_generation(2)
    assert found.pid == launcher.pid and "mine.py changed" in found.fresh_why
    assert [e.pid for e in found.engines] == [int(pid)] and alive(int(pid))

    code, out, err = finish(fer_run(children, sys.executable, engine, stdin=subprocess.DEVNULL))
    assert (code, out.split()[0]) == (0, "22") and "forked" in err
    assert before.stdin is not None
    before.stdin.close()
    assert before.wait(WAIT_S) == 0
    assert await_end(int(pid))
    assert launcher.status().engines == []


def test_another_value_of_a_variable_that_was_read_means_plain_and_then_a_fresh_template(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importable(
        tmp_path, monkeypatch, reads="import os\nVALUE = os.environ.get('TASTE', 'none')\ncopy = dict(os.environ)"
    )
    launcher = Launcher(children, imports=("reads",))
    engine = script(tmp_path, "import os, reads\nprint(reads.VALUE, os.environ.get('TASTE'), os.environ.get('OTHER'))")

    def start(**more: str) -> tuple[str, str]:
        code, out, err = finish(fer_run(children, sys.executable, engine, env={**os.environ, **more}))
        assert code == 0
        return out.strip(), err

    out, err = start(OTHER="b")
    assert out == "none None b" and "forked" in err  # nobody has read that one
    out, err = start(TASTE="sweet")
    assert out == "sweet sweet None" and "another value of TASTE (read by reads)" in err and "replaced" not in err
    out, err = start()
    assert out == "none None None" and "forked" in err  # one that fits comes between: the template stays
    start(TASTE="sweet")
    out, err = start(TASTE="sweet")
    assert out == "sweet sweet None" and "it is being replaced" in err
    assert "TASTE" in launcher.await_generation(2).fresh_why
    out, err = start(TASTE="sweet")
    assert out == "sweet sweet None" and "forked" in err


def test_variables_that_imports_set_are_set_in_engines(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REMOVED", "1")
    importable(
        tmp_path, monkeypatch, sets="import os\nos.environ.setdefault('PLACE', 'here')\ndel os.environ['REMOVED']"
    )
    Launcher(children, imports=("sets",))
    path = script(tmp_path, "import os, sets\nprint(os.environ['PLACE'], 'REMOVED' in os.environ)")
    for way in ("auto", "off"):
        code, out, err = finish(fer_run(children, sys.executable, path, options=("--launcher", way)))
        assert (code, out) == (0, "here False\n") and ("forked" in err) == (way == "auto"), err


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED", "LC_ALL", "LD_LIBRARY_PATH"])
def test_variables_of_native_libraries_must_agree(children: Children, tmp_path: Path, name: str) -> None:
    Launcher(children)
    with pytest.raises(NotForked, match=rf"another value of {name} \(read by the "):
        fork([sys.executable, str(script(tmp_path, ""))], env={**os.environ, name: "3"})


def test_variables_of_the_gpu_may_differ(children: Children, tmp_path: Path) -> None:
    Launcher(children)
    path = script(tmp_path, "import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == '3'")
    with spawn([sys.executable, str(path)], env={**os.environ, "CUDA_VISIBLE_DEVICES": "3"}) as child:
        assert (child.via, child.wait(WAIT_S)) == ("launcher", 0)


# --- what engines get ---


def test_random_numbers_and_logs_are_each_engines_own(
    children: Children, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    logs = f"import logging\nlogging.getLogger('l').addHandler(logging.FileHandler({str(log)!r}))"
    importable(tmp_path, monkeypatch, logs=logs)
    launcher = Launcher(children, imports=("logs", "numpy"))
    log.rename(tmp_path / "rotated")
    path = script(
        tmp_path,
        "import logging, random, sys, numpy\nlogging.getLogger('l').warning('mine')\n"
        "print(random.random(), numpy.random.rand(), numpy.random.default_rng().random())",
    )
    seen = set()
    for _ in range(2):
        code, out, err = finish(fer_run(children, sys.executable, path))
        assert code == 0 and "forked" in err, err
        seen.update(out.split())
    assert len(seen) == 6
    assert log.read_text() == "mine\nmine\n" and (tmp_path / "rotated").read_text() == ""
    assert not launcher.leaked()


def test_workers_by_multiprocessing_find_the_script(children: Children, tmp_path: Path) -> None:
    launcher = Launcher(children, imports=("multiprocessing.pool", "multiprocessing.util"))
    script(
        tmp_path,
        """
import multiprocessing, sys
def work(number):
    return number * 2
if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        print(pool.map(work, range(3)))
""",
    )
    for method in ("spawn", "fork"):
        command = [sys.executable, "engine.py", method]
        code, out, err = finish(fer_run(children, *command, cwd=tmp_path))
        assert (code, out) == (0, "[0, 2, 4]\n") and "forked" in err, err
    assert not launcher.leaked()


def test_ten_engines_at_once_and_nothing_is_left(children: Children, tmp_path: Path) -> None:
    launcher = Launcher(children)
    path = script(tmp_path, "import sys\nsys.exit(int(sys.argv[1]))")
    engines = [spawn([sys.executable, str(path), str(number)]) for number in range(10)]
    assert [(engine.via, engine.wait(WAIT_S)) for engine in engines] == [("launcher", n) for n in range(10)]
    for engine in engines:
        engine.close()
    assert not launcher.leaked()
    assert launcher.status().engines == []
    assert not Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()


@pytest.mark.slow
def test_an_engine_of_torch_and_a_tokenizer_that_was_made_ahead(
    children: Children, tmp_path: Path, smollm2_folder: Path
) -> None:
    """Parallel operations work in a child, and the tokenizer is the template's as long as its files are the same."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in smollm2_folder.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            (folder / file.name).write_bytes(file.read_bytes())
    launcher = Launcher(children, "--preload", folder, imports=("torch", "fer.engines.transformers"))
    found = launcher.status()
    assert found.state == "ready", found.why
    assert found.warm == [str(folder)]
    path = script(
        tmp_path,
        f"""
import json
import torch
from fer import warm
from fer.engines.transformers import TransformersEngine
engine = TransformersEngine({str(folder)!r})
held = warm._held.get(("tokenizer", {str(folder)!r}))
engine.load_tokenizer()
total = float((torch.ones(1024, 1024) @ torch.ones(1024, 1024)).sum())
texts = ["The capital of France"] * 64
print(json.dumps({{
    "warm": held is not None and engine.tokenizer is held.value, "total": total, "seed": torch.initial_seed(),
    "ids": engine.tokenizer(texts)["input_ids"][-1], "architecture": engine.identity().architecture,
}}))
""",
    )

    def start() -> dict[str, object]:
        reading, writing = os.pipe()
        with spawn([sys.executable, str(path)], stdout=writing) as child:
            os.close(writing)
            assert child.via == "launcher", child.why
            poll = select.poll()
            poll.register(reading, select.POLLIN)
            assert poll.poll(WAIT_S * 1000)
            with os.fdopen(reading) as source:
                answer = json.loads(source.readline())
            assert child.wait(WAIT_S) == 0
        return dict(answer)

    first, second = start(), start()
    assert first["warm"] and first["total"] == 1024**3
    assert first.pop("seed") != second.pop("seed")
    assert first == second
    code, out, _ = finish(fer_run(children, sys.executable, path, options=("--launcher", "off")))
    plain = json.loads(out)
    assert code == 0 and not plain["warm"] and plain["ids"] == first["ids"]
    assert plain["architecture"] == first["architecture"] == "LlamaForCausalLM"
