"""Where the demo's weights cannot be written, the error says what the system said and what to do about it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fer.cli.demo_run import demonstration_model
from fer.engines import demo_model
from fer.errors import FerError, ResourceError, UsageError

FULL, FORBIDDEN = OSError(errno.ENOSPC, "full"), PermissionError(errno.EACCES, "no")


@pytest.mark.parametrize(
    ("error", "kind", "fix"),
    [
        (FULL, ResourceError, "Free 300 MB there, or name another folder with --home"),
        (
            RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
            ResourceError,
            "Free",
        ),
        (FORBIDDEN, UsageError, "Name another folder with --home"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named(
    error: Exception, kind: type[FerError], fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        raise error

    for needed in ("accelerate", "gguf"):  # looked for before anything is written
        pytest.importorskip(needed)
    monkeypatch.setattr(demo_model, "gguf_file", lambda: tmp_path / "model.gguf")
    monkeypatch.setattr(demo_model, "_convert", fail)
    with pytest.raises(kind, match=fix) as caught:
        demo_model.smollm2(tmp_path)
    assert str(tmp_path) in caught.value.what
    assert not list((tmp_path / "models").glob("*.new-*"))


@pytest.mark.timeout(120)
def test_the_command_passes_the_error_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--home"):
        demonstration_model(tmp_path / "file")
