"""The project's own checks: each stands for a class of mistake that linters do not know.

A line may opt out with ``# hook: allow NAME because REASON``; the reason is required. Run by ``scripts/check``.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES, FUNCTION_LINES = 500, 80
OPT_OUT = re.compile(r"# hook: allow (?P<name>[\w-]+) because \S+")
TEXT = {".py", ".md", ".toml", ".sh", ".service", ".yml", ".yaml", ""}


@dataclass(frozen=True)
class Source:
    """One tracked file."""

    path: Path
    name: str
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


Finding = tuple[int, str]


def tracked() -> Iterator[Source]:
    """Every text file that git tracks."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in names.decode().split("\0"):
        path = ROOT / name
        if name and path.suffix in TEXT and path.is_file():
            yield Source(path, name, path.read_text("utf-8", errors="replace"))


def file_length(source: Source) -> Iterator[Finding]:
    """A file is one noun; beyond 500 lines it is two."""
    if len(source.lines) > FILE_LINES:
        yield FILE_LINES + 1, f"{len(source.lines)} lines; split it, {FILE_LINES} is the most"


def function_length(source: Source) -> Iterator[Finding]:
    """A step is a named function; beyond 80 lines it is several."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines; {FUNCTION_LINES} is the most"


def no_code_as_data(source: Source) -> Iterator[Finding]:
    """Nothing that FER reads may be able to run: no pickle, marshal, eval, or torch.load."""
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
    for node in ast.walk(ast.parse(source.text)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.split(".")[0] in banned:
                yield node.lineno, f"imports {name}: what is kept or received must never be executable"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"eval", "exec", "torch.load"}:
                yield node.lineno, f"calls {called}: what is kept or received must never be executable"


def no_shell(source: Source) -> Iterator[Finding]:
    """Commands are lists; a shell would interpret paths."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.keyword) and node.arg == "shell":
            yield node.value.lineno, "passes shell=: give the command as a list"


def no_sleeping_tests(source: Source) -> Iterator[Finding]:
    """Tests wait for events, never for time."""
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "sleep"}:
            yield node.lineno, "sleeps: wait for an event with a bound instead"


def no_machine_paths(source: Source) -> Iterator[Finding]:
    """Paths of one person's machine mean nothing on another."""
    pattern = re.compile(r"(?<![\w.$}*-])/(home|root|work|Users)/\w")
    for number, line in enumerate(source.lines, 1):
        if pattern.search(line):
            yield number, "names a path of one machine"


def no_unfinished_marks(source: Source) -> Iterator[Finding]:
    """What is left to do is an issue, not a comment."""
    pattern = re.compile(r"\b(TODO|FIXME|XXX)\b")
    for number, line in enumerate(source.lines, 1):
        if pattern.search(line):
            yield number, "is marked as unfinished: finish it or open an issue"


def future_annotations(source: Source) -> Iterator[Finding]:
    """Annotations stay unevaluated, so that naming torch in one does not import it."""
    body = ast.parse(source.text).body
    only_docstring = all(isinstance(node, ast.Expr) for node in body)
    if not only_docstring and "from __future__ import annotations" not in source.text:
        yield 1, "lacks `from __future__ import annotations`"


Hook = Callable[[Source], Iterator[Finding]]

HOOKS: tuple[tuple[str, str, Hook], ...] = (
    ("file-length", r"^(fer|tests|bench)/.*\.py$", file_length),
    ("function-length", r"^(fer|tests|bench)/.*\.py$", function_length),
    ("code-as-data", r"^fer/.*\.py$", no_code_as_data),
    ("shell", r"^(fer|tests|bench)/.*\.py$", no_shell),
    ("sleep", r"^tests/.*/test_\w+\.py$", no_sleeping_tests),
    ("machine-path", r"^(?!scripts/hooks\.py$|tests/unit/test_hooks\.py$|LICENSE$)", no_machine_paths),
    ("unfinished", r"^(fer|tests|bench|scripts)/(?!hooks\.py$|unit/test_hooks\.py$)", no_unfinished_marks),
    ("future-annotations", r"^(fer|tests|bench)/.*\.py$", future_annotations),
)


def check(source: Source) -> Iterator[str]:
    """Every finding in one file, as ``path:line: name: what``."""
    lines = source.lines
    for name, files, hook in HOOKS:
        if not re.search(files, source.name):
            continue
        for number, what in hook(source):
            excuse = OPT_OUT.search(lines[number - 1]) if number <= len(lines) else None
            if excuse is None or excuse["name"] != name:
                yield f"{source.name}:{number}: {name}: {what}"


def main() -> int:
    findings = [finding for source in tracked() for finding in check(source)]
    print("\n".join(findings) if findings else f"hooks: all {len(HOOKS)} pass")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
