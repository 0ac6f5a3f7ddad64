"""What decides a callable's result, as far as Python lets one see: its source files and the values it depends on.

Seen are values that it closes over, is bound to or has as defaults, module-level values and code that it reads by
name, and the same again of every local function and class among these (:mod:`fer.engines.reads` says what local is).
Not seen is what is only found while it runs: ``getattr`` with a computed name, ``import`` inside a function, module
values that change after the engine was made, files and environment variables. Not seen either is what a program puts
into installed modules and classes (``torch.nn.init.SCALE = 2``): these are taken for what their version says.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import logging
import threading
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fer.engines import reads, values
from fer.errors import UsageError

Function = Callable[..., Any]


def name(function: Function) -> str:
    """``module:qualified.name`` of a function, class, partial or callable object."""
    function = _unwrap(function)
    owner = function if hasattr(function, "__qualname__") else type(function)
    return values.type_name(owner)


def source_files(function: Function) -> set[Path]:
    """The files that define ``function``, every callable bound to it, and the local code that these read.

    Raises:
        UsageError: a part has no source file, as in an interactive session.
    """
    parts = list(_parts(function))
    modules = {value for part in parts for value in _read(part).values() if inspect.ismodule(value)}
    return {_source_file(part) for part in parts} | {
        Path(str(module.__file__)).resolve() for module in modules if reads.local(module)
    }


def bound_values(function: Function, *, strict: bool) -> dict[str, Any]:
    """Values that ``function`` and what it calls depend on, as plain data by name.

    Args:
        strict: refuse values that are no plain data; otherwise they are left out.

    Raises:
        UsageError: naming the value, where ``strict``.
    """
    found: dict[str, Any] = {}
    for part in _parts(function, partials=True):
        for key, value in _dependencies(part).items():
            if isinstance(value, _INERT):
                continue
            where = _free(found, name(part), key)
            if callable(value):
                found[where] = values.named(value)
                continue
            try:
                found[where] = values.plain(value)
            except TypeError as error:
                if strict:
                    raise UsageError(
                        f"{name(part)} depends on {key!r}, which cannot be compared between processes",
                        why=str(error),
                        fix="Bind plain values only, or say in settings= what decides the weights",
                    ) from None
    return found


def _free(taken: Mapping[str, Any], owner: str, key: str) -> str:
    """A name of its own for each value: two partials of one function have the same names for what they bind."""
    where, number = f"{owner}.{key}", 1
    while where in taken:
        number += 1
        where = f"{owner}#{number}.{key}"
    return where


_INERT: tuple[type, ...] = (
    *(types.ModuleType, types.UnionType, typing.TypeVar, typing.ParamSpec),
    *(logging.Logger, logging.LoggerAdapter, type(threading.Lock()), type(threading.RLock()), contextvars.ContextVar),
)
"""No weights come of these; the files of local modules are sources."""


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
        for found in _callables(value):
            if getattr(found, "__module__", "") != "builtins" or not inspect.isclass(found):  # int has no file
                yield from _parts(found, partials=partials, seen=seen)
    for value in _read(function).values():
        for found in _callables(value):
            if _followed(found):
                yield from _parts(found, partials=partials, seen=seen)


def _callables(value: Any, above: frozenset[int] = frozenset()) -> Iterator[Function]:
    """``value`` where it is callable, the callables in a container or record, and the local classes of records."""
    if callable(value):
        yield value
    elif id(value) not in above:
        for inner in values.children(value):
            yield from _callables(inner, above | {id(value)})


def _followed(found: Any) -> bool:
    """Whether there is more to a callable found by name than that name: installed code is stamped by its version."""
    if isinstance(found, functools.partial):
        return True
    if inspect.isroutine(found) or inspect.isclass(found):
        return reads.local(found) or reads.local(inspect.unwrap(found))
    return type(found).__module__ not in _TYPING and bool(_fields(found))


_TYPING = {"typing", "types", "collections.abc", "_collections_abc"}


def _dependencies(function: Function) -> dict[str, Any]:
    return {**_read(function), **_bound(function)}  # an instance's own value hides its class's


def _read(function: Function) -> dict[str, Any]:
    """The module-level values, defaults and class members that one callable reads; see :mod:`fer.engines.reads`."""
    if isinstance(function, types.FunctionType):
        return {**reads.defaults(function), **reads.module_values(function)}
    if inspect.ismethod(function):
        owner: Any = function.__self__
        return {**_read(function.__func__), **reads.members(owner if inspect.isclass(owner) else type(owner))}
    return reads.members(function if inspect.isclass(function) else type(function))


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
    if inspect.isclass(owner) or inspect.ismodule(owner):
        return {}
    return {**_slots(owner), **getattr(owner, "__dict__", {})}


def _slots(owner: Any) -> dict[str, Any]:
    """Values in the slots that local classes declare."""
    kinds = [kind for kind in type(owner).__mro__ if reads.local(kind)]
    slots = [item for kind in kinds for item in vars(kind).items() if inspect.ismemberdescriptor(item[1])]
    return {name: descriptor.__get__(owner) for name, descriptor in slots if hasattr(owner, name)}


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
