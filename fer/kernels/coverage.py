"""The record of compilations: which kernels this start looked up, which were there, and what the others took.

Triton's own hooks tell it: a listener of every compilation, and a hook after it that gives the specialisation from
which :mod:`fer.kernels.warm` can prepare the same kernel before it is needed. Each record is also one line of a file,
written at once, since engines' workers end without a word.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from fer.kernels import entry, parts
from fer.kernels.manager import ADOPTED

VARIABLE: Final = "FER_KERNELS_RECORD"
"""Folder in which every process of a start writes its records."""

_MAX_LINE: Final = 1 << 20
log = logging.getLogger("fer")


@dataclass
class Record:
    """One lookup of one kernel.

    Attributes:
        key: folder of the kernel in Triton's cache.
        name, function: of the kernel; its module and qualified name.
        hit: it was there. Otherwise it was compiled.
        ms: milliseconds the lookup, or the compilation, took.
        parts: what the key is made of; see :mod:`fer.kernels.parts`.
        specialization: Triton's text from which ``JITFunction.preload`` makes this very kernel, ``""`` if unknown.
    """

    key: str
    name: str
    hit: bool
    ms: float
    function: str = ""
    parts: dict[str, Any] = field(default_factory=dict)
    specialization: str = ""


class Recorder:
    """What one process looked up."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._lock = threading.Lock()
        self._last = threading.local()
        self._troubles = 0

    def listen(self, *, src: Any, metadata: Any, metadata_group: dict[str, str], times: Any, cache_hit: bool) -> None:
        """Triton's compilation listener. What goes wrong here is said once and costs the record, not the kernel."""
        try:
            record = self._record(src, metadata, times, cache_hit)
        except Exception as error:  # Triton's objects differ between versions in ways nobody announces
            self._trouble(error)
            return
        with self._lock:
            self.records.append(record)
        self._last.record, self._last.group = record, metadata_group
        if record.parts:
            self._write_parts(record, metadata_group)
        _append(asdict(record))

    def compiled(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> None:
        """Triton's hook after a compilation that a call of a kernel caused; it may run in another thread."""
        try:
            text = str(compile["specialization_data"])
            record = getattr(self._last, "record", None)
            if record is None or record.specialization or record.function != f"{fn.module}:{fn.name}":
                return
            record.specialization = text
            if record.parts:
                self._write_parts(record, self._last.group)
            _append({"key": record.key, "specialization": text})
        except Exception as error:  # as above
            self._trouble(error)

    def _record(self, src: Any, metadata: Any, times: Any, hit: bool) -> Record:
        key = entry.folder_of(metadata["hash"])
        fn = getattr(src, "fn", None)
        function = str(src.name) if fn is None else f"{fn.__module__}:{fn.__qualname__}"
        # Parts take longer to put together than a lookup does, and are written down beside most kernels that are hit.
        wanted = not hit or key in ADOPTED
        made = parts.of_source(src, metadata) if wanted else {}
        return Record(key, str(metadata["name"]), hit, round(times.total / 1e3, 3), function, made)

    def _write_parts(self, record: Record, group: dict[str, str]) -> None:
        path = next((path for name, path in group.items() if name.endswith(".json")), "")
        if path:
            more = {"specialization": record.specialization} if record.specialization else {}
            entry.merge_parts(os.path.dirname(path), os.path.basename(path), {**record.parts, **more})

    def _trouble(self, error: Exception) -> None:
        self._troubles += 1
        if self._troubles == 1:
            log.warning("compilations are not recorded: %s: %s", type(error).__name__, error)


def _append(data: dict[str, Any]) -> None:
    """One line for whoever reads the records of the whole start; in one write, since threads share the file."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    line = json.dumps(data, separators=(",", ":")).encode() + b"\n"
    with contextlib.suppress(OSError):
        path = os.path.join(folder, f"{os.getpid()}.jsonl")
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


_attached: dict[str, Any] = {}
"""Where :data:`RECORDER` listens; not seen by the listener itself, which others may have wrapped."""

RECORDER = Recorder()
"""This process's."""


def attach(knobs: Any) -> None:
    """Hook :data:`RECORDER` in, behind whatever listens already. Repeatable."""
    compilation, runtime = knobs.compilation, knobs.runtime
    if _attached.get("knobs") is compilation:
        return
    _attached["knobs"] = compilation
    compilation.listener = _behind(compilation.listener, RECORDER.listen)
    runtime.jit_post_compile_hook = _behind(runtime.jit_post_compile_hook, RECORDER.compiled)


def is_attached() -> bool:
    """Whether Triton's listener tells :data:`RECORDER`; asked where Triton is imported."""
    from triton import knobs

    return _attached.get("knobs") is knobs.compilation


def note(key: str, name: str, *, hit: bool) -> None:
    """Record a lookup of which only this is known."""
    _append(asdict(Record(key, name, hit, 0.0)))


def _behind(first: Any, second: Any) -> Any:
    def both(**arguments: Any) -> Any:
        result = first(**arguments) if first is not None else None
        second(**arguments)
        return result

    return both


def read(folder: Path) -> list[Record]:
    """The records of a start's processes. A line that a kill cut off is left out."""
    found: list[Record] = []
    for path in sorted(folder.glob("*.jsonl")):
        last: dict[str, Record] = {}
        for line in _lines(path):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                data = json.loads(line)
                if "name" in data:
                    last[data["key"]] = Record(**data)
                    found.append(last[data["key"]])
                else:
                    last[data["key"]].specialization = str(data["specialization"])
    return found


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE):
                yield line
    except OSError:
        return


@dataclass(frozen=True)
class Summary:
    """A start's lookups in figures, and why kernels were compiled.

    Attributes:
        compile_ms: sum over all threads and processes.
        missed: kernels that were compiled, each with its reason.
    """

    hits: int
    compiled: int
    compile_ms: float
    missed: tuple[tuple[str, str], ...]


def summary(records: Iterable[Record], kept: Iterable[parts.Parts]) -> Summary:
    """Put a start's records together; each kernel counts once, as compiled if any process compiled it."""
    by_key: dict[str, Record] = {}
    milliseconds = 0.0
    for record in records:
        milliseconds += 0.0 if record.hit else record.ms
        if record.key not in by_key or not record.hit:
            by_key[record.key] = record
    others = list(kept)
    compiled = [record for record in by_key.values() if not record.hit]
    missed = tuple((record.name, parts.why_missed(record.parts, others)) for record in compiled)
    return Summary(len(by_key) - len(compiled), len(compiled), round(milliseconds, 3), missed)
