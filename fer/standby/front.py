"""The HTTP address clients see: OpenAI's completions and chat over whatever answers behind it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from fer.errors import FerError, RequestError
from fer.standby import openai, wire
from fer.standby.router import Anew, Event

BODY_LIMIT = 4 << 20
"""Bytes of a request's body."""
BODY_S = 30.0
"""Seconds a client has to send it."""


class Answering(Protocol):
    """Who makes answers; :class:`fer.standby.router.Router` is one."""

    def answer(self, request: wire.Generate, *, shown: bool = True) -> AsyncGenerator[Event, None]:
        """Began, Pieces and Ended, or RequestError. Closing it ends the generation.

        Args:
            shown: the client sees each piece. Else :class:`~fer.standby.router.Anew` may take back those before it.
        """


class Watch(Protocol):
    """Who counts; :class:`fer.standby.metrics.Metrics` is one."""

    def request(self, endpoint: str, code: int) -> None:
        """A request has been answered."""

    def tokens(self, prompt: int, made: int) -> None:
        """An answer has ended, complete or not."""


class Front:
    """The routes of ``/v1``.

    Args:
        model: the one name that requests may ask for.
        flex: answers requests of the tier ``flex``; None: as all others, and the answer's ``service_tier`` says so.
    """

    def __init__(
        self,
        answering: Answering,
        model: str,
        watch: Watch,
        *,
        flex: Answering | None = None,
        body_limit: int = BODY_LIMIT,
    ) -> None:
        self._answering, self._model, self._watch, self._limit = answering, model, watch, body_limit
        self._flex = flex
        self._created = int(time.time())

    def routes(self) -> list[BaseRoute]:
        """For an application."""
        return [
            Route("/v1/completions", self._route("completions", openai.completion), methods=["POST"]),
            Route("/v1/chat/completions", self._route("chat", openai.chat), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
        ]

    async def _models(self, request: Request) -> Response:
        return JSONResponse(openai.models(self._model, self._created))

    async def _one_model(self, request: Request) -> Response:
        try:
            self._check(request.path_params["name"])
        except RequestError as error:
            return failure(error)
        return JSONResponse(openai.model(self._model, self._created))

    def _check(self, name: str) -> None:
        if name != self._model:
            raise RequestError(
                f"the model {name!r} does not exist here",
                fix=f"This address serves {self._model}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _placed(self, asked: openai.Asked) -> openai.Asked:
        """The request with the tier it is served in, which the answer names where the client asked for one."""
        served = "flex" if asked.tier == "flex" and self._flex is not None else "default"
        return asked if asked.tier is None else dataclasses.replace(asked, served=served)

    def _route(
        self, endpoint: str, understand: Callable[[bytes], openai.Asked]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                asked = self._placed(understand(await body_of(request, self._limit)))
                self._check(asked.model)
                response = await (self._streamed if asked.stream else self._whole)(request, asked)
            except RequestError as error:
                response = failure(error)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it; the metrics do
            self._watch.request(endpoint, response.status_code)
            return response

        return handle

    async def _whole(self, request: Request, asked: openai.Asked) -> Response:
        usage, text, reason = openai.Usage(), "", ""

        async def collect() -> None:
            nonlocal text, reason
            async with contextlib.aclosing(self._events(asked, usage)) as events:
                async for event in events:
                    if isinstance(event, wire.Piece):
                        text += event.text
                    elif isinstance(event, Anew):
                        text = ""
                    elif isinstance(event, wire.Ended):
                        reason = event.reason

        await _unless_gone(request, collect())
        return JSONResponse(openai.whole(asked, text, reason, usage))

    async def _streamed(self, request: Request, asked: openai.Asked) -> Response:
        usage = openai.Usage()
        events = self._events(asked, usage)
        try:
            # A refusal is known by now: it becomes a status, not a line in the middle of a stream.
            await _unless_gone(request, anext(events))
        except BaseException:
            await events.aclose()
            raise
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return _Stream(self._lines(asked, events, usage), media_type="text/event-stream", headers=headers)

    async def _lines(
        self, asked: openai.Asked, events: AsyncGenerator[Event, None], usage: openai.Usage
    ) -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(events):
            try:
                if asked.kind == "chat":
                    yield _line(openai.piece(asked, "", first=True))
                async for event in events:
                    if isinstance(event, wire.Piece) and event.text:
                        yield _line(openai.piece(asked, event.text))
                    elif isinstance(event, wire.Ended):
                        yield _line(openai.piece(asked, None, event.reason))
                if asked.usage:
                    yield _line(openai.figures(asked, usage))
            except RequestError as error:
                yield _line(openai.failure(error))
                return
            yield b"data: [DONE]\n\n"

    async def _events(self, asked: openai.Asked, usage: openai.Usage) -> AsyncGenerator[Event, None]:
        try:
            answering = self._flex if asked.served == "flex" and self._flex is not None else self._answering
            async with contextlib.aclosing(answering.answer(asked.generate, shown=asked.stream)) as events:
                async for event in events:
                    if isinstance(event, wire.Began):
                        usage.prompt = event.prompt_tokens
                    elif isinstance(event, wire.Piece):
                        usage.made += len(event.ids)
                    elif isinstance(event, Anew):
                        usage.made = 0
                    yield event
        finally:
            self._watch.tokens(usage.prompt, usage.made)


class _Stream(StreamingResponse):
    """Ends what makes its lines in any case; Starlette leaves that to the garbage collector."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            close: Any = self.body_iterator
            await close.aclose()


def application(routes: list[BaseRoute]) -> Starlette:
    """An application whose own errors have OpenAI's form too."""

    async def http(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        what = str(error.detail) if isinstance(error, HTTPException) else "internal error"
        return failure(RequestError(f"{request.method} {request.url.path}: {what}", status=status))

    return Starlette(routes=routes, exception_handlers={HTTPException: http, 500: http})


def refusal(error: FerError) -> Response:
    """An error for an operator: in the same form, and beside it as :func:`fer.errors.from_dict` reads it."""
    status = int(error.fields.get("status", 409)) if isinstance(error, RequestError) else 409
    told = RequestError(str(error), status=status, code=error.fields.get("code") or type(error).__name__)
    described = json.loads(json.dumps(error.to_dict(), default=str))
    return JSONResponse({**openai.failure(told), "fer": described}, status_code=status)


def failure(error: RequestError) -> Response:
    """An error as a response."""
    headers = {}
    if error.fields.get("retry_after") is not None:
        headers["Retry-After"] = str(error.fields["retry_after"])
    return JSONResponse(openai.failure(error), status_code=int(error.fields["status"]), headers=headers)


async def body_of(request: Request, limit: int) -> bytes:
    """A request's body.

    Raises:
        RequestError: it is too large, or does not come in :data:`BODY_S`.
        ClientDisconnect: the client has gone.
    """
    large = RequestError("the body is too large", why=f"{limit} bytes are the most", status=413, code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise large
    except TimeoutError:
        raise RequestError(f"the body did not come within {BODY_S:g} s", status=408, code="timeout") from None
    return bytes(body)


async def _unless_gone(request: Request, work: Awaitable[Any]) -> None:
    """Wait for the work; a client that goes away cancels it. Raises ClientDisconnect, or what the work raises."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        for waiting in (task, gone):
            waiting.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _line(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
