"""An engine's side of the keeper: one connection, which is also its leases, claims and roles.

Whatever the process holds ends with the connection, so nothing has to be given back by a process that dies. A keeper
that is killed and comes back (under systemd or its minder) keeps the very same socket: a call in flight takes longer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from fer import paths
from fer.errors import KeeperUnavailable, PeerRefused, ProtocolError, from_dict
from fer.memory import fdpass
from fer.memory.fd import Fd, widen_table
from fer.memory.seal import read_sealed, sealed_bytes
from fer.weights import wire
from fer.weights.services import ServiceCalls
from fer.weights.wire import (
    Begun,
    Candidate,
    Claim,
    Committed,
    EditionInfo,
    Event,
    Found,
    Holder,
    Key,
    Near,
    Room,
    SlabInfo,
    Status,
)

__all__ = [
    "Begun",
    "Candidate",
    "Claim",
    "Committed",
    "EditionInfo",
    "Event",
    "Found",
    "Holder",
    "KeeperClient",
    "Key",
    "Leased",
    "Near",
    "Room",
    "SlabInfo",
    "Status",
]

CALL_S = 30.0
"""Seconds the keeper has for an answer, beyond the wait that the call itself asks for."""

_R = TypeVar("_R", bound=wire.Reply)

widen_table()  # now, and not in the middle of a lease


class Leased:
    """What a lease gives: the edition's payloads and one descriptor a slab, owned by this object until taken.

    Attributes:
        edition: its id.
        manifest, checkpoint: bytes as published.
        digests: bytes, None where none were made yet.
        slabs: what and where, each with its descriptor.
    """

    def __init__(self, edition: str, payloads: dict[str, bytes], slabs: list[tuple[SlabInfo, Fd]]) -> None:
        self.edition = edition
        self.manifest = payloads["manifest"]
        self.checkpoint = payloads["checkpoint"]
        self.digests = payloads.get("digests")
        self.slabs = slabs

    def close(self) -> None:
        """Close the descriptors that were not taken. The lease itself stands until it is released."""
        fdpass.close_all([fd for _, fd in self.slabs])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KeeperClient(ServiceCalls):
    """A connection to the keeper; get one from :meth:`connect`.

    Calls may come from several threads and are made one after another: a call that waits (:meth:`claim`,
    :meth:`commit`) holds up the others. Every call raises KeeperUnavailable when the keeper is gone for good,
    Refused (with ``fields["code"]``) when it says no, ProtocolError when the two do not understand each other.
    """

    def __init__(self, sock: socket.socket, directory: Path, timeout: float) -> None:
        self._sock = sock
        self._seq = 0
        self._seen = 0
        # Reentrant: the garbage collector may free a module in the middle of a call, in the very thread that makes it,
        # and the module's end closes its connection.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._timeout = max(timeout, CALL_S)
        self.runtime_dir = directory
        self.keeper_pid = 0
        self.keeper_version = ""

    # --- connection ---

    @classmethod
    def connect(cls, runtime_dir: Path | None = None, *, label: str = "", timeout: float = 5.0) -> KeeperClient:
        """Connect to the keeper of ``runtime_dir``, or of the first of :func:`fer.paths.runtime_dirs` that has one.

        Args:
            label: what ``fer status`` calls this process.
            timeout: seconds.

        Raises:
            KeeperUnavailable: none listens (field ``looked_in``), or one does and hangs (field ``hangs``, its pid).
            PeerRefused: no place is left whose directory, socket and process behind it are the user's own.
            ProtocolError: the keeper speaks another version.
        """
        places = [runtime_dir] if runtime_dir is not None else paths.runtime_dirs()
        deadline = time.monotonic() + timeout
        why: list[str] = []
        refusals: list[PeerRefused] = []
        for place in places:
            while True:
                try:
                    sock = _open(place, deadline)
                except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
                    why.append(f"{place}: {_plainly(error)}")
                    break
                except BlockingIOError as error:  # its queue stayed full
                    raise _hangs(place, timeout) from error
                except OSError as error:
                    why.append(f"{place}: {error.strerror or error}")
                    break
                except PeerRefused as error:  # XDG_RUNTIME_DIR of another user, kept by su: ours may be the next place
                    refusals.append(error)
                    why.append(str(error))
                    break
                client = cls(sock, place, timeout)
                try:
                    client._greet(label, deadline)
                    return client
                except KeeperUnavailable as error:
                    # A keeper killed between accept and our greeting takes that connection with it; the listener lives.
                    client.close()
                    if time.monotonic() >= deadline:
                        raise _hangs(place, timeout) from error
                    time.sleep(0.01)
                except BaseException:
                    client.close()
                    raise
        if len(refusals) == len(places):
            raise refusals[0]
        raise KeeperUnavailable(
            "no keeper listens",
            why="; ".join(why),
            fix="Start one with `fer keeper run`, or use mode=daemon.",
            looked_in=[str(place) for place in places],
        )

    def _greet(self, label: str, deadline: float) -> None:
        limit = max(deadline - time.monotonic(), 0.05)
        welcome = self._call(wire.Hello(0, label=label[:4096], pid=os.getpid()), wire.Welcome, limit_s=limit)
        self.keeper_pid, self.keeper_version = welcome.pid, welcome.version

    def close(self) -> None:
        """End the connection and with it every lease, claim, role and unfinished transaction."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # a call in another thread ends now, before its descriptor goes
        with self._lock:
            self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- looking and attaching ---

    def find(self, key: Key) -> Found:
        """Visible editions of ``key``, and those that nearly match, for an explanation."""
        found = self._call(wire.Find(0, key=key), Found)
        self._seen = found.stamp
        return found

    def claim(self, key: Key, *, wait_s: float) -> Claim:
        """Ask to be the one who loads ``key``.

        ``claimed``: this connection loads. ``look_again``: an edition of the key became visible after the last
        :meth:`find`. ``timeout``: another process still loads it after ``wait_s`` seconds; ``holder`` says which.

        Raises:
            Refused: ``launches_met`` or ``group_failed``: this launch lost its part and loads without publishing.
        """
        return self._call(wire.TakeClaim(0, key=key, seen=self._seen, wait_s=_bounded(wait_s)), Claim, wait_s=wait_s)

    def unclaim(self) -> None:
        """Give back every claim of this connection."""
        self._call(wire.Unclaim(0), wire.Done)

    def lease(self, edition: str) -> Leased:
        """Take a lease and the descriptors. The lease stands until :meth:`release` or :meth:`close`.

        Raises:
            Refused: ``unknown_edition``: it was evicted or lost meanwhile.
        """
        fds: list[Fd] = []
        try:
            granted = self._call(wire.TakeLease(0, edition=edition), wire.LeaseGranted, into=fds)
            payloads = {
                name: read_sealed(fd, wire.PAYLOAD_LIMITS[name])
                for name, fd in zip(granted.payloads, fds, strict=False)
            }
            count = len(granted.payloads)
            while len(fds) - count < len(granted.slabs):
                first = len(fds) - count
                self._call(wire.GetSlabs(0, edition=edition, first=first), wire.Slabs, into=fds)
                if len(fds) - count == first:
                    raise ProtocolError("the keeper gave fewer slabs than it named", code="wrong_fds")
            fdpass.close_all(fds[:count])
            return Leased(edition, payloads, list(zip(granted.slabs, fds[count:], strict=True)))
        except BaseException:
            fdpass.close_all(fds)
            raise

    def release(self, edition: str) -> None:
        """Give a lease back; nothing happens where there is none."""
        self._call(wire.Release(0, edition=edition), wire.Done)

    # --- publishing ---

    def begin(self, key: Key, *, fields: bytes, checkpoint: bytes, total: int) -> Begun:
        """Open a transaction of ``total`` bytes of slabs (each slab's size already rounded up).

        Returns:
            its name, and the offset of its memory in the GPU's weights range (0 for host memory).

        Raises:
            Refused: ``exists``, ``claimed`` (someone else loads it), ``launches_met``, ``group_failed``,
                ``no_range`` (the weights range of that GPU is full), ``too_many_descriptors``.
        """
        with sealed_bytes("fer-fields", fields) as first, sealed_bytes("fer-checkpoint", checkpoint) as second:
            return self._call(wire.Begin(0, key=key, total=total), Begun, fds=[first, second])

    def add_slabs(self, transaction: str, slabs: Sequence[tuple[SlabInfo, Fd]]) -> None:
        """Hand slabs to the keeper, in the order the manifest counts them. The descriptors stay the caller's.

        Raises:
            Refused: ``unknown_transaction``, ``group_failed``, ``not_a_slab``, ``too_big``,
                ``too_many_descriptors``.
        """
        for first in range(0, len(slabs), wire.SLABS_A_FRAME):
            part = slabs[first : first + wire.SLABS_A_FRAME]
            infos = [info for info, _ in part]
            self._call(
                wire.AddSlabs(0, transaction=transaction, slabs=infos),
                wire.Done,
                fds=[fd for _, fd in part],
            )

    def commit(self, transaction: str, manifest: bytes, *, wait_s: float) -> Committed:
        """Finish this rank's part and wait until its whole group is visible; this connection then holds a lease.

        Raises:
            Refused: ``group_failed``, ``launches_met``, ``exists``, ``unknown_transaction``; nothing was published.
        """
        with sealed_bytes("fer-manifest", manifest) as fd:
            return self._call(
                wire.Commit(0, transaction=transaction, wait_s=_bounded(wait_s)), Committed, fds=[fd], wait_s=wait_s
            )

    def abort(self, transaction: str) -> None:
        """Drop a transaction, and with it the pending group of its launch."""
        self._call(wire.Abort(0, transaction=transaction), wire.Done)

    # --- an edition's further life ---

    def annotate(self, edition: str, *, checkpoint: bytes | None = None, digests: bytes | None = None) -> None:
        """Replace what is known of an edition's checkpoint, or leave the digests of its tensors with it.

        Raises:
            Refused: ``not_leased``: this connection has no lease on it; ``unknown_edition``.
        """
        given = {name: data for name, data in (("checkpoint", checkpoint), ("digests", digests)) if data is not None}
        if not given:
            return
        fds = [sealed_bytes(f"fer-{name}", data) for name, data in given.items()]
        try:
            self._call(wire.Annotate(0, edition=edition, names=list(given)), wire.Done, fds=fds)  # type: ignore[arg-type]
        finally:
            fdpass.close_all(fds)

    def report_lost(self, edition: str, why: str) -> None:
        """Say that an edition's descriptors no longer import: it is dropped with its group.

        Raises:
            Refused: ``not_leased``: neither has this connection a lease on it, nor does its memory live with this
                process. An edition that is gone already is none.
        """
        self._call(wire.ReportLost(0, edition=edition, why=why[:4096]), wire.Done)

    def make_room(self, gpu: str, needed: int | None) -> Room:
        """Evict unleased editions of a GPU, least recently used first, until ``needed`` bytes are freed (None: all)."""
        return self._call(wire.MakeRoom(0, gpu=gpu, needed=needed), Room)

    def evict(self, edition: str | None = None, *, gpu: str | None = None) -> list[EditionInfo]:
        """Evict one edition (with its group), or every unleased one (of a GPU); those that went.

        Raises:
            LeasesStand: the named edition, or another of its group, is in use.
            Refused: ``unknown_edition``.
        """
        return self._call(wire.Evict(0, edition=edition, gpu=gpu), wire.Evicted).editions

    def status(self) -> Status:
        """Everything the keeper knows."""
        return self._call(wire.AskStatus(0), Status)

    # --- roles and the keeper itself ---

    def acquire_role(self, role: str, *, wait_s: float) -> bool:
        """Become the only holder of a role, waiting at most ``wait_s`` seconds in order of asking."""
        return self._call(
            wire.AcquireRole(0, role=role, wait_s=_bounded(wait_s)), wire.RoleAnswer, wait_s=wait_s
        ).acquired

    def release_role(self, role: str) -> None:
        """Give a role back; nothing happens where it is not held."""
        self._call(wire.ReleaseRole(0, role=role), wire.Done)

    def stop(self, *, force: bool = False) -> None:
        """End the keeper and free what it holds.

        Raises:
            LeasesStand: others than this connection use editions or load them, and ``force`` was not given.
        """
        self._call(wire.Stop(0, force=force), wire.Done)

    # --- one call ---

    def _call(
        self,
        request: wire.Request,
        answer: type[_R],
        *,
        fds: Sequence[Fd] = (),
        into: list[Fd] | None = None,
        wait_s: float = 0.0,
        limit_s: float | None = None,
    ) -> _R:
        """Send one request and wait for its reply; the reply's descriptors are appended to ``into``."""
        if os.getpid() != self._pid:
            raise KeeperUnavailable(
                "a keeper connection cannot be used after fork()",
                why=f"it belongs to process {self._pid}",
                fix="Connect again in the child.",
            )
        with self._lock:
            self._seq += 1
            frame = wire.encode(msgspec.structs.replace(request, seq=self._seq))
            deadline = time.monotonic() + (self._timeout if limit_s is None else limit_s) + _bounded(wait_s)
            try:
                self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
                fdpass.send(self._sock, frame, fds)
                reply, received = self._receive(deadline)
            except (OSError, ProtocolError) as error:
                if isinstance(error, ProtocolError):
                    raise
                raise KeeperUnavailable("the keeper does not answer", why=_plainly(error), fix=_LOST) from error
        if isinstance(reply, answer) and (into is not None or not received):
            if into is not None:
                into.extend(received)
            return reply
        fdpass.close_all(received)
        if isinstance(reply, wire.Failed):
            raise from_dict(reply.error)
        raise ProtocolError(f"the keeper answered with {type(reply).__name__}", why=f"{answer.__name__} was due")

    def _receive(self, deadline: float) -> tuple[wire.AnyReply, list[Fd]]:
        while True:
            self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
            frame, fds, truncated = fdpass.receive(self._sock, wire.FRAME_LIMIT)
            try:
                if truncated:
                    fix = "Raise the limit of open files (ulimit -n)."
                    raise ProtocolError("a reply of the keeper arrived cut", why="too few free descriptors", fix=fix)
                if not frame:
                    raise ConnectionResetError("it closed the connection")
                reply = wire.unpack_reply(frame, fds)
            except BaseException:
                fdpass.close_all(fds)
                raise
            # An old number is the second answer to a request whose first answer a dying keeper could still send.
            if reply.seq in (0, self._seq):
                return reply, fds
            fdpass.close_all(fds)


_LOST = "What is attached stays valid; restart the keeper with `fer keeper run`."


def _open(directory: Path, deadline: float) -> socket.socket:
    """A connection to the keeper of a directory, both found to be the user's own.

    Raises:
        FileNotFoundError, ConnectionRefusedError: nobody listens there.
        PeerRefused: it is somebody else's.
    """
    path = directory / paths.SOCKET
    owners = _owners(directory)
    paths.check_private(directory, owners=owners)
    facts = os.lstat(path)
    if not stat.S_ISSOCK(facts.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(facts.st_mode) else "no socket"
        raise PeerRefused(f"{path} is {kind}", why="a keeper's socket must be a real one", fix=f"Remove {path}.")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        # A blocking connect with a send timeout waits for room in the listener's queue; a non-blocking one fails.
        left = max(deadline - time.monotonic(), 0.001)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(left), int(left % 1 * 1e6) + 1))
        fdpass.connect(sock, path)
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        uid = struct.unpack("3i", credentials)[1]  # its pid is that of whoever called listen(), dead or not
        if uid != os.getuid() and uid not in owners:
            raise PeerRefused(f"the process behind {path} is user {uid}", why=f"this process is user {os.getuid()}")
        return sock
    except BaseException:
        sock.close()
        raise


def _hangs(directory: Path, timeout: float) -> KeeperUnavailable:
    """What is said of a keeper that takes connections and no more."""
    from fer.weights.keeper.start import keeper_pid  # needed only to word an error

    pid = keeper_pid(directory)
    name = pid or "unknown"
    return KeeperUnavailable(
        f"the keeper in {directory} (pid {name}) accepts but does not answer",
        why=f"no answer within {timeout:g} s",
        fix="`kill -CONT` lets a stopped one go on; after `kill -KILL` systemd or its minder starts it again with all"
        " that it keeps.",
        hangs=pid,
    )


def _bounded(wait_s: float) -> float:
    """A wait as the wire carries it; whoever wants to wait for ever waits a week."""
    return min(max(wait_s, 0.0), wire.WAIT_LIMIT_S)


def _owners(directory: Path) -> tuple[int, ...]:
    """Foreign users whose keeper this user's settings allow; read only where the directory is a foreign one."""
    if os.lstat(directory).st_uid == os.getuid():
        return ()
    from fer.options import KeeperOptions

    return KeeperOptions.load().allow_uids


def _plainly(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "no socket"
    if isinstance(error, ConnectionRefusedError):
        return "a socket nobody listens on"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)
