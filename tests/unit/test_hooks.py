"""Each hook of scripts/hooks.py finds what it stands for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import ROOT


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fer_hooks", ROOT / "scripts" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fer_hooks"] = module  # dataclasses look their module up while they are made
    spec.loader.exec_module(module)
    return module


hooks = _load()
HEAD = "from __future__ import annotations\n"


def findings(name: str, text: str) -> list[str]:
    return [found.split(": ")[1] for found in hooks.check(hooks.Source(Path(name), name, text))]


@pytest.mark.parametrize(
    ("name", "text", "hook"),
    [
        ("fer/long.py", HEAD + "\n" * 500, "file-length"),
        ("fer/long.py", HEAD + "def f():\n" + "    a = 1\n" * 80, "function-length"),
        ("fer/x.py", HEAD + "import pickle\n", "code-as-data"),
        ("fer/x.py", HEAD + "from pickle import loads\n", "code-as-data"),
        ("fer/x.py", HEAD + "torch.load(path)\n", "code-as-data"),
        ("fer/x.py", HEAD + "eval(text)\n", "code-as-data"),
        ("fer/x.py", HEAD + "run('ls', shell=True)\n", "shell"),
        ("tests/unit/test_x.py", HEAD + "time.sleep(1)\n", "sleep"),
        ("docs/x.md", "see /home/someone/notes\n", "machine-path"),
        ("fer/x.py", HEAD + "# TODO: later\n", "unfinished"),
        ("fer/x.py", "import os\n", "future-annotations"),
    ],
)
def test_a_hook_finds_what_it_stands_for(name: str, text: str, hook: str) -> None:
    assert findings(name, text) == [hook]


def test_clean_code_has_no_findings() -> None:
    assert findings("fer/x.py", HEAD + "import os\n\n\ndef f() -> str:\n    return os.getcwd()\n") == []


def test_an_excuse_with_a_reason_is_accepted_and_one_without_is_not() -> None:
    line = "import pickle  # hook: allow code-as-data"
    assert findings("fer/x.py", f"{HEAD}{line} because a test writes one to be refused\n") == []
    assert findings("fer/x.py", f"{HEAD}{line}\n") == ["code-as-data"]


def test_an_excuse_covers_its_own_hook_only() -> None:
    text = f"{HEAD}import pickle  # hook: allow shell because of something else\n"
    assert findings("fer/x.py", text) == ["code-as-data"]
