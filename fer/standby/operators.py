"""What an operator may have a running service do, at its admin socket: ``/admin/...``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from fer.errors import FerError, RequestError
from fer.standby.front import body_of, refusal
from fer.standby.preemptible import Preemptible
from fer.standby.supervisor import Supervisor
from fer.standby.version import Version

BODY_LIMIT = 64 << 10
"""Bytes of an order."""


class UpdateOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Serve another model. See :meth:`fer.standby.update.Update.to`."""

    model: str
    keep_old: bool = False
    cut: bool = False


class Operators:
    """The routes.

    Args:
        version_of: the next version of a model folder; raises OptionError or CheckpointError where it cannot be one.
    """

    def __init__(self, supervisor: Supervisor, version_of: Callable[[Path], Version]) -> None:
        self._supervisor, self._version_of = supervisor, version_of

    def routes(self) -> list[BaseRoute]:
        """For an application."""
        return [
            Route("/admin/switch", self._switch, methods=["POST"]),
            Route("/admin/update", self._update, methods=["POST"]),
            Route("/admin/batch/pause", self._pause, methods=["POST"]),
            Route("/admin/batch/resume", self._resume, methods=["POST"]),
        ]

    async def _switch(self, request: Request) -> Response:
        try:
            return JSONResponse({"active": await self._supervisor.switch()})
        except FerError as error:
            return refusal(error)

    async def _update(self, request: Request) -> Response:
        try:
            order = _order(await body_of(request, BODY_LIMIT))
            self._supervisor.update.refuse_second()
            version = self._version_of(Path(order.model))
            done = await self._supervisor.update.to(version, keep_old=order.keep_old, cut=order.cut)
            return JSONResponse(done)
        except ClientDisconnect:
            return Response(status_code=499)
        except FerError as error:
            return refusal(error)

    async def _pause(self, request: Request) -> Response:
        try:
            batch = self._batch()
            await batch.pause("an operator paused it")
        except FerError as error:
            return refusal(error)
        return JSONResponse({"role": batch.member.state, "waiting": batch.router.in_flight})

    async def _resume(self, request: Request) -> Response:
        try:
            batch = self._batch()
            batch.resume()
        except FerError as error:
            return refusal(error)
        return JSONResponse({"role": batch.member.state, "waiting": batch.router.in_flight})

    def _batch(self) -> Preemptible:
        if self._supervisor.batch is None:
            raise RequestError("this service has no batch engine", fix="Start it with --batch", status=409)
        return self._supervisor.batch


def _order(body: bytes) -> UpdateOrder:
    try:
        return msgspec.json.decode(body, type=UpdateOrder)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError("the order is not understood", why=str(error), status=400) from error
