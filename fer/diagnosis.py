"""Is this machine fit to keep weights: one function a check, and one table of them. This is behind ``fer doctor``.

Checks read; none changes the machine, starts a keeper or makes a CUDA context. Without a GPU, its driver or its Python
bindings the checks that need them say so and the rest go on.
"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fer import paths
from fer.errors import FerError
from fer.memory import driver, gpus
from fer.options import KeeperOptions, Options

if TYPE_CHECKING:
    from fer.weights.client import Status

Level = Literal["ok", "warn", "fail"]

GIB = 1 << 30
DESCRIPTORS_WANTED = 4096
"""Open files the keeper should be allowed: a few dozen slabs an edition, a connection an engine, and room to spare."""

STORE_WANTED = 8192
"""Descriptors the keeper's unit should have room for; the unit in packaging/systemd says the same."""

GPU_ROOM = 0.1
"""Share of a GPU's memory that should be free before an engine starts there."""

SOCKET_PATH_LIMIT = 107
"""Bytes of a path that a socket address holds."""


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        level: ``ok``; ``warn``: works, but with less than it could; ``fail``: weights cannot be kept this way.
        fix: what to do, ``""`` where nothing is to be done.
    """

    check: str
    level: Level
    found: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass
class Machine:
    """What the checks look at; tests give a made-up one.

    Attributes:
        runtime_dir: the only place to look for a keeper in, None for those of the settings.
    """

    runtime_dir: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    proc: Path = Path("/proc")

    @cached_property
    def gpus(self) -> list[gpus.Gpu] | FerError:
        """The host's GPUs, or why there is no telling."""
        try:
            return gpus.inventory()
        except FerError as error:
            return error

    @cached_property
    def options(self) -> Options | FerError:
        """The settings in force, or what is wrong with them."""
        try:
            return Options.load(environ=self.environ, runtime_dir=self.runtime_dir)
        except FerError as error:
            return error

    @property
    def chosen_dir(self) -> Path | None:
        """The one runtime directory that flag or settings name; None where a keeper may be in any of the usual ones."""
        return self.runtime_dir if isinstance(self.options, FerError) else self.options.runtime_dir

    @cached_property
    def keeper(self) -> Status | FerError:
        """The keeper's own account, or why there is none."""
        from fer.weights.client import KeeperClient

        try:
            with KeeperClient.connect(self.chosen_dir, label="fer doctor") as client:
                return client.status()
        except FerError as error:
            return error

    @property
    def has_gpu(self) -> bool:
        return isinstance(self.gpus, list) and bool(self.gpus)


Check = Callable[[Machine], Iterator[Finding]]


def examine(runtime_dir: Path | None = None) -> list[Finding]:
    """Every finding of every check, in the order of :data:`CHECKS`. A check that breaks is itself a finding."""
    machine = Machine(runtime_dir)
    findings: list[Finding] = []
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            findings += check(machine)
        except Exception as error:  # the other checks still have something to say
            why = f"the check itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(name, "warn", why, "Please report this"))
    return findings


def check_settings(machine: Machine) -> Iterator[Finding]:
    """Settings load, and where each that is not the default comes from."""
    options = machine.options
    if isinstance(options, FerError):
        yield Finding("settings", "fail", str(options), options.fix)
        return
    try:
        keeper = KeeperOptions.load(environ=machine.environ)
    except FerError as error:  # a keeper would not start with them
        yield Finding("settings", "fail", str(error), error.fix)
        return
    given = [
        f"{prefix}{name}={getattr(found, name)} ({source})"
        for prefix, found in (("", options), ("keeper.", keeper))
        for name, source in found.sources.items()
        if source != "default"
    ]
    yield Finding("settings", "ok", ", ".join(given) or "all defaults")


def check_torch(machine: Machine) -> Iterator[Finding]:
    """The private names of torch that tensors over foreign memory need are there."""
    try:
        import torch
    except ImportError as error:
        yield Finding("torch", "fail", f"torch cannot be imported: {error}", "Install torch 2.11 or newer")
        return
    from fer.memory import torch_private

    wanted = [name for name in torch_private.NAMES if not name.cuda_only or torch.version.cuda]
    missing = [name.path for name in wanted if torch_private.lookup(name.path) is None]
    if missing:
        fix = "Use a version of torch that FER was tested with, and report this"
        yield Finding("torch", "fail", f"torch {torch.__version__} lacks {', '.join(missing)}", fix)
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if machine.has_gpu and not torch.version.cuda:
        fix = "Install a CUDA build of torch to keep weights on the GPU"
        yield Finding("torch", "warn", f"torch {torch.__version__} is built without CUDA, but there is a GPU", fix)
        return
    yield Finding("torch", "ok", f"torch {torch.__version__} ({build}) has the private names that are needed")


def check_memfd(machine: Machine) -> Iterator[Finding]:
    """The kernel makes and seals memory files."""
    from fer.memory.seal import is_sealed_slab, sealed_bytes

    try:
        with sealed_bytes("fer-doctor", bytes(4096)) as sealed:
            good = is_sealed_slab(sealed, 4096)
    except OSError as error:
        fix = "Allow memfd_create in the container's seccomp profile; Linux 4.14 or newer is needed"
        yield Finding("sealed memory", "fail", f"memory files cannot be sealed: {error}", fix)
        return
    if good:
        yield Finding("sealed memory", "ok", "memory files can be made and sealed")
    else:
        yield Finding("sealed memory", "fail", "seals do not hold", "Use a kernel that is not emulated")


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """Enough descriptors: the keeper raises its soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} open files, up to {_limit(hard)}"
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS_WANTED:
        fix = (
            f"Raise the hard limit to {DESCRIPTORS_WANTED}: LimitNOFILE= of the unit, --ulimit nofile= of the container"
        )
        yield Finding("open files", "warn", found, fix)
    else:
        yield Finding("open files", "ok", found)


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else str(value)


def check_socket_directory(machine: Machine) -> Iterator[Finding]:
    """Every place a keeper may listen in is private, on a local file system, and short enough."""
    places = [machine.chosen_dir] if machine.chosen_dir else paths.runtime_dirs()
    for place in places:
        name = f"socket directory {place}"
        try:
            paths.check_private(place)
        except FileNotFoundError:
            yield _missing_directory(name, place)
            continue
        except FerError as error:
            yield Finding(name, "fail", f"{error.what}: {error.why}", error.fix)
            continue
        kind = file_system(place, machine.proc)
        if kind in _REMOTE:
            fix = "Set FER_RUNTIME_DIR to a directory on this machine's own disk or in memory"
            yield Finding(name, "fail", f"it is on {kind}, which other machines share", fix)
            continue
        if stopped := _takes_no_files(place):
            fix = f"Make room for {place}, or set FER_RUNTIME_DIR to a directory that can be written"
            yield Finding(name, "fail", f"no keeper could start in it: {stopped}", fix)
            continue
        long = len(os.fsencode(place / paths.SOCKET)) > SOCKET_PATH_LIMIT
        note = ", longer than a socket's address and reached through its descriptor" if long else ""
        yield Finding(name, "ok", f"private, on {kind}{note}")


_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "fuse.sshfs", "lustre", "gpfs", "beegfs", "9p"})


def _takes_no_files(folder: Path) -> str:
    """Why no file can be made in a folder, ``""`` where one can."""
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not writable"
    there = os.statvfs(folder)
    # Some file systems count no blocks or no files at all; root may use what is kept back for it.
    full = (there.f_blocks and not there.f_bfree) or (there.f_files and not there.f_ffree)
    return f"the file system of {folder} is full" if full else ""


def _missing_directory(name: str, place: Path) -> Finding:
    parent = next((folder for folder in place.parents if folder.exists()), Path("/"))
    if stopped := _takes_no_files(parent):
        return Finding(name, "fail", f"it cannot be made: {stopped}", "Set FER_RUNTIME_DIR, or make room there")
    mode = parent.stat().st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        fix = f"chmod +t {parent}, or set FER_RUNTIME_DIR"
        return Finding(name, "fail", f"{parent} is open to all without the sticky bit: others could take the name", fix)
    return Finding(name, "ok", "not there yet, the keeper will make it")


def file_system(path: Path, proc: Path = Path("/proc")) -> str:
    """Kernel's name of the file system a path is on, ``"unknown"`` where /proc does not tell."""
    best, kind, real = "", "unknown", os.path.realpath(path)
    try:
        lines = (proc / "self/mounts").read_text(errors="replace").splitlines()
    except OSError:
        return kind
    for line in lines:
        _, where, found, *_ = line.split()
        where = where.encode().decode("unicode_escape") if "\\" in where else where
        # The last of equal mount points is the one on top.
        if (real == where or real.startswith(where.rstrip("/") + "/")) and len(where) >= len(best):
            best, kind = where, found
    return kind


def check_host_memory(machine: Machine) -> Iterator[Finding]:
    """Room for weights in host memory, by the kernel and by every cgroup above us."""
    from fer.memory.host_room import host_room

    kernel = _available(machine.proc)
    room = host_room(machine.proc)
    found = f"{room.free / GIB:.1f} GiB free of {room.total / GIB:.1f} GiB"
    if kernel and room.total < kernel:
        found += ", by the limit of this cgroup; weights kept in host memory count against it"
    level: Level = "ok" if room.free > GIB else "warn"
    yield Finding("host memory", level, found, "" if level == "ok" else "Free memory, or raise the cgroup's limit")


def _available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def check_keeper(machine: Machine) -> Iterator[Finding]:
    """A keeper runs, and something would keep its descriptors if it died."""
    from fer.errors import KeeperUnavailable

    kept = machine.keeper
    if isinstance(kept, KeeperUnavailable):
        yield _no_answer(machine)
    elif isinstance(kept, FerError):
        yield Finding("keeper", "fail", f"{kept.what}: {kept.why}" if kept.why else kept.what, kept.fix)
    elif kept.protection == "none":
        fix = "Restart it with `fer keeper run`, or under the unit file in packaging/systemd"
        yield Finding("keeper", "warn", f"pid {kept.pid} runs unprotected: its death would lose the weights", fix)
    else:
        held = sum(edition.bytes for edition in kept.editions)
        found = f"pid {kept.pid}, {len(kept.editions)} edition(s), {_size(held)}, protected by {kept.protection}"
        yield Finding("keeper", "ok", found)
        if kept.protection == "systemd":
            yield from _descriptor_store(kept.pid, machine.proc)


def _no_answer(machine: Machine) -> Finding:
    """None runs, or one holds the socket and does not answer."""
    from fer.weights.keeper.start import keeper_pid, listens

    for place in [machine.chosen_dir] if machine.chosen_dir else paths.runtime_dirs():
        if not listens(place):
            continue
        pid = keeper_pid(place)
        found = f"the keeper in {place} (pid {pid}) accepts connections and does not answer"
        # Its minder, or systemd, has every descriptor and starts it again.
        fix = f"Let it go on with `kill -CONT {pid}` if it was stopped, else end it with `kill -KILL {pid}`: "
        return Finding("keeper", "fail", found, fix + "it comes back with what it holds where it is protected")
    return Finding("keeper", "ok", "none runs; with mode=daemon the first start brings one up")


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.1f} MiB"


def _descriptor_store(pid: int, proc: Path) -> Iterator[Finding]:
    """``FileDescriptorStoreMax`` of the keeper's unit: the default 0 keeps nothing."""
    import subprocess

    try:
        group = (proc / str(pid) / "cgroup").read_text().splitlines()[-1].rpartition(":")[2]
    except (OSError, IndexError):
        return
    unit = next((part for part in reversed(group.split("/")) if part.endswith(".service")), "")
    if not unit:
        return
    command = ["systemctl", *(["--user"] if "/user@" in group else []), "show", unit, "-P", "FileDescriptorStoreMax"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return
    if answer == "0":
        fix = f"Set FileDescriptorStoreMax={STORE_WANTED} in {unit}, as packaging/systemd/fer-keeper.service does"
        yield Finding("descriptor store", "fail", f"{unit} keeps no descriptors: the weights die with the keeper", fix)
    elif answer.isdigit():
        yield Finding("descriptor store", "ok", f"{unit} keeps up to {answer} descriptors")


def check_isolation(machine: Machine) -> Iterator[Finding]:
    """Where a keeper started by an engine would live."""
    runtime = machine.environ.get("XDG_RUNTIME_DIR")
    if runtime and (Path(runtime) / "systemd/private").exists():
        yield Finding(
            "isolation", "ok", "a user manager runs: a keeper gets a unit of its own and outlives its engine's"
        )
        return
    found = "no systemd user manager: a keeper that an engine starts shares its cgroup or container and ends with it"
    fix = "Run `fer keeper run` in a service or container of its own, and engines with mode=client"
    yield Finding("isolation", "warn", found, fix)


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """The host's GPUs."""
    if isinstance(machine.gpus, FerError) or not machine.gpus:
        why = machine.gpus.what if isinstance(machine.gpus, FerError) else "the driver lists none"
        yield Finding("GPU", "ok", f"no GPU ({why}): host memory is used")
        return
    for gpu in machine.gpus:
        found = f"{gpu.name}, {gpu.uuid}, {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free"
        if gpu.total and gpu.free < GPU_ROOM * gpu.total:
            held = ", among them editions of the keeper (fer status)" if _held_on(machine, gpu.uuid) else ""
            fix = "fer evict, or end what nvidia-smi lists; engines that attach need room for their KV cache only"
            yield Finding(f"GPU {gpu.pci_bus}", "warn", f"{found}{held}", fix)
        elif gpu.mig:
            instances = f"MIG is on with {len(gpu.instances)} instances; an edition belongs to one instance"
            fix = "Name the instance in CUDA_VISIBLE_DEVICES by its MIG UUID; MIG has not been tested"
            yield Finding(f"GPU {gpu.pci_bus}", "warn", f"{found}; {instances}", fix)
        else:
            yield Finding(f"GPU {gpu.pci_bus}", "ok", found)


def _held_on(machine: Machine, uuid: str) -> bool:
    return not isinstance(machine.keeper, FerError) and any(e.gpu == uuid for e in machine.keeper.editions)


def check_visible_devices(machine: Machine) -> Iterator[Finding]:
    """``CUDA_VISIBLE_DEVICES`` names GPUs that exist; which UUID each CUDA number stands for."""
    if not machine.has_gpu or isinstance(machine.gpus, FerError):
        return
    setting = machine.environ.get("CUDA_VISIBLE_DEVICES")
    seen = gpus.visible(machine.gpus, machine.environ)
    named = ", ".join(f"cuda:{number} is {uuid}" for number, uuid in enumerate(seen.uuids)) or "CUDA sees no device"
    shown = "not set" if setting is None else repr(setting)
    if setting is not None and (seen.stopped_at or not seen.uuids):
        stopped = f", ends at {seen.stopped_at!r}, which names no further device" if seen.stopped_at else ""
        level: Level = "warn" if seen.uuids else "fail"
        yield Finding(
            "CUDA_VISIBLE_DEVICES", level, f"{shown}{stopped}: {named}", "Name GPUs as nvidia-smi -L lists them"
        )
    elif not seen.certain:
        fix = "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name GPUs by UUID"
        yield Finding("CUDA_VISIBLE_DEVICES", "warn", f"{shown}; GPUs of different models are numbered by speed", fix)
    else:
        yield Finding("CUDA_VISIBLE_DEVICES", "ok", f"{shown}: {named}")


def check_sharing(machine: Machine) -> Iterator[Finding]:
    """Each visible GPU makes memory whose descriptor can be passed on (VMM), with room; else legacy IPC is left."""
    if not machine.has_gpu:
        return
    try:
        devices = list(_cuda_devices())
    except FerError as error:
        yield Finding(
            "GPU memory sharing", "fail", f"{error.what}: {error.why}" if error.why else error.what, error.fix
        )
        return
    for number, name, missing in devices:
        check = f"cuda:{number} memory sharing"
        if not missing:
            yield Finding(check, "ok", f"{name}: memory can be shared by descriptor (VMM)")
            continue
        found, fix = f"{name} has no {' and no '.join(missing)}", "Use --transport cuda-ipc"
        if uses_expandable_segments(machine.environ):
            fix += ", and take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF: legacy IPC cannot share such memory"
            yield Finding(check, "fail", found, fix)
        else:
            yield Finding(check, "warn", f"{found}; weights then live only as long as `fer load`", fix)


_VMM_ATTRIBUTES = {
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "virtual memory management",
    "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "memory behind descriptors",
}


def _cuda_devices() -> Iterator[tuple[int, str, list[str]]]:
    """Number, name and missing capabilities of every device CUDA sees; makes no context.

    Raises:
        DriverError: no driver, or no bindings.
    """
    driver.call("cuInit", 0)
    kinds: Any = driver.bindings().CUdevice_attribute
    for number in range(int(driver.call("cuDeviceGetCount"))):
        device = driver.call("cuDeviceGet", number)
        raw = driver.call("cuDeviceGetName", 256, device)
        name = raw if isinstance(raw, str) else raw.split(b"\0", 1)[0].decode(errors="replace")
        missing = [
            what
            for attribute, what in _VMM_ATTRIBUTES.items()
            if not driver.call("cuDeviceGetAttribute", getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{attribute}"), device)
        ]
        yield number, name, missing


def uses_expandable_segments(environ: Mapping[str, str]) -> bool:
    """True where torch's allocator is told to use memory that legacy IPC cannot share."""
    settings = (environ.get("PYTORCH_CUDA_ALLOC_CONF", ""), environ.get("PYTORCH_ALLOC_CONF", ""))
    return any(
        key.strip() == "expandable_segments" and value.strip().lower() in {"true", "1"}
        for setting in settings
        for key, _, value in (part.partition(":") for part in setting.split(","))
    )


def check_allocator(machine: Machine) -> Iterator[Finding]:
    """Torch's allocator settings fit the chosen transport."""
    if not machine.has_gpu or not uses_expandable_segments(machine.environ):
        return
    if isinstance(machine.options, FerError):
        return  # reported by the check of settings
    if machine.options.transport == "cuda-ipc":
        fix = "Take expandable_segments out of PYTORCH_CUDA_ALLOC_CONF, or use the transport vmm"
        yield Finding("allocator", "fail", "expandable_segments is on, and legacy IPC cannot share such memory", fix)
    else:
        yield Finding("allocator", "ok", "expandable_segments is on, which sharing by descriptor does not mind")


CHECKS: tuple[Check, ...] = (
    check_settings,
    check_torch,
    check_memfd,
    check_open_files,
    check_socket_directory,
    check_host_memory,
    check_isolation,
    check_keeper,
    check_gpus,
    check_visible_devices,
    check_sharing,
    check_allocator,
)
