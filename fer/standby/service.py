"""``fer serve`` as a whole: the sockets, the front, the supervisor, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from fer import paths
from fer.engines.devices import named
from fer.errors import OptionError
from fer.memory import fdpass
from fer.standby.admin import ADMIN
from fer.standby.connections import BACKLOG, IDLE_S, OPERATORS, Bound, Server, lowered, raised_limit, serving
from fer.standby.eviction import Editions
from fer.standby.front import BODY_LIMIT, Front, application
from fer.standby.metrics import CONTENT_TYPE, Metrics
from fer.standby.operators import Operators
from fer.standby.process import Command, Spawn, through
from fer.standby.rank_commands import of_ranks
from fer.standby.router import RESUMES, Resume, Router, RouterLimits, Target
from fer.standby.supervisor import Commands, State, Supervisor, SupervisorLimits
from fer.standby.version import Version, positions
from fer.weights.keeper import notify
from fer.weights.keeper.process import apart, born, settings_file
from fer.weights.keeper.sockets import choose_dir

log = logging.getLogger("fer.standby")

LENGTH = 1024
"""Positions of an answer and its prompt where nothing else is asked for."""
BATCH_ROUTER = RouterLimits(requests=256, wait_s=600.0, flag="--batch-queue")
"""Requests that can wait do so longer, and more of them."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is served, where, and how patiently.

    Attributes:
        model: the model's folder; ``name`` is what clients call it, by default the folder's name.
        port: 0 takes a free one.
        max_length: positions of prompt and answer together; None: :data:`LENGTH`, or as many as the model was made for.
        batch_sizes: rows the engine decodes at a time; empty: one answer at a time.
        standbys: further engines that have recovered and wait.
        tp: tensor-parallel ranks of an engine, a process each; ``device`` may then name one for each.
        resume: see :class:`fer.standby.router.Router`.
        keep_cache: engines of ``batch_sizes`` leave their cache to the next one, which goes on with the answers in it.
        launcher: the name of the launcher that starts engines, ``auto`` or ``off``.
        batch: keep a preemptible engine for requests of the tier ``flex``, with ``batch_max_length`` (None: as online)
            and ``batch_rows``, the batch sizes of its own; ``batch_router`` is for its requests.
        idle_s: seconds after which a connection without a request is closed.
        runtime_dir: where the private directory of sockets is made.
    """

    model: Path
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    dtype: str = "auto"
    max_length: int | None = None
    batch_sizes: tuple[int, ...] = ()
    standbys: int = 0
    tp: int = 1
    resume: Resume = "retry"
    keep_cache: bool = True
    launcher: str = "auto"
    batch: bool = False
    batch_max_length: int | None = None
    batch_rows: tuple[int, ...] = ()
    batch_router: RouterLimits = BATCH_ROUTER
    body_limit: int = BODY_LIMIT
    idle_s: float = IDLE_S
    runtime_dir: Path | None = None
    router: RouterLimits = field(default_factory=RouterLimits)
    supervisor: SupervisorLimits = field(default_factory=SupervisorLimits)

    def check(self) -> None:
        """Refuse what cannot be before anything is started.

        Raises:
            OptionError, CheckpointError: a value is wrong, or the folder is none of a model.
        """
        if self.resume not in RESUMES:
            raise OptionError(f"resume={self.resume!r} is not known", fix=f"Use {', '.join(RESUMES)}")
        if not 0 <= self.port < 1 << 16:
            raise OptionError(f"port {self.port} cannot be", fix="Give a number from 0 to 65535")
        if self.standbys < 0 or self.router.requests < 1:
            raise OptionError("fewer than no standbys or no requests at all cannot be", fix="Raise the number")
        for sizes in (self.batch_sizes, self.batch_rows):
            if any(size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
                raise OptionError(f"batch sizes {sizes} cannot be", fix="Give different numbers from 1 on")
        if self.batch_router.requests < 1:
            raise OptionError("no requests at all cannot be", fix="Raise --batch-queue")
        if not self.batch and (self.batch_max_length is not None or self.batch_rows):
            raise OptionError("settings of a batch engine without one cannot be", fix="Add --batch")
        if self.tp < 1:
            raise OptionError(f"an engine of {self.tp} ranks cannot be", fix="Give --tp a number from 1 on")
        named(self.device, self.tp)
        most, asked = positions(self.model), max(self.max_length or 0, self.batch_max_length or 0)
        if most is not None and asked > most:
            raise OptionError(
                f"{asked} positions are more than {self.model.name} was made for",
                why=f"its max_position_embeddings is {most}",
                fix="Lower --max-length, or --batch-max-length",
            )

    def settled(self) -> Settings:
        """With a length, which stays what it is when another model is served. Raises CheckpointError."""
        if self.max_length is not None:
            return self
        return dataclasses.replace(self, max_length=min(LENGTH, positions(self.model) or LENGTH))

    def processes(self) -> int:
        """Processes of engines that may be there at once: each engine's, a spare's, and those of one that goes."""
        return self.tp * (1 + self.standbys + self.batch + 2)


def worker(settings: Settings) -> Commands:
    """How an engine of these settings is started."""
    # Nothing is added to PYTHONPATH: a launcher, whose interpreter read it, has to have the same. An engine is started
    # in our folder and so finds the package where we did.
    variables = apart({**os.environ, **settings_file()})
    if settings.runtime_dir is not None:
        variables["FER_RUNTIME_DIR"] = str(settings.runtime_dir.absolute())

    def commands(path: Path) -> Sequence[Command]:
        arguments = [sys.executable, "-m", "fer.standby.worker", "--socket", str(path)]
        arguments += ["--model", str(settings.model.absolute()), "--device", settings.device]
        arguments += ["--dtype", settings.dtype, "--max-length", str(settings.settled().max_length)]
        if settings.batch_sizes:
            arguments += ["--batch-sizes", ",".join(map(str, settings.batch_sizes))]
        return of_ranks(Command(arguments=tuple(arguments), environment=variables), path, settings.tp)

    return commands


def preemptible(settings: Settings) -> Settings:
    """The settings as the batch engine's."""
    length = settings.batch_max_length or settings.max_length
    return dataclasses.replace(settings, max_length=length, batch_sizes=settings.batch_rows or settings.batch_sizes)


Engine = Callable[[Settings], Commands]
"""What an engine of some settings is."""


def serve(settings: Settings, *, engine: Engine = worker, spawn: Spawn | None = None) -> None:
    """Serve until SIGTERM or SIGINT, and end everything that was started.

    The address is written to stdout, one line, as soon as requests are taken there; the first engine still starts then.

    Args:
        engine: what an engine is.
        spawn: how it is started; by default through a launcher where one fits.

    Raises:
        OptionError: a setting is wrong, or the port is taken.
        CheckpointError: the folder is none of a model.
        EngineDied: an engine's process could not be ended.
        FerError: what the first engine said is wrong with the model.
    """
    settings.check()
    settings = settings.settled()
    base, _ = choose_dir(settings.runtime_dir)
    _fill_stdio()
    with (
        raised_limit() as soft,
        _listen(settings.host, settings.port) as public,
        _folder(base) as folder,
        _admin(folder) as admin,
    ):
        started = lowered(spawn or through(settings.launcher, settings.runtime_dir), soft)
        service = Service(settings, folder, engine, started)
        asyncio.run(service.run(public, admin))


class Service:
    """The parts of one ``fer serve``, in one event loop."""

    def __init__(self, settings: Settings, folder: Path, engine: Engine, spawn: Spawn) -> None:
        self._settings, self._folder, self._engine, self._spawn = settings, folder, engine, spawn
        self._versions = 0
        self._name = settings.name or settings.model.resolve().name
        self._said: State | None = None
        self._notifier: notify.Notifier | None = None

    async def run(self, public: socket.socket, admin: socket.socket) -> None:
        """Serve at these sockets until a signal asks for the end."""
        settings = self._settings
        metrics = Metrics()
        self._router = Router(settings.router, settings.resume, self._stalled)
        self._batch: Router | None = None
        if settings.batch:  # what can wait is always made again to the same bits: nobody is in a hurry
            self._batch = Router(settings.batch_router, "retry", self._batch_stalled)
        self._supervisor = Supervisor(
            self._version(settings.model),
            self._folder,
            self._spawn,
            self._router,
            batch=self._batch,
            members=1 + settings.standbys,
            service=f"{self._name} at {_address(public)}",
            limits=settings.supervisor,
            tell=self._tell,
            outages=metrics.outage,
            back=metrics.batch_back,
            editions=Editions(settings.runtime_dir),
            keep_cache=settings.keep_cache,
        )
        metrics.watch(self._supervisor, self._router)
        self._metrics = metrics
        self._operators = Operators(self._supervisor, self._version)
        front = Front(self._router, self._name, metrics, flex=self._batch, body_limit=settings.body_limit)
        self._ending = asyncio.Event()
        if not _is_loopback(public):
            log.warning("%s can be reached from outside, and asks nobody who they are", _address(public))
        with self._notified(), self._signals():
            clients, operators = application([*front.routes(), *self._routes()]), application(self._admin_routes())
            idle_s, self._connections = settings.idle_s, Bound.of_limit(settings.processes())
            servers = (Server(clients, self._connections, idle_s), Server(operators, Bound(OPERATORS), idle_s))
            async with serving((servers[0], public), (servers[1], admin)):
                _print(_address(public))
                log.info("serving %s at %s, admin socket %s", self._name, _address(public), self._folder / ADMIN)
                await self._supervise()

    def _version(self, model: Path) -> Version:
        """The next version, of this folder. Raises OptionError or CheckpointError where it cannot be one."""
        chosen = dataclasses.replace(self._settings, model=model)
        chosen.check()
        self._versions += 1
        return Version(
            model=model.absolute(),
            number=self._versions,
            online=self._engine(chosen),
            batch=self._engine(preemptible(chosen)) if chosen.batch else None,
        )

    async def _supervise(self) -> None:
        running = asyncio.create_task(self._supervisor.run())
        asked = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                self._ending.clear()
                await self._drain()
        finally:
            asked.cancel()
            for router in self._routers():
                router.end("the service ends")
            self._supervisor.stop()
            await running

    async def _drain(self) -> None:
        """Answers that are under way get their time; a second signal ends it."""
        self._supervisor.drain()
        # Answers of the batch engine are not waited for by name: those that end in the same time do.
        log.info("ending: %d requests are under way", self._router.in_flight)
        limit_s = self._settings.supervisor.drain_s
        drained = asyncio.ensure_future(asyncio.gather(*(router.idle(limit_s) for router in self._routers())))
        again = asyncio.create_task(self._ending.wait())
        await asyncio.wait((drained, again), return_when=asyncio.FIRST_COMPLETED)
        for task in (drained, again):
            task.cancel()
        await asyncio.gather(drained, again, return_exceptions=True)

    def _routers(self) -> list[Router]:
        return [router for router in (self._router, self._batch) if router is not None]

    def _stalled(self, target: Target) -> None:
        self._supervisor.stalled(target)

    def _batch_stalled(self, target: Target) -> None:
        assert self._supervisor.batch is not None
        self._supervisor.batch.stalled(target)

    # -- what it says of itself

    def _routes(self) -> list[BaseRoute]:
        return [
            Route("/health/live", self._live),
            Route("/health/ready", self._ready),
            Route("/health/active", self._active),
            Route("/status", self._status),
            Route("/metrics", self._figures),
        ]

    def _admin_routes(self) -> list[BaseRoute]:
        return [
            *self._routes()[:3],
            Route("/status", self._private_status),
            Route("/metrics", self._figures),
            *self._operators.routes(),
        ]

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, request: Request) -> Response:
        return self._health("ready", self._supervisor.ready)

    async def _active(self, request: Request) -> Response:
        return self._health("active", self._supervisor.state == "active")

    def _health(self, what: str, holds: bool) -> Response:
        content = {what: holds, "state": self._supervisor.state}
        return JSONResponse(content, status_code=200 if holds else 503)

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self._describe(private=False))

    async def _private_status(self, request: Request) -> Response:
        return JSONResponse(self._describe(private=True))

    def _describe(self, *, private: bool) -> dict[str, Any]:
        own = {"model": self._name, "supervisor": os.getpid(), "resume": self._settings.resume}
        router = {"in_flight": self._router.in_flight, "most": self._router.limits.requests}
        counted = {name: getattr(self._router, name) for name in ("resumed", "retried", "differed")}
        more = {"requests": {**router, **counted}, "connections": self._connections.status()}
        return {**own, **self._supervisor.status(private=private), **more}

    async def _figures(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    # -- the service manager and signals

    def _tell(self, state: State) -> None:
        """Log a new state, and tell the service manager."""
        if state == self._said:
            return
        before, self._said = self._said, state
        if before is not None:
            log.info("state: %s", state)
        error = self._supervisor.last_error.partition("\n")[0] if state in ("backoff", "recovering", "wedged") else ""
        lines = [f"STATUS={state}{f': {error}' if error else ''}"]
        lines += ["READY=1"] if state == "active" else []
        lines += ["STOPPING=1"] if state == "draining" else []
        if self._notifier is not None:
            with contextlib.suppress(OSError):  # a manager that takes no messages is no reason to stop serving
                self._notifier.send("\n".join(lines))

    @contextlib.contextmanager
    def _notified(self) -> Iterator[None]:
        sock = notify.from_environment()
        if sock is None:
            yield
            return
        self._notifier = notify.Notifier(sock)
        sock.setblocking(False)  # the event loop waits for nobody
        try:
            yield
        finally:
            self._notifier.close()
            self._notifier = None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self._ending.set)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def _listen(host: str, port: int) -> socket.socket:
    """The public socket. Raises OptionError where it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        why = error.strerror or str(error)
        fix = "Give another --port (0 takes a free one) or --host"
        raise OptionError(f"{host}:{port} cannot be listened at", why=why, fix=fix) from error
    return sock


@contextlib.contextmanager
def _folder(base: Path) -> Iterator[Path]:
    """A private directory for this service's sockets, gone afterwards; those of services that were killed go first."""
    for old in base.glob("serve-*"):
        pid, _, start = old.name.removeprefix("serve-").partition("-")
        if pid.isdigit() and start.isdigit() and born(int(pid)) != int(start):
            shutil.rmtree(old, ignore_errors=True)
    folder = base / f"serve-{os.getpid()}-{born(os.getpid())}"
    paths.ensure_private(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _admin(folder: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        fdpass.bind(sock, folder / ADMIN)
        (folder / ADMIN).chmod(0o600)
        sock.listen(16)
        yield sock


def _fill_stdio() -> None:
    """Have something at 0, 1 and 2: else a socket gets such a number, and what is meant for a log is sent there."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)


def _print(line: str) -> None:
    """To stdout. Who cannot read it there may know it all the same: it is no reason to stop serving."""
    if sys.stdout is None:  # closed by whoever started us
        return
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("the address cannot be written to stdout: %s", error.strerror or error)


def _is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def _address(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
