"""The flags of ``fer serve``."""

from __future__ import annotations

from typing import Annotated

import typer

Port = Annotated[int, typer.Option("--port", help="TCP port; 0 takes a free one.")]
Host = Annotated[str, typer.Option("--host", help="Address to listen at.")]
Name = Annotated[str, typer.Option("--name", help="What clients call the model; by default its folder.")]
Dtype = Annotated[str, typer.Option("--dtype", help="torch's name of a dtype, or auto.")]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length", help="Positions of prompt and answer together; by default 1024, or the most of the model."
    ),
]
BatchSizes = Annotated[
    str, typer.Option("--batch-sizes", help="Answers decoded at once, such as 1,2,4; by default one.")
]
Standbys = Annotated[int, typer.Option("--standbys", help="Further engines that stand by, without memory for answers.")]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        "--tp",
        help="Ranks that share the model, a process and a GPU each; --device may name them: cuda:0,cuda:1.",
    ),
]
Resume = Annotated[
    str,
    typer.Option(
        "--resume",
        metavar="retry|prefill|fail",
        help="What becomes of an answer whose engine dies: retry makes its tokens again and goes on, prefill reads "
        "them with the prompt (quicker, and may go on otherwise where two tokens are as likely), fail ends it.",
    ),
]
KeepCache = Annotated[
    bool,
    typer.Option(
        "--keep-cache/--no-keep-cache",
        help="With --batch-sizes: an engine's cache outlives it, and the next one goes on with the answers in it.",
    ),
]
Queue = Annotated[int, typer.Option("--queue", help="Requests at once, waiting ones included.")]
EngineWait = Annotated[
    float, typer.Option("--engine-wait-s", help="Seconds a request waits for an engine to become active.")
]
Stall = Annotated[
    float, typer.Option("--stall-s", help="Seconds without a token after which a busy engine counts as hung.")
]
Drain = Annotated[
    float, typer.Option("--drain-s", help="Seconds that answers have at the end, and before another engine takes over.")
]
Launcher = Annotated[str, typer.Option("--launcher", help="Name of the launcher that starts engines, auto, or off.")]

Batch = Annotated[
    bool,
    typer.Option(
        "--batch",
        help="Keep one more engine, for requests with service_tier flex; it is ended where others lack memory.",
    ),
]
BatchMaxLength = Annotated[
    int | None, typer.Option("--batch-max-length", help="As --max-length, of the batch engine; by default the same.")
]
BatchBatchSizes = Annotated[
    str, typer.Option("--batch-batch-sizes", help="As --batch-sizes, of the batch engine; by default the same.")
]
BatchQueue = Annotated[int, typer.Option("--batch-queue", help="Requests at once of the tier flex.")]
BatchWait = Annotated[float, typer.Option("--batch-wait-s", help="Seconds such a request waits for the batch engine.")]
