"""Digests that need no one to wait for them: of the checkpoint's bytes, and of every published tensor."""

from __future__ import annotations

import atexit
import json
import logging
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fer.errors import FerError
from fer.weights import checkpoint, integrity
from fer.weights.client import KeeperClient

log = logging.getLogger("fer")

_STOP_S = 5.0
"""Seconds that the end of a process waits at most for its digests to stop; what they do between two looks is short."""


class Digests(threading.Thread):
    """Computes the digests of one edition after its first load and hands them to the keeper.

    The thread stops between two pieces of work when :meth:`cancel` is called or the process ends. An edition without
    digests is as good as any; it only cannot be recognised after its checkpoint was touched, and full verification has
    its slabs alone to compare.
    """

    def __init__(
        self,
        client: KeeperClient,
        edition: str,
        files: Sequence[Path],
        loaded_from: checkpoint.CheckpointIdentity,
        tensors: dict[str, torch.Tensor],
    ) -> None:
        super().__init__(name="fer-digests", daemon=True)
        self._client, self._edition = client, edition
        self._files, self._loaded_from, self._tensors = files, loaded_from, tensors
        self._cancelled = threading.Event()

    def start(self) -> None:
        """Start; the end of the process stops the thread first."""
        super().start()
        _stop_at_exit(weakref.ref(self))

    def cancel(self) -> None:
        """Stop soon; does not wait."""
        self._cancelled.set()

    def run(self) -> None:
        try:
            self._checkpoint()
            if not self._cancelled.is_set():
                self._each_tensor()
        except FerError as error:
            if not self._cancelled.is_set():
                log.warning("digests of edition %s were not kept: %s", self._edition, error)
        finally:
            self._tensors = {}

    def _checkpoint(self) -> None:
        samples = checkpoint.sample_digest(self._files)
        full = checkpoint.full_digest(self._files, cancelled=self._cancelled.is_set)
        if not full:
            return
        # A digest of files that changed after the load would vouch for bytes that were never loaded.
        if checkpoint.changed(self._loaded_from, checkpoint.stamp(self._files)):
            log.warning("the checkpoint changed after it was loaded; edition %s keeps no digest of it", self._edition)
            return
        self._client.annotate(
            self._edition, checkpoint=replace(self._loaded_from, samples=samples, full=full).to_json()
        )

    def _each_tensor(self) -> None:
        digests: dict[str, str] = {}
        for name in list(self._tensors):
            digest = integrity.tensor_digest(self._tensors[name], cancelled=self._cancelled.is_set)
            if digest is None:
                return
            digests[name] = digest
        self._client.annotate(self._edition, digests=json.dumps(digests).encode())


def _stop_at_exit(reference: weakref.ref[Digests]) -> None:
    def stop() -> None:
        digests = reference()
        if digests is not None and digests.is_alive():
            digests.cancel()
            digests.join(_STOP_S)

    # Where there is the choice, before the interpreter waits for the threads that hash files: it does so before any
    # function of atexit, and an engine would not end before all of its checkpoint was hashed. A thread that is not
    # joined at all may be in torch when the interpreter goes away, and abort the process.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(stop)
