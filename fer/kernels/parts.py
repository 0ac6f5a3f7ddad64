"""What a kernel's key is made of, part by part, and where two kernels' parts differ.

Triton hashes all of it into one key, so that a miss says nothing. FER writes the parts down beside each kernel when it
is compiled (:mod:`fer.kernels.coverage`), and names the part that has changed since. Of kernels that were compiled
without FER, the metadata give some parts; what is not known is not compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

Parts = Mapping[str, Any]

LABELS: Final = {
    "version": "Triton's version",
    "triton": "Triton's build",
    "compiler": "ptxas",
    "arch": "GPU architecture",
    "source": "source",
    "line": "line",
    "depends": "what the source uses",
    "signature": "types of arguments",
    "constants": "constants",
    "attrs": "alignment and divisibility of arguments",
}
"""Parts in the order in which they are told; ``env`` and ``options`` are told by their members."""

_NESTED: Final = ("env", "options")
_NOT_OPTIONS: Final = frozenset(
    {
        *("hash", "target", "name", "triton_version", "shared", "tmem_size", "tensordesc_meta", "global_scratch_size"),
        *("global_scratch_align", "profile_scratch_size", "profile_scratch_align", "num_stages_actual"),
    }
)


@dataclass(frozen=True)
class Change:
    """One part of a key that is another now."""

    part: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.part}: {self.before} -> {self.now}"


def of_source(src: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of what Triton is compiling, as plain data; imports what Triton has imported.

    Args:
        src: Triton's ``ASTSource`` or ``IRSource``.
        metadata: the compiled kernel's, as Triton's listener gets them.
    """
    from triton.compiler.compiler import make_backend
    from triton.runtime import cache

    target = metadata["target"]
    backend = make_backend(target)
    env = invalidating_env()
    # Named, because an unset default is worth a warning to Triton 3.9, and it is not ours to cause one.
    options = set(vars(backend.parse_options({"enable_fp_fusion": True})))
    fn = getattr(src, "fn", None)
    parts: dict[str, Any] = {
        "version": str(metadata.get("triton_version", "")),
        "triton": hashlib.sha256(cache.triton_key().encode()).hexdigest(),
        "backend": str(target.backend),
        "arch": target.arch,
        "compiler": str(backend.hash()).removesuffix(f"-{target.arch}"),
        "env": env,
        "options": plain_options({name: metadata[name] for name in options & set(metadata)}),
        "signature": _plain(getattr(src, "signature", {})),
        "constants": _texts(getattr(src, "constants", {})),
        "attrs": _texts(getattr(src, "attrs", {})),
    }
    if fn is None:
        return {**parts, "function": str(getattr(src, "name", "")), "source": src.hash()}
    return {**parts, **_function(fn)}


def of_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The parts that the metadata of a compiled kernel tell, where nobody wrote down the others."""
    target = metadata.get("target") or {}
    names = {name for name in metadata if name.isupper()}  # variables, by Triton's own mix of both in one mapping
    return {
        "version": str(metadata.get("triton_version", "")),
        "backend": str(target.get("backend", "")),
        "arch": target.get("arch"),
        "function": str(metadata.get("name", "")),
        "env": {name: str(metadata[name]) for name in sorted(names)},
        "options": plain_options({k: v for k, v in metadata.items() if k not in names and k not in _NOT_OPTIONS}),
    }


def invalidating_env() -> dict[str, str]:
    """The live list: variables that are set and are part of every key, with their values. Imports Triton."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return {str(name): str(value) for name, value in sorted(get_cache_invalidating_env_vars().items())}


def changes(before: Parts, now: Parts) -> list[Change]:
    """Where two kernels' keys differ, as far as both are known."""
    found = []
    for part, label in LABELS.items():
        if part in before and part in now and before[part] != now[part]:
            found.append(_change(part, label, before, now))
    for group in _NESTED:
        left, right = before.get(group), now.get(group)
        if not isinstance(left, Mapping) or not isinstance(right, Mapping):
            continue  # unknown, or not as FER writes it
        absent = "unset" if group == "env" else "(absent)"
        for name in sorted({*left, *right}):
            # An option that one side does not know may have been added by another version: that is told already.
            one_sided = group == "options" and (name not in left or name not in right)
            if one_sided and before.get("version") != now.get("version"):
                continue
            if left.get(name, absent) != right.get(name, absent):
                label = name if group == "env" else f"option {name}"
                found.append(Change(label, _show(left.get(name, absent)), _show(right.get(name, absent))))
    return found


def nearest(now: Parts, others: Iterable[Parts]) -> tuple[Parts | None, list[Change]]:
    """Of kernels of the same function the one whose key differs in fewest parts, and these parts.

    Returns:
        None and ``[]`` where nothing of this function is known.
    """
    best: tuple[Parts | None, list[Change]] = (None, [])
    for other in others:
        if not _same_function(other, now):
            continue
        found = changes(other, now)
        if best[0] is None or len(found) < len(best[1]):
            best = (other, found)
    return best


def why_missed(now: Parts, others: Iterable[Parts]) -> str:
    """One clause for people: why a kernel was compiled although others of its function are kept."""
    near, found = nearest(now, others)
    if near is None:
        return "no kernel of this function is kept"
    if found:
        return "; ".join(map(str, found[:4])) + (f"; {len(found) - 4} more" if len(found) > 4 else "")
    if near.keys() >= LABELS.keys():
        return "every known part of the key is the same; the entry itself was missing or damaged"
    return "source, line or arguments changed; the kept kernel was compiled without FER, which would tell"


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as plain data; libraries by their content, since their path is no part of a key."""
    plain: dict[str, Any] = _plain(options)
    if isinstance(plain.get("extern_libs"), list):
        plain["extern_libs"] = [[name, _content(path)] for name, path in plain["extern_libs"]]
    return plain


def _function(fn: Any) -> dict[str, Any]:
    code = getattr(fn.fn, "__code__", None)
    file = str(code.co_filename) if code is not None else ""
    return {
        "function": f"{fn.__module__}:{fn.__qualname__}",
        "file": file.rpartition("/")[2],
        "line": int(getattr(fn, "starting_line_number", 0)),
        "source": hashlib.sha256(str(fn.src).encode()).hexdigest(),
        # Of the function as a whole, with its line: told only where neither source nor line explains it.
        "depends": str(fn.cache_key),
    }


def _same_function(left: Parts, right: Parts) -> bool:
    a, b = str(left.get("function", "")), str(right.get("function", ""))
    # Metadata know the bare name; a script is __main__ or its own name, as it was started.
    return bool(a and b) and a.rpartition(":")[2].rpartition(".")[2] == b.rpartition(":")[2].rpartition(".")[2]


def _change(part: str, label: str, before: Parts, now: Parts) -> Change:
    if part in ("source", "line"):
        name = f"source/line changed: {now.get('file', '?')}:{now.get('line', '?')}"
        what = "the text" if part == "source" else f"line {before['line']}"
        return Change(name, what, "another text" if part == "source" else f"line {now['line']}")
    if part == "depends":
        return Change(label, "functions, globals or line as packed", "others")
    if part == "triton":
        return Change(label, str(before[part])[:12], str(now[part])[:12])
    if part == "compiler":
        return Change(label, *(_release(str(side[part])) for side in (before, now)))
    return Change(label, _show(before[part]), _show(now[part]))


def _release(text: str) -> str:
    found = re.search(r"V\d[\d.]*", text)
    return found[0] if found else text


_contents: dict[str, str] = {}


def _content(path: str) -> str:
    if path not in _contents:
        try:
            with open(path, "rb") as file:
                _contents[path] = hashlib.sha256(file.read()).hexdigest()[:16]
        except OSError:
            _contents[path] = path.rpartition("/")[2]
    return _contents[path]


def _texts(value: Any) -> dict[str, str]:
    return (
        {str(key): _text(each) for key, each in sorted(value.items(), key=lambda item: str(item[0]))} if value else {}
    )


def _text(value: Any) -> str:
    return f"function {value.cache_key}" if hasattr(value, "cache_key") else str(value)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _show(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return text if len(text) <= 80 else text[:77] + "..."
