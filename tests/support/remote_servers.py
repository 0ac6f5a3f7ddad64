"""Servers on this machine that fsspec's file systems speak to: S3 (moto), HTTP with faults, one that never answers."""

from __future__ import annotations

import contextlib
import functools
import http.server
import logging
import re
import selectors
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

SECRET = "wJalrXUtnFEMI-not-a-real-secret"


@contextlib.contextmanager
def s3() -> Iterator[dict[str, str]]:
    """An S3 server; the variables by which clients find it, credentials included."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "AKIAFERTESTFERTEST00",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        server.stop()


class Handler(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, with ranges; ``/cut/`` ends after half of what it promises, ``/user/`` asks for a password."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing on the terminal."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind, _, name = self.path.split("?")[0].lstrip("/").partition("/")
        if kind == "user" and "Authorization" not in self.headers:
            self.send_error(401)
            return
        try:
            data = Path(self.directory, name).read_bytes()
        except OSError:
            self.send_error(404)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(wanted[1]), min(int(wanted[2]), len(data) - 1)) if wanted else (0, len(data) - 1)
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last + 1 - first))
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[first : first + (last + 1 - first) // (2 if kind == "cut" else 1)])
            self.close_connection = kind == "cut"


@contextlib.contextmanager
def web(folder: Path) -> Iterator[str]:
    """An HTTP server over a folder; its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """A port that takes connections and never answers; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


class Relay:
    """Passes connections on, and cuts each off once the client has sent so many bytes.

    Attributes:
        cuts: connections that were cut.
    """

    def __init__(self, upstream: str, after: int) -> None:
        host, _, port = upstream.partition(":")
        self._upstream, self._after, self.cuts = (host, int(port)), after, 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listening, selectors.EVENT_READ)
            sent: dict[socket.socket, int] = {}
            partner: dict[socket.socket, socket.socket] = {}
            while self._listening.fileno() >= 0:
                for key, _ in ready.select(0.02):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    if source is self._listening:
                        client, server = source.accept()[0], socket.create_connection(self._upstream)
                        sent[client], partner[client], partner[server] = 0, server, client
                        ready.register(client, selectors.EVENT_READ)
                        ready.register(server, selectors.EVENT_READ)
                        continue
                    if source not in partner:
                        continue
                    data = self._received(source)
                    if source in sent:
                        sent[source] += len(data)
                        self.cuts += sent[source] > self._after
                    if not data or sent.get(source, 0) > self._after:
                        for each in (source, partner.pop(source)):
                            ready.unregister(each)
                            partner.pop(each, None)
                            each.close()
                    else:
                        partner[source].sendall(data)
            for each in partner:
                each.close()

    @staticmethod
    def _received(source: socket.socket) -> bytes:
        try:
            return source.recv(1 << 16)
        except OSError:
            return b""

    def close(self) -> None:
        self._listening.close()
        self._thread.join(20)


@contextlib.contextmanager
def cut_off(upstream: str, *, after: int) -> Iterator[Relay]:
    """A relay before a server; see :class:`Relay`."""
    relay = Relay(upstream, after)
    try:
        yield relay
    finally:
        relay.close()
