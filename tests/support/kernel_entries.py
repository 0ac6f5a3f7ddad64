"""Entries of Triton's cache without Triton, and archives of any content, hostile ones too."""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tarfile
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fer.kernels import elf, entry, pack, parts, unpack

ENV = {"TRITON_DEFAULT_FP_FUSION": "1"}


def binary(content: bytes = b"code", machine: int = elf.CUDA) -> bytes:
    """A whole ELF file of a machine, as far as its header says."""
    return (
        struct.pack("<16sHHIQQQIHHHHHH", elf.MAGIC + b"\2\1\1", 2, machine, 1, *(0, 0, 0), 0, 64, *(0, 0, 64, 0, 0))
        + content
    )


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def key_of(name: str) -> str:
    return entry.folder_of(digest_of(name))


def make(root: Path, name: str, *, arch: int = 90, sidecar: bool = True, **changed: Any) -> Path:
    """One complete kernel; ``changed`` are parts of its key."""
    folder = root / key_of(f"{name}{arch}")
    folder.mkdir(parents=True)
    digest = hashlib.sha256(f"{name}{arch}".encode()).hexdigest()
    metadata = {
        "hash": digest,
        "name": name,
        "target": {"backend": "cuda", "arch": arch, "warp_size": 32},
        "triton_version": changed.get("version", "3.9.0"),
        "num_warps": 4,
        **ENV,
    }
    files = {
        f"{name}.source": b"source",
        f"{name}.ttir": f"ttir of {name}".encode(),
        f"{name}.ptx": b".version 8.7 " + name.encode(),
        f"{name}.cubin": binary(name.encode()),
        f"{name}.json": json.dumps(metadata).encode(),
    }
    for each, data in files.items():
        (folder / each).write_bytes(data)
    made = {**parts.of_metadata(metadata), "triton": "build", "compiler": "release 12.8, V12.8.93", "line": 7}
    made |= {"function": f"model:{name}", "file": "model.py", "source": "text"} | changed
    if sidecar:
        stored = {each: entry.Stored.of(data) for each, data in files.items()}
        entry.write_group(str(folder), f"{name}.json", sorted(files), entry.Sidecar(stored, made, key=folder.name))
    else:
        entry.write(str(folder), f"{entry.GROUP}{name}.json", entry.group_list(str(folder), sorted(files)))
    return folder


def library(root: Path, name: str = "cuda_utils.cpython-311-x86_64-linux-gnu.so") -> Path:
    """A helper library of Triton, in an entry of its own."""
    folder = root / key_of(name)
    folder.mkdir(parents=True)
    (folder / name).write_bytes(binary(name.encode(), machine=62))
    return folder / name


def content(root: Path) -> dict[str, bytes]:
    """Every file of a cache but lists, which hold its own paths."""
    found = sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith(entry.GROUP))
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


# -- archives by hand


def members(archive: Path) -> list[tuple[tarfile.TarInfo, bytes]]:
    """An archive's members, as any tar reads them."""
    data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(archive.read_bytes())).read()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(info, tar.extractfile(info).read() if info.isreg() else b"") for info in tar]  # type: ignore[union-attr]


def rebuild(archive: Path, given: list[tuple[tarfile.TarInfo, bytes]], *, level: int = 3) -> Path:
    """Write an archive of these members, by another program's tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in given:
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    raw = out.getvalue().rstrip(b"\0")
    raw += bytes(-len(raw) % 512 + 1024)
    archive.write_bytes(zstandard.ZstdCompressor(level=level).compress(raw))
    return archive


def member(name: str, data: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One member as FER writes it, with some fields otherwise."""
    info = tarfile.TarInfo(name)
    info.mode, info.mtime = 0o644, 0
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def with_manifest(archive: Path, change: Any) -> Path:
    """The same archive with another manifest, whose digest fits again."""
    (_, manifest), _, *rest = members(archive)
    data = json.loads(manifest)
    change(data)
    text = json.dumps(data, sort_keys=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return rebuild(archive, [member("manifest.json", text), member("manifest.sha256", digest), *rest])


@pytest.fixture(params=["one after another", "by threads"])
def pace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Entries are written as where making files is quick, and as where it is slow."""
    monkeypatch.setattr(unpack, "_LOOK_AT", 1)
    monkeypatch.setattr(unpack, "_SLOW_S", -1.0 if request.param == "by threads" else float("inf"))
    return str(request.param)


def three(root: Path) -> Path:
    """A cache of three kernels."""
    for name in ("add", "scale", "softmax"):
        make(root, name)
    return root


def packed(cache: Path, path: Path) -> Path:
    """An archive of a cache of Triton's."""
    pack.pack({"triton": cache}, path)
    return path


def places(root: Path) -> dict[str, Path]:
    """Where an archive's kernels go."""
    return {"triton": root}
