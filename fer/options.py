"""Settings: one table a class, read from arguments, ``FER_*`` variables, ``fer.toml`` and defaults, in that order.

Every setting is a dataclass field made by :func:`_setting`, which carries its parser and its documentation; the names
of environment variables, the keys of ``fer.toml`` and the flags of the command line follow from the field's name::

    Options.load(mode="client")         # argument > FER_MODE > fer.toml > default
    Options.load().sources["wait_s"]    # "FER_WAIT_S", "/etc/fer.toml", "argument" or "default"

Bad values and unknown keys of arguments and files are refused by name. Unknown ``FER_*`` variables are only warned
about, since any program of the machine may have set them. An empty variable counts as not set.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from fer.errors import OptionError

Parser = Callable[[Any], Any]

OTHER_VARIABLES = {
    "FER_CONFIG": "settings file to read in place of ./fer.toml and the user's own",
    "FER_TORCH_INDEX": "package index the install script takes torch from",
    "FER_PYTHON": "interpreter the scripts use",
    "FER_EXTRAS": "optional parts the install script installs",
    "FER_TEST_WORKERS": "processes the test script uses",
    "FER_KERNELS_RECORD": "folder in which the processes of a start record compilations; the kernels' stage sets it",
    "FER_BENCH_OUT": "folder the benchmarks write their results to",
}
"""``FER_*`` variables that are no setting of a class here, with what they are for."""

# Kubernetes makes the first two kinds for a Service named fer; the last are read by the test suite.
_FOREIGN = re.compile(r"FER_(PORT|SERVICE_|TEST_)")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE | re.ASCII)
_FACTOR = {
    "": 1,
    **{u: 1000 ** (i + 1) for i, u in enumerate("kmgt")},
    **{u + "i": 1024 ** (i + 1) for i, u in enumerate("kmgt")},
}


# --- parsers: take what an argument, a TOML file or a variable holds; raise ValueError with what was expected ---


def parse_bytes(value: Any) -> int:
    """Bytes from a whole number or a text such as ``"120GiB"`` or ``"1.5GB"``. Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ValueError('a size in bytes such as 4096, "512MiB" or "120GiB"')
    number, unit = float(match[1]), (match[2] or "").lower()
    # Whole numbers stay exact: a float would round sizes above 2**53.
    return int(match[1]) * _FACTOR[unit] if number.is_integer() and match[1].isdigit() else int(number * _FACTOR[unit])


def _optional_bytes(value: Any) -> int | None:
    return None if value is None or value == "none" else parse_bytes(value)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    known = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if isinstance(value, str) and value.strip().lower() in known:
        return known[value.strip().lower()]
    raise ValueError("true or false (also 1/0, yes/no, on/off)")


def _seconds(value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError("seconds, a number that is not negative")
    return seconds


def _count(value: Any) -> int:
    text = str(value).strip()
    if isinstance(value, (bool, float)) or not (text.isascii() and text.isdigit()):
        raise ValueError("a whole number that is not negative")
    return int(text)


def _counts(value: Any) -> tuple[int, ...]:
    items = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if isinstance(items, Iterable) and not isinstance(items, (bytes, Mapping)):
        return tuple(_count(item) for item in items)
    raise ValueError('whole numbers such as "1000,1001"')


def _path(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or "\0" in str(value) or not str(value).strip():
        raise ValueError("a path")
    return Path(value).expanduser()


def _text(value: Any) -> str:
    if isinstance(value, str) and "\0" not in value:
        return value
    raise ValueError("a text")


def _choice(*allowed: str) -> Parser:
    def parse(value: Any) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        raise ValueError("one of " + ", ".join(allowed))

    return parse


# --- the table ---


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting, as documentation, ``fer doctor`` and the command line see it.

    Attributes:
        name: field of the class and key of ``fer.toml`` (there in the table ``table``, ``""`` for the top level).
        variable: environment variable.
        flag: flag of the command line, without a value.
        choices: allowed words; empty where the value is no word of a list.
    """

    name: str
    table: str
    variable: str
    flag: str
    doc: str
    default: Any
    choices: tuple[str, ...]
    parse: Parser


def _setting(default: Any, doc: str, parse: Parser | None = None, *, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(
        default=default, metadata={"doc": doc, "parse": parse or _choice(*choices), "choices": choices}
    )


class _Settings:
    """What the option classes share. Subclasses are frozen keyword-only dataclasses of :func:`_setting` fields."""

    _table = ""
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for setting in self.settings():
            # Texts such as "120GiB" are welcome from Python too; the object holds the parsed value.
            parsed = _parsed(setting, getattr(self, setting.name), f"argument {setting.name}")
            object.__setattr__(self, setting.name, parsed)

    @classmethod
    def settings(cls) -> tuple[Setting, ...]:
        """The class's table, in order of declaration."""
        prefix = f"FER_{cls._table.upper()}_" if cls._table else "FER_"
        return tuple(
            Setting(
                name=field.name,
                table=cls._table,
                variable=prefix + field.name.upper(),
                flag="--" + field.name.replace("_", "-"),
                default=field.default,
                **field.metadata,
            )
            for field in dataclasses.fields(cls)  # type: ignore[arg-type]  # every subclass is a dataclass
            if "parse" in field.metadata
        )

    @classmethod
    def load(
        cls, *, environ: Mapping[str, str] | None = None, defaults: Mapping[str, Any] | None = None, **arguments: Any
    ) -> Self:
        """Settings from ``arguments`` (None: not given), ``FER_*``, ``fer.toml`` and defaults.

        Args:
            environ: variables to read; the process's own by default.
            defaults: what to take in place of the class's defaults, as an engine plug-in does for ``mode``.

        Raises:
            OptionError: an unknown name or a bad value, saying where it stands.
        """
        environ = os.environ if environ is None else environ
        warn_about_unknown(environ)
        table = {setting.name: setting for setting in cls.settings()}
        _refuse_unknown([*arguments, *(defaults or {})], table, "argument")
        path, content = _read_file(environ)
        values, sources = dict(defaults or {}), dict.fromkeys(table, "default")
        found = {name: (value, str(path)) for name, value in content.get(cls._table, {}).items()}
        found |= {n: (environ[s.variable], s.variable) for n, s in table.items() if environ.get(s.variable)}
        found |= {name: (value, "argument") for name, value in arguments.items() if value is not None}
        for name, (value, source) in found.items():
            where = f"{source}: {name}" if source == str(path) else source
            values[name] = _parsed(table[name], value, f"argument {name}" if source == "argument" else where)
            sources[name] = source
        return cls(**values, sources=sources)  # type: ignore[call-arg]  # a dataclass, see settings()

    def given(self, name: str) -> bool:
        """Whether somebody asked for a setting's value, rather than left it at its default."""
        (default,) = (setting.default for setting in self.settings() if setting.name == name)
        return self.sources.get(name, "default") != "default" or getattr(self, name) != default

    def replace(self, **arguments: Any) -> Self:
        """A copy with some settings changed, None meaning unchanged. Raises OptionError as :meth:`load` does."""
        _refuse_unknown(arguments, {setting.name for setting in self.settings()}, "argument")
        given = {name: value for name, value in arguments.items() if value is not None}
        sources = {**self.sources, **dict.fromkeys(given, "argument")}
        return dataclasses.replace(self, **given, sources=sources)  # type: ignore[type-var]  # a dataclass, see above


@dataclass(frozen=True, kw_only=True)
class Options(_Settings):
    """How a start recovers. ``sources`` says where each value came from."""

    mode: Literal["daemon", "client", "off"] = _setting(
        "daemon",
        "daemon: start a keeper if none runs; client: a keeper must be there; off: the engine's own path",
        choices=("daemon", "client", "off"),
    )
    on_miss: Literal["load", "fail"] = _setting("load", "what to do when nothing kept fits", choices=("load", "fail"))
    verify: Literal["off", "fast", "full"] = _setting(
        "fast",
        "check of attached weights; fast: all bytes on a GPU, seals and samples on the host; full: every byte",
        choices=("off", "fast", "full"),
    )
    transport: Literal["auto", "vmm", "cuda-ipc"] = _setting(
        "auto", "how weights on a GPU are shared", choices=("auto", "vmm", "cuda-ipc")
    )
    wait_s: float = _setting(600.0, "seconds to wait for another engine that loads the same weights", _seconds)
    on_wait_timeout: Literal["load", "fail"] = _setting(
        "load", "what to do when that engine takes longer", choices=("load", "fail")
    )
    weights: bool = _setting(True, "keep and attach weights", _boolean)
    kernels: bool = _setting(True, "keep and restore compiled kernels", _boolean)
    kernels_source: str = _setting(
        "", "archive of kernels to restore where none is kept here: a path or URL; @sha256:DIGEST pins it", _text
    )
    cudagraph: bool = _setting(True, "keep and restore CUDA graphs", _boolean)
    distinit: bool = _setting(True, "speed up the set-up of process groups", _boolean)
    slab_bytes: int = _setting(0, "size of one slab, 0: chosen by the model's size", parse_bytes)
    home: Path | None = _setting(None, "folder of the demonstration model, by default $XDG_CACHE_HOME/fer", _path)  # noqa: RUF009 - is a field
    runtime_dir: Path | None = _setting(None, "folder of sockets, by default $XDG_RUNTIME_DIR/fer", _path)  # noqa: RUF009 - is a field
    log: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "least severe message of FER that is logged", choices=("debug", "info", "warning", "error")
    )
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class KeeperOptions(_Settings):
    """How a keeper keeps: ``FER_KEEPER_*`` and the table ``[keeper]`` of ``fer.toml``."""

    _table = "keeper"

    budget_editions: int = _setting(1, "editions without a lease that may stay on each GPU", _count)
    budget_bytes: int | None = _setting(
        None, "bytes that editions without a lease may hold on each GPU, none: no limit", _optional_bytes
    )
    grace_s: float = _setting(
        300.0, "seconds after its last lease in which the budget neither counts nor evicts an edition", _seconds
    )
    allow_uids: tuple[int, ...] = _setting((), "user ids that may connect beside the keeper's own", _counts)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)


CLASSES: tuple[type[_Settings], ...] = (Options, KeeperOptions)


def known_variables() -> set[str]:
    """Every ``FER_*`` variable that means something."""
    return {setting.variable for cls in CLASSES for setting in cls.settings()} | set(OTHER_VARIABLES)


_warned: set[str] = set()


def warn_about_unknown(environ: Mapping[str, str]) -> None:
    """Warn, once a process and name, about ``FER_*`` variables nothing reads, with the nearest known name."""
    known = known_variables()
    for name in sorted(set(environ) - known - _warned):
        if name.startswith("FER_") and not _FOREIGN.match(name):
            _warned.add(name)
            warnings.warn(f"{name} is no variable of FER and is ignored.{_nearest(name, known)}", stacklevel=3)


def config_path(environ: Mapping[str, str]) -> Path | None:
    """The settings file in force: ``FER_CONFIG``, else ``./fer.toml``, else the user's own; None where none exists."""
    if environ.get("FER_CONFIG"):
        return Path(environ["FER_CONFIG"]).expanduser()
    user = Path(environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()) / "fer" / "fer.toml"
    # Not Path.is_file(): it raises where a folder on the way is closed to this user, as a home of another's is.
    return next((path for path in (Path("fer.toml").absolute(), user) if os.path.isfile(path)), None)


def _read_file(environ: Mapping[str, str]) -> tuple[Path | None, dict[str, dict[str, Any]]]:
    """The settings file's tables by name, ``""`` for the top level, every key known."""
    path = config_path(environ)
    if path is None:
        return None, {}
    import tomllib  # only here: a keeper without a settings file starts faster

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"cannot read {path}", why=error.strerror or str(error), fix="Check FER_CONFIG") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError alike
        raise OptionError(f"{path} is not valid TOML", why=str(error)) from error
    content: dict[str, dict[str, Any]] = {}
    for cls in CLASSES:
        table = document.pop(cls._table, {}) if cls._table else {}
        if not isinstance(table, dict):
            raise OptionError(f"{path}: {cls._table} must be a table", fix=f"Write [{cls._table}]")
        _refuse_unknown(table, {setting.name for setting in cls.settings()}, f"{path}: {cls._table} key")
        # Here and not only where the table is used: a keeper that is started unseen would be the first to tell.
        for setting in cls.settings():
            if setting.name in table:
                _parsed(setting, table[setting.name], f"{path}: {cls._table} key {setting.name}")
        content[cls._table] = table
    top = {setting.name for setting in Options.settings()}
    _refuse_unknown(document, top | {cls._table for cls in CLASSES if cls._table}, f"{path}: key")
    return path, content | {"": document}


def _parsed(setting: Setting, value: Any, where: str) -> Any:
    try:
        return setting.parse(value)
    except ValueError as error:
        raise OptionError(f"{where} has the bad value {value!r}", fix=f"Give {error}", name=setting.name) from None


def _refuse_unknown(names: Iterable[str], known: Iterable[str], what: str) -> None:
    known = set(known)
    for name in names:
        if name not in known:
            raise OptionError(f"{what} {name!r} is unknown", fix=_nearest(name, known).strip(), name=name)


def _nearest(name: str, known: Iterable[str]) -> str:
    import difflib  # needed only to word an error

    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
