"""Rooms call downwards only, and cheap entrances stay cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import ROOT, WAIT_S

LAYERS: tuple[tuple[str, ...], ...] = (
    ("fer",),  # __init__ names its public parts lazily and imports none of them
    ("fer.errors",),
    ("fer.hush", "fer.paths", "fer.turns", "fer.warm"),
    ("fer.options", "fer.report", "fer.waterfall"),
    ("fer.memory", "fer.engines.base", "fer.engines.graphs", "fer.environment", "fer.fingerprint"),
    ("fer.weights", "fer.cudagraph", "fer.kernels"),
    ("fer.diagnosis",),
    ("fer.stages", "fer.weights.stage", "fer.cudagraph.stage", "fer.kernels.stage", "fer.kernels.session"),
    ("fer.orchestrator",),
    ("fer.engines",),  # adapters stand beside recover; STRANGERS keeps them and the stages apart
    ("fer.standby",),
    ("fer.cli", "fer.__main__"),
)
"""Lowest first. A module belongs to the longest name that fits it, and may import its own layer and those below."""

STRANGERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # Stages and recover know engines by their protocol only.
    ("fer.weights", ("fer.engines.module", "fer.engines.transformers", "fer.engines.conformance")),
    ("fer.cudagraph", ("fer.engines.module", "fer.engines.transformers", "fer.engines.conformance")),
    ("fer.kernels", ("fer.engines.module", "fer.engines.transformers", "fer.engines.conformance")),
    ("fer.stages", ("fer.engines.module", "fer.engines.transformers", "fer.engines.conformance")),
    ("fer.orchestrator", ("fer.engines.module", "fer.engines.transformers", "fer.engines.conformance")),
    # Adapters describe engines; what is done with that is not theirs to know.
    ("fer.engines.module", ("fer.orchestrator", "fer.stages", "fer.weights.stage", "fer.weights.client")),
    ("fer.engines.transformers", ("fer.orchestrator", "fer.stages", "fer.weights.stage", "fer.weights.client")),
    # The keeper has to outlive everything: there is nothing in it to crash.
    ("fer.weights.keeper", ("fer.engines", "fer.fingerprint", "fer.environment", "fer.weights.client")),
)

HEAVY = ("torch", "numpy", "cuda", "triton", "transformers", "sglang", "vllm", "accelerate", "safetensors")
ENGINES = ("sglang", "vllm", "transformers", "triton", "cuda", "pynvml", "accelerate", "torchao", "kernels")
"""Never loaded by importing a room of FER: a process asks for them by calling something."""

TORCH_AT_THE_TOP = (
    "fer.engines.",
    "fer.memory.torch_private",
    "fer.weights.",
)
"""Rooms whose files may import torch when they are imported: these are reached through functions only."""

NEVER_TORCH = ("fer.weights.keeper", "fer.weights.wire", "fer.weights.client", "fer.kernels")
IMPORT_FREE = ("fer.weights", "fer.cudagraph", "fer.kernels", "fer.memory", "fer.engines", "fer.cli")
"""Packages whose __init__ loads nothing, since a part of each is imported without the rest."""


@dataclass(frozen=True)
class Import:
    """One import statement of one module of FER."""

    importer: str
    imported: str
    at_import: bool  # runs when the importer is imported, rather than in a function or for type checkers only
    typing_only: bool
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "fer").rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


MODULES = _modules()


def _is_type_checking(node: ast.If) -> bool:
    return ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _walk(node: ast.AST, at_import: bool, typing_only: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from _walk(child, False, typing_only)
        elif isinstance(child, ast.If) and _is_type_checking(child):
            for statement in child.body:
                yield statement, False, True
                yield from _walk(statement, False, True)
            for statement in child.orelse:
                yield statement, at_import, typing_only
                yield from _walk(statement, at_import, typing_only)
        else:
            yield child, at_import, typing_only
            yield from _walk(child, at_import, typing_only)


def _absolute(importer: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = importer.split(".") if MODULES[importer].name == "__init__.py" else importer.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def imports_of(name: str) -> Iterator[Import]:
    """Every import in a module, wherever it stands."""
    tree = ast.parse(MODULES[name].read_text("utf-8"))
    for node, at_import, typing_only in _walk(tree, True, False):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, at_import, typing_only, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(name, node)
            for alias in node.names:
                # `from fer.memory import seal` imports a module, `from fer.memory.seal import x` a name of one.
                whole = f"{source}.{alias.name}"
                yield Import(name, whole if whole in MODULES else source, at_import, typing_only, node.lineno)


def _within(name: str, room: str) -> bool:
    return name == room or name.startswith(room + ".")


def level(name: str) -> int:
    """The layer a module stands in."""
    fitting = [(len(room), number) for number, rooms in enumerate(LAYERS) for room in rooms if _within(name, room)]
    length, number = max(fitting)
    if length == len("fer") and name != "fer":
        raise AssertionError(f"{name} stands in no layer: add it to LAYERS")
    return number


ALL = [found for name in MODULES for found in imports_of(name)]
OURS = [found for found in ALL if _within(found.imported, "fer")]


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_a_layer(name: str) -> None:
    assert level(name) >= 0


def test_rooms_call_downwards_only() -> None:
    upwards = [
        str(i) for i in OURS if not i.typing_only and i.importer != "fer" and level(i.imported) > level(i.importer)
    ]
    assert not upwards


def test_strangers_do_not_meet() -> None:
    met = [
        str(found)
        for room, strangers in STRANGERS
        for found in OURS
        if _within(found.importer, room) and any(_within(found.imported, stranger) for stranger in strangers)
    ]
    assert not met


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in OURS:
        if found.at_import and found.imported in MODULES and found.imported != found.importer:
            graph[found.importer].add(found.imported)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for following in graph[name]:
                visit(following, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_engines_and_drivers_are_imported_in_functions() -> None:
    """A file of ``fer/engines`` may import its engine at the top, if that file itself is imported in functions only."""
    top = [found for found in ALL if found.at_import and found.imported.split(".")[0] in ENGINES]
    assert not [str(found) for found in top if not _within(found.importer, "fer.engines")]
    behind = {found.importer for found in top}
    assert not [str(found) for found in OURS if found.at_import and found.imported in behind - {found.importer}]


def test_torch_is_imported_at_the_top_only_where_it_is_expected() -> None:
    top = [i for i in ALL if i.at_import and i.imported.split(".")[0] == "torch"]
    wrong = [
        str(i)
        for i in top
        if not i.importer.startswith(TORCH_AT_THE_TOP) or any(_within(i.importer, room) for room in NEVER_TORCH)
    ]
    assert not wrong


def _loaded_by(code: str) -> set[str]:
    program = f"{code}\nimport sys\nprint('\\n'.join(['', *sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.splitlines()}


RUN_CLI = """
import sys
sys.argv = ["fer", *{arguments!r}]
from fer.cli.main import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import fer", id="import fer"),
        pytest.param(RUN_CLI.format(arguments=["--help"]), id="fer --help"),
        pytest.param(RUN_CLI.format(arguments=["demo", "--help"]), id="fer demo --help"),
        pytest.param(RUN_CLI.format(arguments=["--version"]), id="fer --version"),
    ],
)
def test_entrances_load_nothing_heavy(code: str) -> None:
    assert not _loaded_by(code) & set(HEAVY)


@pytest.mark.parametrize(
    "module",
    [
        name
        for name in MODULES
        if name in IMPORT_FREE or (any(_within(name, room) for room in NEVER_TORCH) and not name.endswith("__main__"))
    ],
)
def test_the_keeper_and_what_leads_to_it_load_nothing_heavy(module: str) -> None:
    loaded = _loaded_by(f"import {module}")
    assert not loaded & {*HEAVY, "typer", "rich", "asyncio"}


def test_import_fer_loads_only_the_standard_library() -> None:
    # What site-packages' .pth files load in every process (editable installs, coverage) is not ours to answer for.
    added = _loaded_by("import fer") - _loaded_by("pass")
    assert {name for name in added if name and name not in sys.stdlib_module_names} == {"fer"}
