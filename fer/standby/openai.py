"""Requests and answers in the form of OpenAI's API: https://platform.openai.com/docs/api-reference.

Decoding is greedy, and one answer is made a request. Whatever would ask for something else is refused by name rather
than ignored: a client that sets ``temperature`` means it.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from fer.errors import RequestError
from fer.standby import wire

COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions; a chat has what is left of the context."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "temperature": (0,),
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}
"""Parameters of the API, with the values under which they ask for nothing; null always does."""
_WITHOUT_EFFECT = ("user", "seed", "store", "metadata", "safety_identifier", "prompt_cache_key")
"""Parameters that change nothing of a greedy answer."""

Tier = Literal["auto", "default", "flex", "priority", "scale"]
"""What a client may ask for; ``flex`` may be preempted, and here the rest are one."""

Positive = Annotated[int, Meta(ge=1, le=1 << 31)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


class _Part(Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]
    name: str | None = None


class _Common(Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    max_tokens: Positive | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    service_tier: Tier | None = None


class _Completion(_Common, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[int | str]


class _Chat(_Common, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None


_T = TypeVar("_T", bound=_Common)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was understood.

    Attributes:
        generate: what to ask the engine.
        model: as the client names it.
        stream, usage: pieces as they come; figures after the last of them.
        tier: as asked, None where the client did not ask; ``served`` the one that it got, ``""`` where it is not told.
    """

    kind: Literal["completion", "chat"]
    model: str
    generate: wire.Generate
    stream: bool
    usage: bool
    tier: Tier | None = None
    served: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


def completion(body: bytes) -> Asked:
    """The request of ``/v1/completions``. Raises RequestError."""
    asked = _convert(body, _Completion)
    limit = asked.max_tokens or COMPLETION_TOKENS
    generate = wire.Generate(prompt=_prompt(asked.prompt), max_tokens=limit, stop=_stops(asked))
    return _asked("completion", asked, generate)


def _prompt(given: str | list[int | str]) -> str | list[int]:
    if isinstance(given, str):
        return given
    texts = [part for part in given if isinstance(part, str)]
    if texts:
        if len(given) > 1:
            raise _bad("several prompts in one request are not supported", "prompt", "unsupported_value")
        return texts[0]
    ids = [part for part in given if isinstance(part, int)]
    if any(token < 0 for token in ids):
        raise _bad("token ids are not negative", "prompt")
    return ids


def chat(body: bytes) -> Asked:
    """The request of ``/v1/chat/completions``. Raises RequestError."""
    asked = _convert(body, _Chat)
    messages = [
        wire.Message(
            message.role,
            message.content if isinstance(message.content, str) else "".join(part.text for part in message.content),
        )
        for message in asked.messages
    ]
    limit = asked.max_completion_tokens or asked.max_tokens
    return _asked("chat", asked, wire.Generate(messages=messages, max_tokens=limit, stop=_stops(asked)))


def _asked(kind: Literal["completion", "chat"], asked: _Common, generate: wire.Generate) -> Asked:
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    stream, tier = bool(asked.stream), asked.service_tier
    return Asked(kind=kind, model=asked.model, generate=generate, stream=stream, usage=usage, tier=tier)


def _stops(asked: _Common) -> list[str]:
    return [asked.stop] if isinstance(asked.stop, str) else asked.stop or []


def _convert(body: bytes, kind: type[_T]) -> _T:
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(f"the body is not valid JSON: {error}", None) from error
    if not isinstance(given, dict):
        raise _bad("the body must be a JSON object", None)
    known = {field.name for field in msgspec.structs.fields(kind)}
    for name, value in given.items():
        if name in known or name in _WITHOUT_EFFECT or value is None:
            continue
        if name not in _NEUTRAL:
            raise _bad(f"the parameter {name!r} is unknown", name, "unknown_parameter")
        if not any(_same(value, neutral) for neutral in _NEUTRAL[name]):
            only = " or ".join(repr(neutral) for neutral in _NEUTRAL[name]) or "null"
            raise _bad(
                f"{name} is supported as {only} only: decoding is greedy, one answer a request",
                name,
                "unsupported_value",
            )
    try:
        return msgspec.convert({name: value for name, value in given.items() if name in known}, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        text = str(error)
        param = next((name for name in sorted(known, key=len, reverse=True) if name in text), None)
        raise _bad(text, param) from error


def _same(value: Any, other: Any) -> bool:
    """Equality of JSON: true is not 1."""
    return bool(value == other) and (type(value) is bool) == (type(other) is bool)


def _bad(what: str, param: str | None, code: str = "invalid_value") -> RequestError:
    return RequestError(what, status=400, param=param, code=code)


# -- answers


@dataclass(kw_only=True)
class Usage:
    """Tokens of one answer, as they come."""

    prompt: int = 0
    made: int = 0

    def to_json(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.made,
            "total_tokens": self.prompt + self.made,
        }


def whole(asked: Asked, text: str, reason: str, usage: Usage) -> dict[str, Any]:
    """The answer in one piece."""
    if asked.kind == "chat":
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
    else:
        choice = {"text": text}
    choices = [{"index": 0, **choice, "logprobs": None, "finish_reason": reason}]
    return {**_head(asked, ""), "choices": choices, "usage": usage.to_json()}


def piece(asked: Asked, text: str | None, reason: str | None = None, *, first: bool = False) -> dict[str, Any]:
    """A piece of an answer; ``text`` None: nothing but the reason it ended."""
    if asked.kind == "chat":
        role = {"role": "assistant"} if first else {}
        choice: dict[str, Any] = {"delta": role if text is None else {**role, "content": text}}
    else:
        choice = {"text": text or ""}
    choices = [{"index": 0, **choice, "logprobs": None, "finish_reason": reason}]
    return {**_head(asked, ".chunk"), "choices": choices, **({"usage": None} if asked.usage else {})}


def figures(asked: Asked, usage: Usage) -> dict[str, Any]:
    """The last piece where a client asked for figures."""
    return {**_head(asked, ".chunk"), "choices": [], "usage": usage.to_json()}


def models(name: str, created: int) -> dict[str, Any]:
    """The list of models, which is the one."""
    return {"object": "list", "data": [model(name, created)]}


def model(name: str, created: int) -> dict[str, Any]:
    """One model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "fer"}


def failure(error: RequestError) -> dict[str, Any]:
    """An error's body."""
    status = int(error.fields["status"])
    kinds = {404: "invalid_request_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    fields = {"param": error.fields.get("param"), "code": error.fields.get("code")}
    return {"error": {"message": str(error), "type": kind, **fields}}


def _head(asked: Asked, chunk: str) -> dict[str, Any]:
    prefix, kind = ("chatcmpl", "chat.completion" + chunk) if asked.kind == "chat" else ("cmpl", "text_completion")
    tier = {"service_tier": asked.served} if asked.served else {}
    return {"id": f"{prefix}-{asked.id}", "object": kind, "created": asked.created, "model": asked.model, **tier}
