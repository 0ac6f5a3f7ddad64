"""Signed archives: code is taken from makers who are known, and from nobody else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fer.cli import main
from fer.errors import ArchiveUntrusted, UsageError
from fer.kernels import pack, signature, unpack
from fer.kernels.unpack import Terms
from tests.support import kernel_entries as made

if shutil.which("ssh-keygen") is None:
    pytest.skip("OpenSSH is not installed", allow_module_level=True)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    made.make(tmp_path / "cache", "add")
    made.library(tmp_path / "cache")
    pack.pack({"triton": tmp_path / "cache"}, tmp_path / "a.ferkernels")
    return tmp_path / "a.ferkernels"


def key(folder: Path, name: str) -> Path:
    """A fresh key; its public half is in ``NAME.pub``."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
    subprocess.run(command, check=True, timeout=60)
    return folder / name


def signers(folder: Path, **keys: Path) -> Path:
    """A list of those who are believed."""
    lines = [f"{who} {path.with_suffix('.pub').read_text()}" for who, path in keys.items()]
    (folder / "signers").write_text("".join(lines))
    return folder / "signers"


def test_a_known_maker_is_taken_at_his_word(archive: Path, tmp_path: Path) -> None:
    mine = key(tmp_path, "mine")
    assert signature.sign(archive, mine) == tmp_path / "a.ferkernels.sig"
    with signature.verified(archive, signers(tmp_path, me=mine)) as (path, who):
        assert who == "me"
        archive.unlink()  # exchanged meanwhile: what was verified is what is read
        archive.write_bytes(b"another")
        outcome = unpack.unpack(path, {"triton": tmp_path / "target"}, Terms(code="take"))
    assert len(outcome.restored) == 2


def test_others_are_not_believed(archive: Path, tmp_path: Path) -> None:
    mine, other = key(tmp_path, "mine"), key(tmp_path, "other")
    believed = signers(tmp_path, me=mine)
    with pytest.raises(ArchiveUntrusted, match="is not signed"), signature.verified(archive, believed):
        pass
    signature.sign(archive, other)
    with pytest.raises(ArchiveUntrusted, match="not believed"), signature.verified(archive, believed):
        pass
    signature.sign(archive, mine)
    archive.write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(ArchiveUntrusted, match="not believed"), signature.verified(archive, believed):
        pass


def test_a_signature_for_something_else_is_none(archive: Path, tmp_path: Path) -> None:
    mine = key(tmp_path, "mine")
    command = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(mine), "-n", "git", str(archive)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    with pytest.raises(ArchiveUntrusted), signature.verified(archive, signers(tmp_path, me=mine)):
        pass


def test_mistakes_are_named(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be signed"):
        signature.sign(archive, tmp_path / "nothing")
    with pytest.raises(UsageError, match="list of signers"), signature.verified(archive, tmp_path / "nothing"):
        pass


def test_the_commands(archive: Path, tmp_path: Path) -> None:
    mine = key(tmp_path, "mine")

    def run(*arguments: object) -> int:
        return CliRunner().invoke(main.app, ["kernels", *map(str, arguments)]).exit_code

    signed = tmp_path / "b.ferkernels"
    assert run("pack", signed, "--cache", tmp_path / "cache", "--sign", mine) == 0
    believed = signers(tmp_path, me=mine)
    common = ("--no-compare", "--cache", tmp_path / "target")
    assert run("unpack", signed, *common) == 9
    assert run("unpack", archive, *common, "--signers", believed) == 9  # not signed
    assert run("unpack", signed, *common, "--signers", believed) == 0
    assert len(list((tmp_path / "target").iterdir())) == 2
