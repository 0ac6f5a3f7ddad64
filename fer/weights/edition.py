"""Where editions are made and put to use: the steps of attach and publish, with the backends they need."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fer.errors import KeeperError, MappingError
from fer.memory.base import Backend
from fer.memory.open import open_backend
from fer.weights import attach, manifest, publish
from fer.weights.client import KeeperClient, Key
from fer.weights.drawing import WithoutDrawing
from fer.weights.pauses import without_gc
from fer.weights.wire import SlabInfo

if TYPE_CHECKING:
    from torch import nn

    from fer.engines.base import Engine
    from fer.options import Options
    from fer.report import Report
    from fer.weights.checkpoint import CheckpointIdentity


@dataclass(kw_only=True)
class Published:
    """A committed edition, seen by its publisher. ``tensors`` by path, for the digests."""

    edition: str
    bytes: int
    slabs: int
    peak_extra: int
    copy_s: float
    transport: str
    tensors: dict[str, torch.Tensor]


def skeleton_of(engine: Engine, report: Report) -> nn.Module:
    """An engine's empty module, whose tensors have shapes and no memory. Raises what :meth:`Engine.build` raises."""
    with report.step("skeleton"), torch.device("meta"), WithoutDrawing():
        return engine.build()


class Workshop:
    """The backends of one engine, and the two ways an edition and a module meet.

    Args:
        skeleton: the engine's empty module, where it was built already.

    Attributes:
        backend: memory of the engine's own device.
    """

    def __init__(self, engine: Engine, options: Options, report: Report, skeleton: nn.Module | None = None) -> None:
        self._engine, self._options, self._report, self._built = engine, options, report, skeleton
        with report.step("open device"):
            self.backend = open_backend(engine.device, options.transport)
        host = self.backend if self.backend.kind == "host" else open_backend("cpu")
        self._by_device: dict[str, Backend] = {"cpu": host, self.backend.device.split(":")[0]: self.backend}
        self._by_kind: dict[str, Backend] = {host.kind: host, self.backend.kind: self.backend}

    def _skeleton(self) -> nn.Module:
        """A new empty module: one that was bound in vain is bound no further."""
        built, self._built = self._built, None
        return built if built is not None else skeleton_of(self._engine, self._report)

    def attach_edition(self, client: KeeperClient, edition: str) -> attach.Attached:
        """Lease an edition and bind a new module to it.

        Raises:
            SlabLost, MappingError, IntegrityError: its memory is not there, or not what was published.
            KeeperError: the edition went away meanwhile.
        """
        with without_gc():
            return self._attach_edition(client, edition)

    def _attach_edition(self, client: KeeperClient, edition: str) -> attach.Attached:
        skeleton = self._skeleton()
        span = self._report.step
        with span("lease"):
            leased = client.lease(edition)
        with leased:
            with span("read manifest"):
                record = manifest.decode(leased.manifest)
            for kind in {slab.kind for slab in record.slabs}:
                self._open_for(kind)
            with span("map"):
                mappings = attach.map_slabs(record, leased.slabs, self._by_kind)
        with span("begin check"):
            check = attach.Check(record, mappings, self._by_kind, self._options.verify)
        with span("bind"):
            copied = attach.bind(skeleton, record, mappings, self._by_kind, mutable=self._engine.mutable)
        with span("finish check"):
            verified = check.finish()
        if self._options.verify == "full" and leased.digests is not None:
            with span("compare digests"):
                views = attach.views(record, mappings, self._by_kind)
                verified += f" and {attach.compare_digests(views, leased.digests)} tensors' digests"
        return attach.Attached(
            module=skeleton,
            manifest=record,
            bytes=sum(mapping.size for mapping in mappings),
            moved=sum(mapping.moved for mapping in mappings),
            verified=verified,
            copied=copied,
            transport=_transport(record),
        )

    def publish_module(
        self, client: KeeperClient, module: nn.Module, key: Key, fields: bytes, loaded_from: CheckpointIdentity
    ) -> Published:
        """Move a loaded module into slabs and hand them to the keeper.

        Whatever goes wrong, the module stays whole and usable: tensors that have moved stay where they are.

        Raises:
            UnsupportedState, PublishRefused: the module cannot be kept.
            OutOfMemory: no room for the next slab.
            KeeperError: the keeper refused, or another rank of the group failed.
        """
        span = self._report.step
        skeleton = self._skeleton()
        with span("capture"):
            prepared = publish.prepare(module, skeleton, self._by_device, slab_bytes=self._options.slab_bytes)
        begun = client.begin(key, fields=fields, checkpoint=loaded_from.to_json(), total=prepared.device_total)
        try:
            with span("move"):
                moved = publish.move(prepared, self._by_device, offset=begun.offset)
            with span("seal and checksum"):
                record = self._seal(prepared, moved)
            with span("hand over"):
                committed = self._hand_over(client, begun.transaction, record, moved)
        except BaseException:
            with suppress(KeeperError):  # without a keeper there is nothing left to abort
                client.abort(begun.transaction)
            raise
        return Published(
            edition=committed,
            bytes=prepared.total,
            slabs=len(record.slabs),
            peak_extra=moved.peak_extra,
            copy_s=moved.copy_s,
            transport=_transport(record),
            # Over the slabs, not the module's own tensors: the engine may have private copies of some and write them.
            tensors=attach.views(record, [m for m, _ in moved.slabs], self._by_kind),
        )

    def _open_for(self, kind: str) -> None:
        """Open the backend that maps slabs of ``kind``, where the settings allow it."""
        if kind in self._by_kind:
            return
        transport = {"cuda": "vmm", "cuda-ipc": "cuda-ipc"}.get(kind, "")
        if self.backend.kind == "host" or self._options.transport not in ("auto", transport):
            raise MappingError(
                f"the edition's slabs are of kind {kind}, which this engine does not map",
                why=f"its device is {self._engine.device}, transport={self._options.transport}",
                fix="Set transport=auto, or publish again with this transport",
            )
        self._by_kind[kind] = open_backend(self._engine.device, transport)

    def _seal(self, prepared: publish.Prepared, moved: publish.Moved) -> manifest.Manifest:
        copies = publish.private_copies(prepared, self._engine.mutable)
        try:
            return publish.seal(prepared, moved)
        finally:  # also where sealing failed half way: some slabs are read-only by then
            copies.give()

    def _hand_over(
        self, client: KeeperClient, transaction: str, record: manifest.Manifest, moved: publish.Moved
    ) -> str:
        slabs = [
            (SlabInfo(kind=slab.kind, size=slab.size, address=slab.address), mapping.export())
            for slab, (mapping, _) in zip(record.slabs, moved.slabs, strict=True)
        ]
        try:
            client.add_slabs(transaction, slabs)
        finally:
            for _, fd in slabs:
                fd.close()
        committed = client.commit(transaction, manifest.encode(record), wait_s=self._options.wait_s)
        for mapping, _ in moved.slabs:
            mapping.forget_descriptor()
        return committed.edition


def _transport(record: manifest.Manifest) -> str:
    kinds = sorted({slab.kind for slab in record.slabs})
    return "+".join(kinds) or "none"
