"""Which module-level values and code a function reads: what its own bytecode names, followed through local code.

*Local* is code outside the standard library and outside installed packages: the user's own, whose version no package
metadata tells. FER's own code is not local either, since its version is part of every fingerprint.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_SUNDER = re.compile(r"_[^_].*_$")
_INSTALLED = {"site-packages", "dist-packages"}


def local(thing: Any) -> bool:
    """True for a module, class or function of local code."""
    module: ModuleType | None
    if inspect.ismodule(thing):
        module = thing
    elif inspect.isfunction(thing):  # a decorator's wrapper names the module of what it wraps as its own
        module = sys.modules.get(thing.__globals__.get("__name__", ""))
    else:
        module = sys.modules.get(getattr(thing, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return module is not None and file is not None and module.__name__.partition(".")[0] != "fer" and _outside(file)


@functools.cache
def _outside(file: str) -> bool:
    path = Path(file).resolve()
    standard = Path(os.__file__).resolve().parent
    return not _INSTALLED.intersection(path.parts) and standard not in path.parents


def module_values(function: FunctionType) -> dict[str, Any]:
    """The module-level values that a local function reads, by name; empty for any other function.

    ``config.SCALE`` of a local module ``config`` counts as such a value, and so does the module itself.
    """
    return dict(_reads(function.__code__, function.__globals__)) if local(function) else {}


def defaults(function: FunctionType) -> dict[str, Any]:
    """Default values of a local function's parameters, computed when it was defined."""
    if not local(function):
        return {}
    parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    return {f"{p.name}=": p.default for p in parameters if p.default is not p.empty}


def members(owner: type) -> dict[str, Any]:
    """What the body of a local class and of its local bases defines: functions and values, without Python's own."""
    found: dict[str, Any] = {}
    for kind in reversed(owner.__mro__):
        if local(kind):
            found |= {name: _plain_function(value) for name, value in vars(kind).items() if _own(name, value)}
    if issubclass(owner, enum.Enum):  # one table of all members, and books about it
        found = {name: value for name, value in found.items() if name == "_member_map_" or not _SUNDER.match(name)}
    return found


def _own(name: str, value: Any) -> bool:
    function = _plain_function(value)
    if inspect.isfunction(function):  # not what dataclasses and the like have generated, which has no file
        return local(function) and Path(function.__code__.co_filename).is_file()
    # abc keeps books of its own in classes, and slots and properties made in C have no value.
    return not name.startswith(("__", "_abc_")) and not inspect.isdatadescriptor(value)


def _plain_function(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) and value.fget is not None else value


def _reads(code: CodeType, namespace: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for first, *attributes in _chains(code):
        if first not in namespace:
            continue  # a builtin
        name, value = first, namespace[first]
        yield name, value
        # Of a local module, what is taken out of it as well.
        for attribute in attributes:
            if not (inspect.ismodule(value) and local(value) and hasattr(value, attribute)):
                break
            name, value = f"{name}.{attribute}", getattr(value, attribute)
            yield name, value


@functools.cache
def _chains(code: CodeType) -> list[list[str]]:
    """The global names that code loads, each followed by the attributes that it takes of them at once."""
    found: list[list[str]] = []
    open_chain = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL:
            found.append([str(instruction.argval)])
        elif open_chain and instruction.opname in _ATTRIBUTE:
            found[-1].append(str(instruction.argval))
        open_chain = instruction.opname in _GLOBAL or (open_chain and instruction.opname in _ATTRIBUTE)
    for constant in code.co_consts:  # functions, comprehensions and classes defined inside
        if isinstance(constant, CodeType):
            found += _chains(constant)
    return found
