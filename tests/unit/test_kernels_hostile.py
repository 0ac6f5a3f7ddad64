"""Archives that somebody else made, and archives that broke: refused by name, nothing written outside, nothing half."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from fer.errors import ArchiveError, ArchiveIncompatible, ArchiveUntrusted
from fer.kernels import container, pack, unpack
from fer.kernels.compat import Live
from fer.kernels.unpack import Terms
from tests.support import kernel_entries as made
from tests.support.kernel_entries import pace  # noqa: F401 - a fixture

TAKE = Terms(code="take")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return made.three(tmp_path / "cache")


@pytest.fixture
def archive(cache: Path, tmp_path: Path) -> Path:
    return made.packed(cache, tmp_path / "a.ferkernels")


# -- code of the host


def test_code_is_refused_unless_it_is_trusted(cache: Path, tmp_path: Path) -> None:
    made.library(cache)
    archive = tmp_path / "a"
    pack.pack({"triton": cache}, archive)
    with pytest.raises(ArchiveUntrusted, match="code of the host"):
        unpack.unpack(archive, made.places(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()
    skipped = unpack.unpack(archive, made.places(tmp_path / "skipped"), Terms(code="skip"))
    assert (len(skipped.restored), len(skipped.skipped)) == (3, 1)
    assert len(unpack.unpack(archive, made.places(tmp_path / "taken"), TAKE).restored) == 4


@pytest.mark.parametrize("name", ["x.pkl", "x.so", "x.py", "x.sh", "x.pyc", "x.pth", "x.ninja", "x"])
def test_names_that_may_be_code(name: str) -> None:
    from fer.kernels.trust import code_in

    assert code_in(name, b"text")


def test_contents_must_be_what_the_name_says() -> None:
    from fer.kernels.trust import code_in

    assert code_in("add.cubin", made.binary(machine=62))
    assert code_in("add.json", b"\x80\x04pickle")
    assert code_in("add.ptx", made.binary())
    assert code_in("add.hsaco", made.binary())
    assert not code_in("add.cubin", made.binary())


def test_code_behind_a_harmless_name_is_hostile(archive: Path, tmp_path: Path) -> None:
    """A manifest that calls a library of the host a kernel, and is consistent otherwise."""
    library = made.binary(machine=62)
    row = [len(library), hashlib.sha256(library).hexdigest()]

    def lie(data: dict[str, Any]) -> None:
        for each in data["entries"]:
            each["files"] = [[f[0], *row] if f[0].endswith(".cubin") else f for f in each["files"]]

    blobs = {hashlib.sha256(data).hexdigest(): data for _, data in made.members(archive)[2:]} | {row[1]: library}
    made.with_manifest(archive, lie)
    (info, manifest), digest, *_ = made.members(archive)
    order = dict.fromkeys(f[2] for each in json.loads(manifest)["entries"] for f in each["files"])
    made.rebuild(archive, [(info, manifest), digest, *(made.member(f"blobs/{name}", blobs[name]) for name in order)])
    with pytest.raises(ArchiveUntrusted, match="no binary of a GPU"):
        unpack.unpack(archive, made.places(tmp_path / "target"))
    with pytest.raises(ArchiveUntrusted):
        unpack.verify(archive)
    assert not list((tmp_path / "target").glob("*"))


# -- hostile archives (K20)

Members = list[tuple[tarfile.TarInfo, bytes]]


def parent(members: Members) -> Members:
    return [*members[:2], made.member("../x", b"x"), *members[2:]]


def absolute(members: Members) -> Members:
    return [*members[:2], made.member("/tmp/x", b"x"), *members[2:]]


def symbolic(members: Members) -> Members:
    return [*members[:2], made.member(members[2][0].name, type=tarfile.SYMTYPE, linkname="/etc/passwd"), *members[3:]]


def hard(members: Members) -> Members:
    return [*members[:2], made.member(members[2][0].name, type=tarfile.LNKTYPE, linkname="x"), *members[3:]]


def device(members: Members) -> Members:
    return [*members[:2], made.member(members[2][0].name, type=tarfile.CHRTYPE, devmajor=1, devminor=3), *members[3:]]


def pipe(members: Members) -> Members:
    return [*members[:2], made.member(members[2][0].name, type=tarfile.FIFOTYPE), *members[3:]]


def setuid(members: Members) -> Members:
    return [*members[:2], made.member(members[2][0].name, members[2][1], mode=0o4755), *members[3:]]


def owned(members: Members) -> Members:
    return [*members[:2], made.member(members[2][0].name, members[2][1], uid=1000), *members[3:]]


@pytest.mark.parametrize(
    "change", [parent, absolute, symbolic, hard, device, pipe, setuid, owned], ids=lambda change: change.__name__
)
def test_hostile_members_are_refused(archive: Path, tmp_path: Path, change: Callable[[Members], Members]) -> None:
    made.rebuild(archive, change(made.members(archive)))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with pytest.raises(ArchiveUntrusted):
        unpack.unpack(archive, made.places(tmp_path / "target"), TAKE)
    with pytest.raises(ArchiveUntrusted):
        unpack.verify(archive)
    left = {path for path in tmp_path.rglob("*") if path.is_file()} - {Path(path) for path in before}
    assert not left


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", "a\\b", "a\0b", "", ".", "x" * 300, "a\nb"])
def test_hostile_names_in_the_manifest_are_refused(archive: Path, tmp_path: Path, name: str) -> None:
    def change(data: dict[str, Any], where: str) -> None:
        one = data["entries"][0]
        if where == "path":
            one["path"] = name
        else:
            one["files"][0][0] = name
            one["files"].sort()
        data["entries"].sort(key=lambda each: each["path"])

    original = archive.read_bytes()
    for where in ("path", "file"):
        archive.write_bytes(original)
        made.with_manifest(archive, lambda data, where=where: change(data, where))
        with pytest.raises(ArchiveUntrusted, match="is named"):
            unpack.unpack(archive, made.places(tmp_path / "target"), TAKE)


@pytest.mark.parametrize(
    ("component", "path", "name"),
    [
        ("triton", "somewhere", "add.json"),
        ("triton", ".fer-stage.x", "add.json"),
        ("triton", "A" * 52, "__grp__add.json"),
        ("triton", "A" * 52, "below/add.json"),
        ("p2p-map", "fontconfig", "x.json"),
        ("compute-cache", "other", "x.json"),
        ("deepgemm", "x", "kernel.cu"),
        ("markers", "deepgemm-0", "marker.json"),
    ],
)
def test_entries_where_their_cache_has_none_are_refused(tmp_path: Path, component: str, path: str, name: str) -> None:
    """Some caches lie in folders with much else in them."""
    data = b"{}"
    digest = hashlib.sha256(data).hexdigest()
    entries = [{"component": component, "path": path, "files": [[name, len(data), digest]]}]
    text = json.dumps({"schema": 1, "tool": "x", "entries": entries}).encode()
    archive = tmp_path / "a"
    container.write(archive, text, [(digest, data)])
    with pytest.raises(ArchiveUntrusted):
        unpack.unpack(archive, {component: tmp_path / "target"}, TAKE)
    assert not (tmp_path / "target").exists()


def test_ten_gigabytes_of_zeros_are_refused_by_the_header(archive: Path, tmp_path: Path) -> None:
    """The member claims them; nobody reads them."""
    members = made.members(archive)
    head = io.BytesIO()
    with tarfile.open(fileobj=head, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in members[:2]:
            tar.addfile(info, io.BytesIO(data))
    info, _ = made.member(members[2][0].name)
    info.size = 10 << 30
    raw = head.getvalue().rstrip(b"\0")
    raw += bytes(-len(raw) % 512) + info.tobuf(format=tarfile.GNU_FORMAT)
    archive.write_bytes(zstandard.ZstdCompressor().compress(raw + bytes(1 << 20)))
    with pytest.raises((ArchiveUntrusted, ArchiveError)):
        unpack.unpack(archive, made.places(tmp_path / "target"), TAKE)
    with pytest.raises((ArchiveUntrusted, ArchiveError)):
        unpack.verify(archive)


def test_a_bomb_is_refused_by_its_ratio(archive: Path, tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["entries"][0]["files"][0][1] = 1 << 30

    with pytest.raises(ArchiveUntrusted, match="bytes out of"):
        unpack.unpack(made.with_manifest(archive, change), made.places(tmp_path / "target"), TAKE)


def test_a_manifest_that_unfolds_is_refused_before_it_is_read(tmp_path: Path) -> None:
    container.write(tmp_path / "a", b'{"schema":1,"tool":"' + b"x" * (32 << 20) + b'"}', [])
    assert (tmp_path / "a").stat().st_size < 10_000
    with pytest.raises(ArchiveUntrusted, match="is the most"):
        unpack.peek(tmp_path / "a")


@pytest.mark.parametrize("size", [-1, -5])
def test_a_size_below_zero_is_refused_by_the_header(tmp_path: Path, size: int) -> None:
    """A reader that is asked for -1 bytes gives everything there is."""
    (tmp_path / "a").write_bytes(zstandard.ZstdCompressor().compress(container._header("manifest.json", size)))
    with pytest.raises(ArchiveError, match="below zero"):
        unpack.peek(tmp_path / "a")


# -- damaged archives


def test_other_bytes_under_a_digest_are_noticed(archive: Path, tmp_path: Path) -> None:
    """Whole for zstd and for tar: as written by a program whose memory failed."""
    members = made.members(archive)
    info, data = members[2]
    other = bytes([data[0] ^ 1]) + data[1:]
    made.rebuild(archive, [*members[:2], (info, other), *members[3:]])
    with pytest.raises(ArchiveError, match="checksum does not match"):
        unpack.verify(archive)
    with pytest.raises(ArchiveError, match="checksum does not match"):
        unpack.unpack(archive, made.places(tmp_path / "target"))


def test_a_manifest_that_its_digest_does_not_fit_is_noticed(archive: Path) -> None:
    members = made.members(archive)
    made.rebuild(archive, [members[0], (members[1][0], b"0" * 64), *members[2:]])
    with pytest.raises(ArchiveError, match="checksum does not match"):
        unpack.peek(archive)


@pytest.mark.parametrize("where", ["padding", "header"])
def test_a_tar_that_fer_would_have_written_otherwise_is_noticed(archive: Path, where: str) -> None:
    raw = bytearray(zstandard.ZstdDecompressor().stream_reader(io.BytesIO(archive.read_bytes())).read())
    size = len(made.members(archive)[0][1])
    assert size % 512
    raw[512 + size if where == "padding" else 148] ^= 1
    archive.write_bytes(zstandard.ZstdCompressor().compress(bytes(raw)))
    with pytest.raises(ArchiveError, match="padding is not empty" if where == "padding" else "header"):
        unpack.peek(archive)


def test_a_kernel_under_another_kernels_key_is_noticed(archive: Path, tmp_path: Path) -> None:
    """Every digest fits; a lookup would have been given the wrong binary."""
    original = archive.read_bytes()
    for change in ("swap", "move"):

        def exchange(data: dict[str, Any], change: str = change) -> None:
            one, other, _ = data["entries"]
            if change == "swap":
                one["path"], other["path"] = other["path"], one["path"]
            else:
                one["path"] = "A" * 52
            data["entries"].sort(key=lambda found: found["path"])

        archive.write_bytes(original)
        made.with_manifest(archive, exchange)
        members = made.members(archive)
        order = dict.fromkeys(f[2] for each in json.loads(members[0][1])["entries"] for f in each["files"])
        blobs = {hashlib.sha256(data).hexdigest(): data for _, data in members[2:]}
        made.rebuild(archive, [*members[:2], *(made.member(f"blobs/{name}", blobs[name]) for name in order)])
        with pytest.raises(ArchiveError, match="another kernel's key"):
            unpack.unpack(archive, made.places(tmp_path / change))
        with pytest.raises(ArchiveError, match="another kernel's key"):
            unpack.verify(archive)


@pytest.mark.parametrize("value", [5, "text", ["A"], None])
def test_parts_of_another_type_are_unknown(archive: Path, tmp_path: Path, value: Any) -> None:
    here = Live(target={"env": {"A": "1"}})
    made.with_manifest(archive, lambda data: data["targets"][0].update(env=value))
    assert len(unpack.unpack(archive, made.places(tmp_path / "target"), Terms(here=here)).restored) == 3


@pytest.mark.usefixtures("pace")
def test_every_truncation_is_noticed_and_leaves_whole_entries(archive: Path, cache: Path, tmp_path: Path) -> None:
    data = archive.read_bytes()
    sound = made.content(cache)
    for number, end in enumerate(range(0, len(data), max(1, len(data) // 40))):
        archive.write_bytes(data[:end])
        target = tmp_path / f"t{number}"
        with pytest.raises(ArchiveError):
            unpack.unpack(archive, made.places(target))
        with pytest.raises(ArchiveError):
            unpack.verify(archive)
        for folder in target.glob("*"):
            assert {n: b for n, b in sound.items() if n.startswith(folder.name)} == {
                n: b for n, b in made.content(target).items() if n.startswith(folder.name)
            }
        assert not list(target.glob(".*"))


def test_every_flipped_bit_is_noticed(archive: Path, tmp_path: Path) -> None:
    data = archive.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 60)):
        flipped = bytearray(data)
        flipped[at] ^= 0x10
        archive.write_bytes(flipped)
        try:
            manifest = unpack.verify(archive)
        except (ArchiveError, ArchiveIncompatible, ArchiveUntrusted):
            continue
        # zstd's frame header has bits that mean nothing: then it is the same archive.
        assert len(manifest.entries) == 3, at


def test_order_and_repetition_are_noticed(archive: Path, tmp_path: Path) -> None:
    members = made.members(archive)
    cases = (
        [members[0], members[1], members[3], members[2], *members[4:]],  # re-ordered
        [*members[:3], members[2], *members[3:]],  # twice
        [*members, members[2]],  # at the end
        members[:-1],  # missing
        [members[1], members[0], *members[2:]],  # the manifest is not first
        members[1:],
    )
    for number, wrong in enumerate(cases):
        made.rebuild(archive, wrong)
        with pytest.raises(ArchiveError):
            unpack.unpack(archive, made.places(tmp_path / f"target{number}"))
        with pytest.raises(ArchiveError):
            unpack.verify(archive)


def test_something_behind_it_is_noticed(archive: Path) -> None:
    data = archive.read_bytes()
    for more in (b"x", data, zstandard.ZstdCompressor().compress(b"more")):
        archive.write_bytes(data + more)
        with pytest.raises(ArchiveError):
            unpack.verify(archive)


def test_entries_twice_or_out_of_order_are_noticed(archive: Path) -> None:
    original = archive.read_bytes()
    for change in (
        lambda data: data["entries"].append(data["entries"][0]),
        lambda data: data["entries"].reverse(),
        lambda data: data["entries"][0]["files"].reverse(),
        lambda data: data["entries"][0].update(target=99),
        lambda data: data["entries"][0]["groups"].update({"other.json": ["other.json"]}),
        lambda data: data.update(surprise=1),
        lambda data: data["entries"][0]["files"][0].__setitem__(2, "zz"),
    ):
        archive.write_bytes(original)
        made.with_manifest(archive, change)
        with pytest.raises(ArchiveError):
            unpack.verify(archive)


def test_another_schema_is_incompatible(archive: Path) -> None:
    made.with_manifest(archive, lambda data: data.update(schema=99, entries="otherwise"))
    with pytest.raises(ArchiveIncompatible, match="schema 99"):
        unpack.verify(archive)


@pytest.mark.parametrize("data", [b"", b"x", b"\x28\xb5\x2f\xfd", bytes(4096), b"PK\3\4" + bytes(100)])
def test_other_files_are_no_archives(archive: Path, data: bytes) -> None:
    archive.write_bytes(data)
    with pytest.raises(ArchiveError):
        unpack.verify(archive)


def test_a_missing_file_and_a_closed_folder(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="cannot be read"):
        unpack.verify(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError, match="cannot be unpacked"):
        unpack.unpack(archive, made.places(tmp_path / "file" / "cache"))
    with pytest.raises(ArchiveError, match="cannot be written"):
        container.write(tmp_path / "file" / "a", b"{}", [])


def test_what_a_killed_unpacker_left_is_tidied(tmp_path: Path) -> None:
    left = tmp_path / f"{unpack.STAGE}1.x"
    (left / "K").mkdir(parents=True)
    assert unpack.tidy(tmp_path) == []
    assert unpack.tidy(tmp_path, now=left.stat().st_mtime + 4000) == [left]
