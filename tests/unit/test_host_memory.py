"""Host slabs: written, sealed, attached, and never harmed by a reader."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

from fer.errors import FerBug, MappingError, OptionError, OutOfMemory, SlabLost
from fer.memory import fdpass, seal
from fer.memory.base import Room
from fer.memory.fd import Fd
from fer.memory.host import HostBackend, HostMapping, spare
from fer.memory.host_room import host_room
from fer.memory.open import open_backend
from fer.memory.torch_private import tensor_over
from tests.support.keeper import read_line
from tests.support.processes import WAIT_S, Children

GIB = 1 << 30
PAGE = HostBackend.granularity


def _bytes(backend: HostBackend, mapping: HostMapping) -> torch.Tensor:
    return tensor_over(backend.storage(mapping, 0, mapping.size), torch.uint8, (mapping.size,), (1,), 0)


def _mapped(address: int) -> str:
    """The line of /proc/self/maps that begins at an address, "" if none does."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{address:x}-")), "")


def _published(backend: HostBackend, pattern: int = 7, size: int = 4 * PAGE) -> tuple[HostMapping, Fd]:
    mapping = backend.create(size)
    _bytes(backend, mapping).fill_(pattern)
    mapping.protect()
    return mapping, mapping.export()


def test_written_sealed_attached(no_fd_leak: None) -> None:
    backend = HostBackend()
    mapping = backend.create(3 * PAGE + 1)
    assert (mapping.size, mapping.moved, mapping.kind) == (4 * PAGE, False, "host")
    tensor = _bytes(backend, mapping)
    tensor.copy_(torch.arange(4 * PAGE) % 251)
    address = mapping.address
    mapping.protect()
    mapping.protect()
    assert (mapping.address, tensor.data_ptr()) == (address, address), "the publisher's tensors stay where they are"
    assert _mapped(address).split()[1] == "r--p"
    fd = mapping.export()
    assert seal.is_sealed_slab(fd, mapping.size) and not os.get_inheritable(fd.fileno())
    reader = backend.attach(fd, mapping.size)
    assert fd.closed and _mapped(reader.address).split()[1] == "r--p"
    assert torch.equal(_bytes(backend, reader), tensor)
    mapping.close()
    mapping.close()
    assert int(_bytes(backend, reader)[250]) == 250, "the reader's mapping keeps the bytes"
    reader.close()


def test_storages_keep_their_mapping_and_give_it_back(no_fd_leak: None) -> None:
    backend = HostBackend()
    mapping, fd = _published(backend)
    reader = backend.attach(fd, mapping.size)
    tensor = tensor_over(backend.storage(reader, PAGE, 512), torch.float32, (16, 8), (8, 1), 0)
    address = reader.address
    assert tensor.data_ptr() == address + PAGE
    del reader
    gc.collect()
    assert _mapped(address)
    del tensor
    gc.collect()
    assert not _mapped(address)
    mapping.close()


def test_an_address_is_used_where_it_is_free(no_fd_leak: None) -> None:
    backend = HostBackend()
    first = backend.create(PAGE)
    address = first.address
    second = backend.create(PAGE, address=address)
    assert second.moved and second.address != address
    first.close()
    third = backend.create(PAGE, address=address)
    assert not third.moved and third.address == address
    for mapping in (second, third):
        mapping.close()


def test_only_the_maker_exports(no_fd_leak: None) -> None:
    backend = HostBackend()
    mapping, fd = _published(backend)
    reader = backend.attach(fd, mapping.size)
    for closed_or_reader in (reader, mapping):
        if closed_or_reader is mapping:
            mapping.close()
        with pytest.raises(MappingError):
            closed_or_reader.export()
    fresh = backend.create(PAGE)
    fresh.close()
    with pytest.raises(MappingError):
        fresh.protect()
    reader.close()


def test_descriptors_that_are_no_sealed_slabs(no_fd_leak: None) -> None:
    backend = HostBackend()
    mapping = backend.create(PAGE)
    for fd, size in (
        (mapping.export(), PAGE),  # not sealed yet
        (Fd(os.open("/dev/zero", os.O_RDWR)), PAGE),
        (seal.sealed_bytes("short", bytes(PAGE)), 2 * PAGE),
    ):
        with pytest.raises(SlabLost):
            backend.attach(fd, size)
        assert fd.closed
    mapping.close()


def test_many_slabs_attach_together_or_not_at_all(no_fd_leak: None) -> None:
    backend = HostBackend()
    mapping, fd = _published(backend)
    got = backend.attach_many([(fd.dup(), mapping.size, 0), (fd.dup(), mapping.size, 0)])
    addresses = [each.address for each in got]
    for each in got:
        each.close()
    bad = [(fd, mapping.size, 0), (mapping.export(), mapping.size + PAGE, 0), (mapping.export(), mapping.size, 0)]
    with pytest.raises(SlabLost):
        backend.attach_many(bad)
    assert all(each.closed for each, _, _ in bad)
    assert not any("fer-slab" in _mapped(address) for address in addresses)
    mapping.close()


_SHARER = """
import mmap, os, sys
shared = mmap.mmap(int(sys.argv[1]), 4096, mmap.MAP_SHARED, mmap.PROT_READ)
print("mapped", flush=True)
sys.stdin.read()
"""


def test_a_shared_mapping_elsewhere_refuses_the_seals_and_harms_nothing(children: Children, no_fd_leak: None) -> None:
    backend = HostBackend()
    mapping = backend.create(PAGE)
    tensor = _bytes(backend, mapping)
    fd = mapping.export()
    child = children.python(_SHARER, str(fd.fileno()), pass_fds=[fd.fileno()], stdin=-1)
    assert read_line(child.stdout) == "mapped"
    with pytest.raises(MappingError, match="mapped shared somewhere"):
        mapping.protect()
    tensor.fill_(9)  # still writable, and still the slab itself
    assert os.pread(fd.fileno(), 1, 0) == b"\x09"
    children.kill(child)
    mapping.protect()
    assert seal.is_sealed_slab(fd, PAGE) and int(tensor[PAGE - 1]) == 9
    fd.close()
    mapping.close()
    children.end()


def test_a_forked_child_does_not_hold_off_the_seals(no_fd_leak: None) -> None:
    backend = HostBackend()
    mapping = backend.create(PAGE)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(write_end)
            os.read(read_end, 1)
        finally:
            os._exit(0)
    try:
        mapping.protect()
    finally:
        os.close(write_end)
        os.close(read_end)
        os.waitpid(pid, 0)
    mapping.close()


_READER = """
import ctypes, socket, sys
from fer.memory import fdpass
from fer.memory.host import HostBackend
sock = socket.socket(fileno=int(sys.argv[1]))
sock.settimeout(20)
payload, (fd,), _ = fdpass.receive(sock, 100)
mapping = HostBackend().attach(fd, int(payload))
print(sum(ctypes.string_at(mapping.address, mapping.size)), flush=True)
if sys.argv[2] == "write":
    ctypes.memset(mapping.address + 5, 1, 1)
    print("written", flush=True)
"""


def _read_elsewhere(children: Children, fd: Fd, size: int, what: str) -> tuple[int, str]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child = children.python(_READER, str(theirs.fileno()), what, pass_fds=[theirs.fileno()])
        fdpass.send(ours, b"%d" % size, [fd])
        out, err = child.communicate(timeout=60)
    assert out, err
    return child.returncode, out


def test_a_reader_that_writes_dies_alone(children: Children) -> None:
    backend = HostBackend()
    mapping, fd = _published(backend, pattern=3)
    total = 3 * mapping.size
    code, out = _read_elsewhere(children, fd, mapping.size, "write")
    assert (code, out) == (-signal.SIGSEGV, f"{total}\n")
    assert int(_bytes(backend, mapping).sum(dtype=torch.int64)) == total
    assert _read_elsewhere(children, fd, mapping.size, "read") == (0, f"{total}\n")


_MAKER = """
import ctypes, os, signal, socket, sys
from fer.memory import fdpass
from fer.memory.host import HostBackend
sock = socket.socket(fileno=int(sys.argv[1]))
mapping = HostBackend().create(1 << 20)
ctypes.memset(mapping.address, 5, 1 << 20)
mapping.protect()
fdpass.send(sock, b"slab", [mapping.export()])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_slab_outlives_its_killed_maker(children: Children, no_fd_leak: None) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        child = children.python(_MAKER, str(theirs.fileno()), pass_fds=[theirs.fileno()])
        child.wait(60)
        ours.settimeout(WAIT_S)
        _, (fd,), _ = fdpass.receive(ours, 100)
    assert child.returncode == -signal.SIGKILL
    backend = HostBackend()
    mapping = backend.attach(fd, 1 << 20)
    assert int(_bytes(backend, mapping).sum(dtype=torch.int64)) == 5 << 20
    mapping.close()
    children.end()


def test_a_slab_that_does_not_fit_is_never_begun(no_fd_leak: None) -> None:
    backend = HostBackend(room=lambda: Room(free=200 << 20, total=4 * GIB))
    margin = spare(4 * GIB)
    assert margin == (4 * GIB) // 50
    with pytest.raises(OutOfMemory, match="fer evict") as caught:
        backend.create(150 << 20)
    assert caught.value.fields == {"needed": 150 << 20, "free": (200 << 20) - margin}
    backend.create(50 << 20).close()


def test_a_slab_in_the_making_counts_until_it_is_filled(no_fd_leak: None) -> None:
    backend = HostBackend(room=lambda: Room(free=200 << 20, total=4 * GIB))
    first = backend.create(80 << 20)
    assert backend.room().free == 120 << 20, "memory that was promised and not yet touched is not free"
    with pytest.raises(OutOfMemory):
        backend.create(80 << 20)
    _bytes(backend, first)[: 40 << 20].fill_(1)
    assert (160 << 20) <= backend.room().free <= (161 << 20)
    first.close()
    assert backend.room().free == 200 << 20


def test_sizes_and_parts_that_make_no_sense(no_fd_leak: None) -> None:
    backend = HostBackend()
    for size in (0, -1):
        with pytest.raises(ValueError):
            backend.create(size)
    with backend.create(PAGE).export() as fd, pytest.raises(SlabLost):
        backend.attach(fd, 0)
    mapping = backend.create(PAGE)
    for offset, nbytes in ((-1, 5), (0, PAGE + 1), (PAGE, 1), (0, -1)):
        with pytest.raises(FerBug):
            backend.storage(mapping, offset, nbytes)
    assert backend.storage(mapping, PAGE, 0).nbytes() == 0
    mapping.close()


def test_addresses_that_cannot_be_had(no_fd_leak: None, children: Children) -> None:
    code = """
import resource
from fer.errors import MappingError
from fer.memory.host import HostBackend
backend = HostBackend()
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    backend.create(2 << 30)
except MappingError as error:
    print(error.why)
"""
    out, err = children.python(code).communicate(timeout=WAIT_S)
    assert "Cannot allocate memory" in out, err
    children.end()


def test_the_device_name_chooses_the_memory() -> None:
    assert open_backend("cpu") is open_backend("cpu")
    assert (open_backend("cpu").gpu, open_backend("cpu").base) == ("host", 0)
    for name in ("tpu", "cuda:x", "", "cuda:", "cpu:0"):
        with pytest.raises(OptionError):
            open_backend(name)
    with pytest.raises(OptionError, match="transport"):
        open_backend("cpu", transport="carrier-pigeon")


def test_host_memory_needs_no_torch(children: Children) -> None:
    code = "from fer.memory.open import open_backend; open_backend('cpu').create(1)"
    code += "; import sys; print('torch' in sys.modules)"
    out, err = children.python(code).communicate(timeout=WAIT_S)
    assert out == "False\n", err


def _machine(folder: Path, *, cgroup: str, mountinfo: str, files: dict[str, str]) -> Path:
    """A made-up /proc, and a cgroup tree beside it; ``{sys}`` in ``mountinfo`` stands for that tree."""
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 67108864 kB\nMemFree: 1 kB\nMemAvailable: 33554432 kB\n")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(mountinfo.format(sys=folder / "sys"))
    for name, text in files.items():
        path = folder / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc


V2 = "30 24 0:26 / {sys} rw shared:4 - cgroup2 cgroup2 rw\n"
V1 = "31 24 0:27 /docker/abc {sys} rw - cgroup cgroup rw,memory\n"


def test_without_limits_the_kernels_figure_counts(tmp_path: Path) -> None:
    proc = _machine(
        tmp_path, cgroup="0::/a\n", mountinfo=V2, files={"a/memory.max": "max\n", "a/memory.current": "5\n"}
    )
    assert host_room(proc) == Room(free=32 * GIB, total=64 * GIB)


def test_the_tightest_limit_up_the_tree_counts(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": f"{20 * GIB}\n",
        "a/b/memory.current": f"{2 * GIB}\n",
        "a/memory.max": f"{10 * GIB}\n",
        "a/memory.high": f"{9 * GIB}\n",
        "a/memory.current": f"{6 * GIB}\n",
        "a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
    }
    proc = _machine(tmp_path, cgroup="0::/a/b\n", mountinfo=V2, files=files)
    assert host_room(proc) == Room(free=4 * GIB, total=9 * GIB)


def test_a_container_sees_its_part_of_the_tree(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": f"{8 * GIB}\n",
        "memory.usage_in_bytes": f"{7 * GIB}\n",
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
        "x/memory.limit_in_bytes": "9223372036854771712\n",
        "x/memory.usage_in_bytes": "5\n",
    }
    cgroup = "4:memory:/docker/abc/x\n3:cpu:/\n0::/\n"
    proc = _machine(tmp_path, cgroup=cgroup, mountinfo=V1, files=files)
    assert host_room(proc) == Room(free=2 * GIB, total=8 * GIB)


def test_a_path_outside_of_the_mount_means_its_root(tmp_path: Path) -> None:
    files = {"memory.max": f"{3 * GIB}\n", "memory.current": f"{4 * GIB}\n"}
    proc = _machine(tmp_path, cgroup="0::/../other\n", mountinfo=V2, files=files)
    assert host_room(proc) == Room(free=0, total=3 * GIB)


def test_nothing_readable_means_no_room_rather_than_an_error(tmp_path: Path) -> None:
    assert host_room(tmp_path) == Room(free=0, total=0)


def test_this_machine_has_room() -> None:
    room = host_room()
    assert 0 < room.free <= room.total < 1 << 50
    assert sys.platform == "linux"
