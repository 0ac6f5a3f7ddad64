"""``fer serve``: an engine behind a stable address, started again whenever it dies."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from fer.cli.flags import Device, Model, RuntimeDir
from fer.cli.output import guarded
from fer.cli.settings import settings


def serve(
    model: Model,
    port: Annotated[int, typer.Option("--port", help="TCP port; 0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="Address to listen at.")] = "127.0.0.1",
    name: Annotated[str, typer.Option("--name", help="What clients call the model; by default its folder.")] = "",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="torch's name of a dtype, or auto.")] = "auto",
    max_length: Annotated[int, typer.Option("--max-length", help="Positions of prompt and answer together.")] = 1024,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Answers decoded at once, such as 1,2,4; by default one.")
    ] = "",
    standbys: Annotated[
        int,
        typer.Option(
            "--standbys",
            help="Further engines that stand by, without memory for answers.",
        ),
    ] = 0,
    tp: Annotated[
        int,
        typer.Option(
            "--tensor-parallel",
            "--tp",
            help="Ranks that share the model, a process and a GPU each; --device may name them: cuda:0,cuda:1.",
        ),
    ] = 1,
    resume: Annotated[
        str,
        typer.Option(
            "--resume",
            metavar="retry|prefill|fail",
            help="What becomes of an answer whose engine dies: retry makes its tokens again and goes on, prefill reads "
            "them with the prompt (quicker, and may go on otherwise where two tokens are as likely), fail ends it.",
        ),
    ] = "retry",
    queue: Annotated[int, typer.Option("--queue", help="Requests at once, waiting ones included.")] = 64,
    wait_s: Annotated[
        float, typer.Option("--engine-wait-s", help="Seconds a request waits for an engine to become active.")
    ] = 60.0,
    stall_s: Annotated[
        float, typer.Option("--stall-s", help="Seconds without a token after which a busy engine counts as hung.")
    ] = 300.0,
    drain_s: Annotated[float, typer.Option("--drain-s", help="Seconds that answers have at the end.")] = 30.0,
    batch: Annotated[
        bool,
        typer.Option(
            "--batch",
            help="Keep one more engine, for requests with service_tier flex; it is ended where others lack memory.",
        ),
    ] = False,
    batch_max_length: Annotated[
        int | None,
        typer.Option("--batch-max-length", help="As --max-length, of the batch engine; by default the same."),
    ] = None,
    batch_batch_sizes: Annotated[
        str, typer.Option("--batch-batch-sizes", help="As --batch-sizes, of the batch engine; by default the same.")
    ] = "",
    batch_queue: Annotated[int, typer.Option("--batch-queue", help="Requests at once of the tier flex.")] = 256,
    batch_wait_s: Annotated[
        float, typer.Option("--batch-wait-s", help="Seconds such a request waits for the batch engine.")
    ] = 600.0,
    launcher: Annotated[
        str, typer.Option("--launcher", help="Name of the launcher that starts engines, auto, or off.")
    ] = "auto",
    runtime_dir: RuntimeDir = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API has it, until SIGTERM: it drains and ends what it started.

    The address is written to stdout. An engine that dies is started again, and answers that were under way go on.
    """
    with guarded():
        options = settings(log="info", runtime_dir=runtime_dir)
        need("starlette", "uvicorn", "prometheus_client")
        from fer.standby.router import RouterLimits
        from fer.standby.service import BATCH_ROUTER, Settings
        from fer.standby.service import serve as run
        from fer.standby.supervisor import SupervisorLimits

        chosen: Any = resume  # checked there
        run(
            Settings(
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
                batch=batch,
                batch_max_length=batch_max_length,
                batch_rows=_sizes(batch_batch_sizes, "--batch-batch-sizes"),
                batch_router=dataclasses.replace(
                    BATCH_ROUTER, requests=batch_queue, wait_s=batch_wait_s, stall_s=stall_s
                ),
                launcher=launcher,
                runtime_dir=options.runtime_dir,
                router=RouterLimits(requests=queue, wait_s=wait_s, stall_s=stall_s),
                supervisor=SupervisorLimits(drain_s=drain_s),
            )
        )


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
