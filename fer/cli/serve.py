"""``fer serve``: an engine behind a stable address, started again whenever it dies."""

from __future__ import annotations

import dataclasses
from typing import Any

from fer.cli import serve_flags as flags
from fer.cli.flags import Device, Model, RuntimeDir
from fer.cli.output import guarded
from fer.cli.settings import settings


def serve(
    model: Model,
    port: flags.Port = 8000,
    host: flags.Host = "127.0.0.1",
    name: flags.Name = "",
    device: Device = "auto",
    dtype: flags.Dtype = "auto",
    max_length: flags.MaxLength = None,
    batch_sizes: flags.BatchSizes = "",
    standbys: flags.Standbys = 0,
    tp: flags.TensorParallel = 1,
    resume: flags.Resume = "retry",
    keep_cache: flags.KeepCache = True,
    queue: flags.Queue = 64,
    wait_s: flags.EngineWait = 60.0,
    stall_s: flags.Stall = 300.0,
    drain_s: flags.Drain = 30.0,
    batch: flags.Batch = False,
    batch_max_length: flags.BatchMaxLength = None,
    batch_batch_sizes: flags.BatchBatchSizes = "",
    batch_queue: flags.BatchQueue = 256,
    batch_wait_s: flags.BatchWait = 600.0,
    launcher: flags.Launcher = "auto",
    runtime_dir: RuntimeDir = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it, until SIGTERM: it drains and ends what it started.

    The address is written to stdout. An engine that dies is started again, and answers that were under way go on.
    """
    with guarded():
        options = settings(log="info", runtime_dir=runtime_dir)
        need("starlette", "uvicorn", "prometheus_client")
        from fer.cli.log_thread import log_in_thread
        from fer.standby.router import RouterLimits
        from fer.standby.service import BATCH_ROUTER, Settings
        from fer.standby.service import serve as run
        from fer.standby.supervisor import SupervisorLimits

        chosen: Any = resume  # checked there
        asked = Settings(
            model=model,
            name=name,
            host=host,
            port=port,
            device=device,
            dtype=dtype,
            max_length=max_length,
            batch_sizes=_sizes(batch_sizes),
            standbys=standbys,
            tp=tp,
            resume=chosen,
            keep_cache=keep_cache,
            batch=batch,
            batch_max_length=batch_max_length,
            batch_rows=_sizes(batch_batch_sizes, "--batch-batch-sizes"),
            batch_router=dataclasses.replace(BATCH_ROUTER, requests=batch_queue, wait_s=batch_wait_s, stall_s=stall_s),
            launcher=launcher,
            runtime_dir=options.runtime_dir,
            router=RouterLimits(requests=queue, wait_s=wait_s, stall_s=stall_s),
            supervisor=SupervisorLimits(drain_s=drain_s),
        )
        with log_in_thread():  # the event loop must not wait for whoever reads our stderr
            run(asked)


def _sizes(text: str, flag: str = "--batch-sizes") -> tuple[int, ...]:
    from fer.errors import OptionError

    try:
        return tuple(int(size) for size in text.split(",") if size.strip())
    except ValueError:
        raise OptionError(f"{flag} {text!r} cannot be", fix="Give numbers such as 1,2,4") from None


def need(*packages: str) -> None:
    """Raise UsageError where the extra that brings these packages is not installed."""
    import importlib.util

    from fer.errors import UsageError

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"fer serve needs {' and '.join(missing)}", fix="Install them: pip install 'fast-engine-recovery[serve]'"
        )
