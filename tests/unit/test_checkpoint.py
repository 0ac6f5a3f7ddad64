"""Shards of a model folder, and identity by content."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fer.errors import CheckpointError
from fer.weights import checkpoint
from fer.weights.checkpoint import (
    CheckpointIdentity,
    Verdict,
    changed,
    compare,
    full_digest,
    resolve,
    sample_digest,
    stamp,
)
from fer.weights.shards import HEADER_LIMIT, read_header

Shape = tuple[int, ...]


def write(path: Path, tensors: dict[str, tuple[Shape, bytes]], *, dtype: str = "F32") -> Path:
    """A safetensors file, written by hand so that every byte of it is ours to damage."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, body = 0, b""
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position, body = position + len(data), body + data
    return write_raw(path, json.dumps(header).encode(), body)


def write_raw(path: Path, header: bytes, body: bytes = b"", length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + body)
    return path


def floats(count: int, value: float = 1.0) -> tuple[Shape, bytes]:
    return (count,), struct.pack(f"<{count}f", *(value + number for number in range(count)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards and their index, the second tensor large enough that samples do not cover it."""
    model = tmp_path / "model"
    model.mkdir()
    write(model / "model-00001-of-00002.safetensors", {"a": floats(10), "big": floats(5000)})
    write(model / "model-00002-of-00002.safetensors", {"b": floats(100), "none": ((0,), b"")})
    weight_map = {name: f"model-0000{shard}-of-00002.safetensors" for name, shard in (("a", 1), ("big", 1), ("b", 2))}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (model / "config.json").write_text("{}")
    return model


def identify(files: list[Path]) -> CheckpointIdentity:
    """As an edition has it once its digests are made."""
    found = stamp(files)
    return CheckpointIdentity(files=found.files, samples=sample_digest(files), full=full_digest(files))


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(data)


# --- resolve ---


def test_shards_of_the_index_are_found_in_order(folder: Path) -> None:
    assert [path.name for path in resolve(folder)] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"a": floats(3)})
    assert resolve(tmp_path) == [file]
    assert resolve(file) == [file]
    assert resolve(str(tmp_path)) == [file]


def test_a_snapshot_of_links_works_and_keeps_its_names(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "rev"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(folder.iterdir()):
        blob = tmp_path / f"blob{number}"
        path.rename(blob)
        (snapshot / path.name).symlink_to(blob)
    files = resolve(snapshot)
    assert [path.parent for path in files] == [snapshot, snapshot]
    assert stamp(files).files[0].inode == os.stat(files[0]).st_ino
    (tmp_path / "blob0").unlink()
    (tmp_path / "blob1").unlink()
    with pytest.raises(CheckpointError, match=r"leads nowhere|No such file"):
        resolve(snapshot)


def test_files_kept_twice_in_another_layout_are_no_extra_shards(folder: Path) -> None:
    write(folder / "consolidated.safetensors", {"a": floats(10)})
    assert len(resolve(folder)) == 2


def no_shard(folder: Path) -> str:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return r"model-00002-of-00002\.safetensors: No such file"


def extra_shard(folder: Path) -> str:
    write(folder / "model-00003-of-00003.safetensors", {"c": floats(1)})
    return r"model-00003-of-00003\.safetensors: model\.safetensors\.index\.json does not name it"


def truncated(folder: Path) -> str:
    file = folder / "model-00002-of-00002.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    return r"00002\.safetensors: it is truncated: its tensors need"


def longer(folder: Path) -> str:
    with (folder / "model-00002-of-00002.safetensors").open("ab") as file:
        file.write(b"xy")
    return "2 bytes follow its last tensor"


def truncated_in_header(folder: Path) -> str:
    os.truncate(folder / "model-00001-of-00002.safetensors", 40)
    return "it is truncated: the header needs"


def empty(folder: Path) -> str:
    os.truncate(folder / "model-00001-of-00002.safetensors", 0)
    return "it is truncated: 0 bytes hold no header"


def moved_tensor(folder: Path) -> str:
    write(folder / "model-00001-of-00002.safetensors", {"a": floats(10)})
    return "says that big is in it, and it is not"


def index_no_json(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("{]")
    return "it is no valid JSON"


def index_without_map(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    return "it has no weight_map"


def index_leads_out(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/x.safetensors"}}')
    return "is no name of a shard"


def index_names_twice(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "y"}}')
    return "'a' stands in it twice"


def no_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").unlink()
    return "2 safetensors files and no index"


@pytest.mark.parametrize(
    "damage",
    [
        no_shard,
        extra_shard,
        truncated,
        longer,
        truncated_in_header,
        empty,
        moved_tensor,
        index_no_json,
        index_without_map,
        index_leads_out,
        index_names_twice,
        no_index,
    ],
)
def test_damaged_folders_are_refused_by_name(folder: Path, damage: Callable[[Path], str]) -> None:
    message = damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        resolve(folder)
    assert str(folder) in caught.value.fields["path"]


def test_folders_without_safetensors_say_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file"):
        resolve(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"only pytorch_model\.bin"):
        resolve(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        resolve(tmp_path / "nowhere")


def entry(**changes: Any) -> bytes:
    return json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}).encode()


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "no valid JSON"),
        (b"\xff\xfe{}", "no valid JSON"),
        (b"[]", "no JSON object"),
        (b"[" * 100_000, "no valid JSON"),
        (b'{"a": 1}', "a lacks dtype"),
        (b'{"a": {}}', "a lacks dtype"),
        (b'{"a": {}, "a": {}}', "stands in it twice"),
        (entry(dtype="F31"), "dtype 'F31'"),
        (entry(shape=[-2]), "shape"),
        (entry(shape=[True, 2]), "shape"),
        (entry(shape=[3]), "cannot have 8 bytes"),
        (entry(data_offsets=[8, 0]), "bytes 8 to 0"),
        (entry(data_offsets=[4, 12]), "begins at"),
        (entry(data_offsets=[0]), "a lacks dtype"),
        (entry(shape=[1 << 70], data_offsets=[0, 4 << 70]), "truncated"),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, header: bytes, message: str) -> None:
    file = write_raw(tmp_path / "model.safetensors", header, b"\0" * 8)
    with pytest.raises(CheckpointError, match=message):
        read_header(file)


@pytest.mark.parametrize("length", [HEADER_LIMIT + 1, 2**63, 2**64 - 1])
def test_a_huge_header_length_is_refused_without_reading(tmp_path: Path, length: int) -> None:
    file = write_raw(tmp_path / "model.safetensors", b"{}", length=length)
    with pytest.raises(CheckpointError, match="the limit is"):
        read_header(file)


def test_packed_dtypes_and_empty_files_are_sound(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"q": ((3, 2), b"abc")}, dtype="F4")
    assert [(tensor.name, tensor.end - tensor.begin) for tensor in read_header(file).tensors] == [("q", 3)]
    assert read_header(write(tmp_path / "none.safetensors", {})).tensors == ()


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    torch = pytest.importorskip("torch")
    tensors = {"x": torch.zeros(3, 5, dtype=torch.bfloat16), "s": torch.tensor(1.0), "e": torch.zeros(0, 4)}
    tensors["f8"] = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    found = {tensor.name: tensor.shape for tensor in read_header(tmp_path / "model.safetensors").tensors}
    assert found == {"x": (3, 5), "s": (), "e": (0, 4), "f8": (4, 4)}


# --- identity ---


def verdict(folder: Path, kept: CheckpointIdentity) -> Verdict:
    return compare(stamp(resolve(folder)), kept)


def test_unchanged_files_are_the_same_without_reading_them(folder: Path) -> None:
    kept = stamp(resolve(folder))
    found = verdict(folder, kept)
    assert (found.same, found.by) == (True, "stat")
    assert found.now.samples == found.now.full == ""


def test_same_headers_with_other_values_are_a_quick_miss(folder: Path) -> None:
    """A fine-tune of the same base agrees in path, size and header."""
    kept = identify(resolve(folder))
    file = folder / "model-00001-of-00002.safetensors"
    header = read_header(file).raw
    write(file, {"a": floats(10, 2.0), "big": floats(5000, 7.0)})
    assert read_header(file).raw == header
    found = verdict(folder, kept)
    assert (found.same, found.by) == (False, "samples")
    assert found.now.full == ""


def test_a_touched_file_is_the_same_by_all_its_bytes(folder: Path) -> None:
    kept = identify(resolve(folder))
    os.utime(folder / "model-00001-of-00002.safetensors", (1, 1))
    found = verdict(folder, kept)
    assert (found.same, found.by) == (True, "full")
    assert "mtime" in found.why
    assert found.now.full == kept.full


def test_a_copied_folder_is_the_same_by_all_its_bytes(folder: Path, tmp_path: Path) -> None:
    kept = identify(resolve(folder))
    shutil.copytree(folder, tmp_path / "copy")
    found = verdict(tmp_path / "copy", kept)
    assert (found.same, found.by) == (True, "full")


def test_a_bit_flip_between_samples_with_its_time_restored_is_found(folder: Path) -> None:
    kept = identify(resolve(folder))
    file = folder / "model-00001-of-00002.safetensors"
    before, big = file.stat(), read_header(file).tensors[1]
    sampled = {o for at in checkpoint._places("big", big.begin, big.end, 256) for o in range(at, at + 256)}
    offset = next(offset for offset in range(big.begin, big.end) if offset not in sampled)
    poke(file, offset, bytes([file.read_bytes()[offset] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    found = verdict(folder, kept)
    assert (found.same, found.by) == (False, "full")
    assert "ctime" in found.why
    assert found.now.samples == kept.samples


def test_without_a_full_digest_a_touched_file_is_unknown(folder: Path) -> None:
    kept = identify(resolve(folder))
    os.utime(folder / "model-00001-of-00002.safetensors", (1, 1))
    for samples in (kept.samples, ""):
        found = verdict(folder, CheckpointIdentity(files=kept.files, samples=samples))
        assert (found.same, found.by) == (False, "unknown")
        assert "not there yet" in found.why


def test_a_cancelled_comparison_is_unknown(folder: Path) -> None:
    kept = identify(resolve(folder))
    os.utime(folder / "model-00001-of-00002.safetensors", (1, 1))
    found = compare(stamp(resolve(folder)), kept, cancelled=lambda: True)
    assert (found.same, found.by) == (False, "unknown")
    assert "cancelled" in found.why


def test_renamed_added_and_grown_files_differ_at_a_glance(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.safetensors", {name: floats(9)}) for name in "ab"]
    kept = identify(files)
    files[1] = files[1].rename(tmp_path / "c.safetensors")
    found = compare(stamp(files), kept)
    assert (found.same, found.by, found.why) == (False, "stat", "b.safetensors is gone; c.safetensors is new")
    found = compare(stamp([files[0]]), kept)
    assert (found.same, found.by) == (False, "stat")
    kept = identify([files[0]])
    write(files[0], {"a": floats(10)})
    found = compare(stamp([files[0]]), kept)
    assert (found.same, found.by) == (False, "stat")
    assert "size" in found.why


def test_any_file_can_be_identified(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(os.urandom(100_000))
    kept = identify([file])
    shutil.copy(file, tmp_path / "copy.bin")
    os.replace(tmp_path / "copy.bin", file)
    assert compare(stamp([file]), kept).by == "full"
    poke(file, -1, b"\0" if file.read_bytes()[-1] else b"\1")
    assert compare(stamp([file]), kept).by == "samples"


def test_no_files_at_all_agree() -> None:
    found = compare(stamp([]), stamp([]))
    assert (found.same, found.why) == (True, "there are no checkpoint files")


def test_digests_do_not_depend_on_place_or_process(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    code = (
        "import sys; from fer.weights.checkpoint import *; files = resolve(sys.argv[1]);"
        "print(sample_digest(reversed(files)), full_digest(reversed(files)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "copy")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, cwd=Path(__file__).parents[2]
    )
    files = resolve(folder)
    assert done.stdout.split() == [sample_digest(files), full_digest(files)]


def test_a_file_that_changes_while_it_is_read_gives_no_digest(folder: Path) -> None:
    files = resolve(folder)

    def append() -> bool:
        with files[0].open("ab") as file:
            file.write(b"x")
        return False

    with pytest.raises(CheckpointError, match="changed while it was read"):
        full_digest(files, cancelled=append)


def test_a_cancelled_digest_is_empty(folder: Path) -> None:
    assert full_digest(resolve(folder), cancelled=lambda: True) == ""


def test_what_changed_during_a_load_is_named(folder: Path) -> None:
    files = resolve(folder)
    before = stamp(files)
    assert changed(before, stamp(files)) == []
    poke(files[1], -4, b"\0\0\0\1")
    assert changed(before, stamp(files)) == [f"{files[1].name} has another mtime, ctime"]


def test_a_write_right_after_a_stamp_cannot_hide_in_the_same_tick(tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", {"a": floats(4)})
    for number in range(5):
        poke(file, -1, bytes([number]))
        before = stamp([file])
        poke(file, -1, bytes([number + 100]))
        assert changed(before, stamp([file]))


def test_missing_and_irregular_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        stamp([tmp_path / "nowhere"])
    with pytest.raises(CheckpointError, match="no regular file"):
        stamp([tmp_path])


def test_identities_survive_json(folder: Path) -> None:
    kept = identify(resolve(folder))
    assert CheckpointIdentity.from_json(kept.to_json()) == kept


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b'{"schema": 2, "files": []}',
        b'{"schema": 1, "files": [{}]}',
        b'{"schema": 1, "files": [], "samples": 3}',
        b'{"schema": 1, "files": [], "other": ""}',
    ],
)
def test_other_data_is_no_identity(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        CheckpointIdentity.from_json(data)


def test_nothing_stays_open(folder: Path, no_fd_leak: None) -> None:
    kept = identify(resolve(folder))
    with pytest.raises(CheckpointError):
        full_digest([folder / "nowhere"])
    assert full_digest(resolve(folder), cancelled=lambda: True) == ""
    assert verdict(folder, kept).same
