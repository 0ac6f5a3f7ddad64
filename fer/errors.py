"""Every error FER raises, in one tree, sorted by who must act.

    FerError
    ├── UsageError                 the caller: settings or input are wrong
    │   ├── OptionError                a setting is unknown or has a bad value
    │   ├── CheckpointError            checkpoint files are missing, damaged, or changed while they were read
    │   ├── UnsupportedQuantization    the quantisation method is not on the allowlist
    │   └── UnsupportedState           the module holds something that cannot be kept, named by its path
    ├── Miss                       nothing fits and ``on_miss="fail"`` forbids loading
    │   └── ArchiveIncompatible        an archive of kernels was made for something else
    ├── ArchiveUntrusted           an archive holds code, or what FER never writes, and nobody said its maker is trusted
    ├── ResourceError              the operator: something has run out
    │   ├── OutOfMemory                device or host memory; says needed, free and who holds it
    │   └── WaitTimeout                another engine is loading and did not finish in the stated time
    ├── KeeperError                the keeper or the way to it
    │   ├── KeeperUnavailable          no keeper listens
    │   ├── PeerRefused                the other side of the socket is not who it must be
    │   ├── ProtocolError              a frame broke the protocol
    │   ├── Refused                    the keeper said no, with a code
    │   ├── LeasesStand                the keeper will not stop while engines use its weights
    │   └── ServiceHeld                others answer for a service, or did and are not all gone
    ├── LauncherError              no launcher listens, or one cannot be started
    ├── MemoryFault                mapping, driver and descriptor trouble
    │   ├── DriverError                a CUDA driver call failed; keeps the code
    │   ├── MappingError               a slab could not be mapped
    │   └── SlabLost                   a descriptor no longer imports
    ├── IntegrityError             kept bytes or structure differ from what was published
    │   ├── StructureDiffers           the bytes are right, but this engine builds another module
    │   └── ArchiveError               an archive of graphs or kernels is damaged or cannot be written
    ├── PeerRankFailed             another rank of this launch failed, and this one must not go on without it
    ├── RequestError               a client's request cannot be answered; has HTTP's status
    ├── EngineDied                 an engine that is supervised ended, or could not be ended
    ├── GraphRefused               a graph cannot be kept or restored; it is captured natively
    ├── PublishRefused             what was loaded cannot be published; the engine goes on with it
    └── FerBug                     our own invariant broke: please report

Each message says what happened, why, and what to do. Fields stay readable by programs, and every error
survives a process boundary through :meth:`FerError.to_dict` and :func:`from_dict` (and through pickle).
"""

from __future__ import annotations

from typing import Any


class FerError(Exception):
    """Base of all FER errors.

    Args:
        what: what happened, a clause without a full stop.
        why: the cause, where it is known.
        fix: what the reader can do about it.
        fields: further facts, kept as attributes of ``fields`` and in :meth:`to_dict`.
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "", **fields: Any) -> None:
        self.what, self.why, self.fix, self.fields = what, why, fix, fields
        super().__init__(self._message())

    def _message(self) -> str:
        text = f"{self.what}: {self.why}" if self.why else self.what
        return f"{text}. {self.fix}" if self.fix else text

    def __reduce__(self) -> tuple[Any, ...]:
        return from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """The error as plain data: ``kind``, ``what``, ``why``, ``fix`` and ``fields``."""
        return {"kind": type(self).__name__, "what": self.what, "why": self.why, "fix": self.fix, "fields": self.fields}


class UsageError(FerError):
    """The caller's settings or input are wrong."""


class OptionError(UsageError):
    """A setting is unknown or has a bad value."""


class CheckpointError(UsageError):
    """Checkpoint files are missing, damaged, or changed while they were read."""


class UnsupportedQuantization(UsageError):
    """The quantisation method is not on the allowlist. Field: ``method``."""


class UnsupportedState(UsageError):
    """The module holds something that cannot be kept. Field: ``path``."""


class Miss(FerError):
    """Nothing that is kept fits, and loading was forbidden. Field: ``reasons``."""


class ArchiveIncompatible(Miss):
    """An archive of kernels is of another schema, or none of its entries can be used here. Field: ``reasons``."""


class ArchiveUntrusted(FerError):
    """An archive holds what would run in this process, or what FER never writes. Field: ``reasons``."""


class ResourceError(FerError):
    """Something has run out."""


class OutOfMemory(ResourceError):
    """Not enough memory. Fields: ``needed`` and ``free`` in bytes, ``holders``."""


class WaitTimeout(ResourceError):
    """Another engine is loading the same weights and did not finish in the stated time."""


class KeeperError(FerError):
    """Trouble with the keeper or the way to it."""


class KeeperUnavailable(KeeperError):
    """No keeper listens. Field: ``looked_in``."""


class PeerRefused(KeeperError):
    """The other side of the socket is not who it must be."""


class ProtocolError(KeeperError):
    """A frame broke the protocol."""


class Refused(KeeperError):
    """The keeper said no. Field: ``code``."""


class LeasesStand(KeeperError):
    """The keeper will not stop or evict while engines use its weights. Field: ``holders``."""


class ServiceHeld(KeeperError):
    """Others answer for a service, or did and are not all gone. Field: ``service``."""


class LauncherError(FerError):
    """No launcher listens, or one cannot be started."""


class MemoryFault(FerError):
    """Mapping, driver and descriptor trouble."""


class DriverError(MemoryFault):
    """A CUDA driver call failed. Fields: ``call``, ``code``."""


class MappingError(MemoryFault):
    """A slab could not be mapped."""


class SlabLost(MemoryFault):
    """A kept descriptor no longer imports, as after a driver reload."""


class IntegrityError(FerError):
    """Kept bytes or structure differ from what was published."""


class StructureDiffers(IntegrityError):
    """The bytes are right, but this engine builds another module than the one that was published."""


class ArchiveError(IntegrityError):
    """An archive of graphs or kernels is damaged, or cannot be written. Field: ``section``."""


class PeerRankFailed(FerError):
    """Another rank of this launch failed, and this one must not go on without it."""


class RequestError(FerError):
    """A client's request cannot be answered. Fields: ``status``, ``code``, ``param``, ``retry_after`` in seconds."""


class EngineDied(FerError):
    """An engine that is supervised ended, or could not be ended. Fields: ``pid``, ``status``."""


class GraphRefused(FerError):
    """A graph cannot be kept or restored; the engine captures it natively. Field: ``graph``."""


class PublishRefused(FerError):
    """What was loaded cannot be published; the engine goes on with it."""


class FerBug(FerError):
    """One of FER's own invariants broke: please report it."""


def _tree(root: type[FerError]) -> dict[str, type[FerError]]:
    kinds = {root.__name__: root}
    for child in root.__subclasses__():
        kinds |= _tree(child)
    return kinds


def from_dict(data: dict[str, Any]) -> FerError:
    """The error that :meth:`FerError.to_dict` described; an unknown kind becomes a plain ``FerError``."""
    kind = _tree(FerError).get(data.get("kind", ""), FerError)
    fields = data.get("fields") or {}
    return kind(data.get("what", "unknown error"), why=data.get("why", ""), fix=data.get("fix", ""), **fields)
