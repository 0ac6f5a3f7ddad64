"""What decides a callable's result, as far as Python lets one see: its source files and the values bound to it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from fer.errors import UsageError

Function = Callable[..., Any]


def name(function: Function) -> str:
    """``module:qualified.name`` of a function, class, partial or callable object."""
    function = _unwrap(function)
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{owner.__module__}:{owner.__qualname__}"


def source_files(function: Function) -> set[Path]:
    """The files that define ``function`` and every callable bound to it.

    Raises:
        UsageError: a part has no source file, as in an interactive session.
    """
    return {_source_file(part) for part in _parts(function)}


def bound_values(function: Function, *, strict: bool) -> dict[str, Any]:
    """Values a partial was given or a function closes over, as plain data by name.

    Args:
        strict: refuse values that are no plain data; otherwise they are left out.

    Raises:
        UsageError: naming the value, where ``strict``.
    """
    values: dict[str, Any] = {}
    for part in _parts(function, partials=True):
        for key, value in _bound(part).items():
            if callable(value):
                values[f"{name(part)}.{key}"] = name(value)
                continue
            try:
                values[f"{name(part)}.{key}"] = _plain(value)
            except TypeError as error:
                if strict:
                    raise UsageError(
                        f"{name(part)} is bound to {key!r}, which cannot be compared between processes",
                        why=str(error),
                        fix="Bind plain values only, or say in settings= what decides the weights",
                    ) from None
    return values


def _unwrap(function: Function) -> Function:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _parts(function: Function, *, partials: bool = False, seen: set[int] | None = None) -> Iterator[Function]:
    """``function`` and every callable bound to it; partial objects themselves only where asked for."""
    seen = set() if seen is None else seen
    if id(function) in seen:
        return
    seen.add(id(function))
    if partials or not isinstance(function, functools.partial):
        yield function
    inner = [function.func] if isinstance(function, functools.partial) else []
    for value in [*inner, *_bound(function).values()]:
        if callable(value):
            yield from _parts(value, partials=partials, seen=seen)


def _bound(function: Function) -> dict[str, Any]:
    """The values one callable carries with it."""
    if isinstance(function, functools.partial):
        return {**{str(i): value for i, value in enumerate(function.args)}, **function.keywords}
    if inspect.ismethod(function):
        return {**_closure(function.__func__), **_fields(function.__self__)}
    if inspect.isfunction(function):
        return _closure(function)
    return {} if inspect.isclass(function) or inspect.isbuiltin(function) else _fields(function)


def _closure(function: Any) -> dict[str, Any]:
    code, cells = function.__code__, function.__closure__ or ()
    # A cell is empty while the function it will hold is still being defined.
    return {free: cell.cell_contents for free, cell in zip(code.co_freevars, cells, strict=True) if _filled(cell)}


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _fields(owner: Any) -> dict[str, Any]:
    return {} if inspect.isclass(owner) or inspect.ismodule(owner) else dict(getattr(owner, "__dict__", {}))


def _source_file(function: Function) -> Path:
    target: Any = _unwrap(function)
    if not (inspect.isfunction(target) or inspect.ismethod(target) or inspect.isclass(target)):
        target = type(target)
    try:
        file = inspect.getsourcefile(target)
    except TypeError:
        file = None
    if file is None or not Path(file).is_file():
        raise UsageError(
            f"the source file of {name(function)} is not known",
            why="its content must be compared before kept weights are used",
            fix="Define it in a file, not in an interactive session",
        )
    return Path(file).resolve()


def _plain(value: Any) -> Any:
    """``value`` as data that compares equal between processes; TypeError otherwise."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if type(value).__module__ == "torch" and type(value).__name__ in {"dtype", "device", "Size", "layout"}:
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} is no plain data")
