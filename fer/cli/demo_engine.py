"""The engine process of ``fer demo``: starts, answers one question, says so in one line of JSON, waits to be killed.

Run as ``python -m fer.cli.demo_engine``. It ends by itself when its standard input closes, so that it cannot outlive
the demo.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fer.cli.settings import settings
from fer.errors import FerError
from fer.hush import hush

if TYPE_CHECKING:
    from fer.engines.transformers import TransformersEngine


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fer.cli.demo_engine")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--question", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--label", default="")
    return parser.parse_args()


def _prompt(engine: TransformersEngine, question: str) -> list[int]:
    """Token ids of the question, through the model's chat template where it has one."""
    tokenizer = engine.tokenizer
    if not tokenizer.chat_template:
        return list(tokenizer(question)["input_ids"])
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    import fer
    from fer.engines.devices import resolve
    from fer.engines.transformers import TransformersEngine

    engine = TransformersEngine(arguments.model, device=resolve(arguments.device))
    engine.import_code()
    # Millions of objects of modules, which live as long as the process: the collector need not visit them again.
    gc.freeze()
    # The demo shows this mode, whatever the variables of this shell say about it.
    report = fer.recover(engine, mode="daemon", on_miss="load", weights=True)
    report.label = arguments.label
    tokens = engine.generate(_prompt(engine, arguments.question), arguments.max_new_tokens)
    answer = engine.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return {"device": engine.device, "answer": answer, "tokens": tokens, "report": report.to_json()}


def main() -> None:
    hush()
    try:
        settings()  # warnings only, unless asked for more: the demo shows the path taken itself
        message = _run(_arguments())
    except FerError as error:
        message = {"error": error.to_dict()}
    print(json.dumps(message, default=str), flush=True)
    if "error" not in message:
        sys.stdin.read()


if __name__ == "__main__":
    main()
