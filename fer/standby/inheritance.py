"""What a program inherits from whoever starts it, and a forked engine from its template instead.

Some of it the child can be given: limits, nice level, control group. The rest cannot be changed after the start, or not
by us: namespaces, credentials, filters. There the requester and the template must be alike.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
from pathlib import Path

from fer.standby.launcher_wire import Handed

_NAMESPACES = {
    "mnt": "mount namespace",
    "pid": "PID namespace",
    "net": "network namespace",
    "ipc": "IPC namespace",
    "user": "user namespace",
    "uts": "UTS namespace",
    "cgroup": "cgroup namespace",
    "time": "time namespace",
}
_STATUS = {
    "Uid": "user ids",
    "Gid": "group ids",
    "Groups": "supplementary groups",
    "CapInh": "inheritable capabilities",
    "CapPrm": "permitted capabilities",
    "CapEff": "effective capabilities",
    "CapBnd": "capability bounding set",
    "CapAmb": "ambient capabilities",
    "NoNewPrivs": "no_new_privs",
    "Seccomp": "seccomp mode",
    "Seccomp_filters": "number of seccomp filters",
}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_OF_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
"""Signals that the interpreter ignores of its own accord."""


def fixed() -> dict[str, str]:
    """What a forked child could not be given, by its name for people. What cannot be read is in it, as that."""
    found = {}
    for entry, name in _NAMESPACES.items():
        try:
            facts = os.stat(f"/proc/self/ns/{entry}")
        except FileNotFoundError:
            continue  # a kernel without this kind
        found[name] = f"{facts.st_dev}:{facts.st_ino}"
    root = os.stat("/")
    found["root directory"] = f"{root.st_dev}:{root.st_ino}"
    lines = dict(line.split(":", 1) for line in _status().splitlines() if ":" in line)
    found |= {name: lines[entry].strip() for entry, name in _STATUS.items() if entry in lines}
    for path, name in (("attr/current", "security label"), ("personality", "personality")):
        try:
            found[name] = Path("/proc/self", path).read_text("utf-8", "replace").strip("\0\n")
        except OSError:
            continue  # a kernel without it
    found["NUMA memory policy"] = _memory_policy()
    return found


def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Names of what two processes do not have in common."""
    return [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]


def handed(*, ignored: list[int] | None = None, blocked: list[int] | None = None) -> Handed:
    """What this process would hand to a program it starts.

    Args:
        ignored, blocked: signals, none if None.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    names = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return Handed(
        umask=umask,
        limits={number: resource.getrlimit(number) for number in set(names.values())},
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        policy=os.sched_getscheduler(0),
        priority=os.sched_getparam(0).sched_priority,
        affinity=sorted(os.sched_getaffinity(0)),
        oom=int(Path("/proc/self/oom_score_adj").read_text("ascii")),
        cgroup=_cgroup(),
        ignored=ignored or [],
        blocked=blocked or [],
    )


def ignored_signals() -> list[int]:
    """Signals that whoever started this process had it ignore, as ``nohup`` does; the interpreter's own left out."""
    line = next(line for line in _status().splitlines() if line.startswith("SigIgn:"))
    mask = int(line.split()[1], 16)
    return [n for n in range(1, 65) if mask >> (n - 1) & 1 and n not in _OF_PYTHON]


def take(given: Handed) -> None:
    """Be as the requester is, as far as this process can be given it. Signals are left to the caller.

    Raises:
        OSError, ValueError: something cannot be given; the message says what.
    """
    _named("control group", lambda: _join(given.cgroup))
    os.umask(given.umask)
    for number, values in given.limits.items():
        if resource.getrlimit(number) != tuple(values):
            _named(f"resource limit {number}", lambda n=number, v=values: resource.setrlimit(n, tuple(v)))
    if (os.sched_getscheduler(0), os.sched_getparam(0).sched_priority) != (given.policy, given.priority):
        parameter = os.sched_param(given.priority)
        _named("scheduling policy", lambda: os.sched_setscheduler(0, given.policy, parameter))
    if os.getpriority(os.PRIO_PROCESS, 0) != given.nice:
        _named("nice level", lambda: os.setpriority(os.PRIO_PROCESS, 0, given.nice))
    if sorted(os.sched_getaffinity(0)) != given.affinity:
        _named("processor affinity", lambda: os.sched_setaffinity(0, given.affinity))
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text("ascii")) != given.oom:
        _named("oom_score_adj", lambda: score.write_text(str(given.oom), "ascii"))


def _named(what: str, step: object) -> None:
    assert callable(step)
    try:
        step()
    except (OSError, ValueError) as error:
        raise OSError(f"its {what} cannot be given to a forked child ({error})") from error


# --- control groups ---


def _cgroup() -> list[str]:
    return Path("/proc/self/cgroup").read_text("utf-8", "surrogateescape").splitlines()


def _join(wanted: list[str]) -> None:
    """Move into the requester's control group of every hierarchy; one that is the same already takes no right."""
    for line in [line for line in wanted if line not in _cgroup()]:
        _, controllers, path = line.split(":", 2)
        mounted = _mounted(controllers)
        if mounted is None:
            raise OSError(f"the hierarchy {controllers or 'cgroup2'} is mounted nowhere")
        Path(mounted + path, "cgroup.procs").write_text("0\n", "ascii")


def _mounted(controllers: str) -> str | None:
    """Where a hierarchy is mounted: of version 1 by its controllers, else version 2."""
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, place = before.split()[3:5]
        if root != "/":
            continue  # the paths of /proc/self/cgroup do not begin there
        if kind == "cgroup2" and not controllers:
            return place
        if kind == "cgroup" and controllers and set(controllers.split(",")) <= set(options.split(",")):
            return place
    return None


# --- probes ---


def _status() -> str:
    return Path("/proc/self/status").read_text("utf-8", "replace")


def _memory_policy() -> str:
    """The mode and nodes of ``get_mempolicy``, as numactl sets them; ``"unknown"`` where it cannot be asked."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return "unknown"
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 16)()
    if ctypes.CDLL(None, use_errno=True).syscall(number, ctypes.byref(mode), nodes, 1024, None, 0):
        return "unknown"  # a kernel without NUMA
    return f"{mode.value}:{':'.join(f'{word:x}' for word in nodes if word)}"
