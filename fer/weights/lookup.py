"""Which kept edition is this engine's, and if none, why not."""

from __future__ import annotations

from fer import fingerprint
from fer.engines.base import EngineIdentity
from fer.environment import environment
from fer.errors import FerError, IntegrityError, KeeperError, SlabLost
from fer.memory.base import HOST, Backend
from fer.weights import checkpoint
from fer.weights.client import Candidate, KeeperClient, Key, Near

_NAMED = 4
"""Differing fields spelled out for each near edition; ``fer explain`` shows all."""


class Lookup:
    """Compares this engine with what the keeper holds.

    Attributes:
        key: what the keeper matches exactly: group digest, rank, GPU.
        fields: the fingerprint as JSON, kept with what this engine publishes.
        unknown: fields that could not be found out. Such a fingerprint equals none, so nothing can be attached and
            publishing would only take memory.
        why: of the last :meth:`choose` that found something, how its checkpoint was recognised.
        reasons: of the last :meth:`choose` and what followed it, why there was no hit; never empty after a miss.
    """

    def __init__(self, client: KeeperClient, identity: EngineIdentity, backend: Backend) -> None:
        self._client, self._identity = client, identity
        self._fingerprint = fingerprint.of(identity, environment(backend.device))
        self.key = Key(
            group=self._fingerprint.group_digest,
            rank=self._fingerprint.rank_key,
            gpu=backend.gpu,
            launch=identity.ranks.launch,
            local_size=identity.ranks.local_size,
        )
        self.fields = self._fingerprint.to_json()
        self.unknown = self._fingerprint.unknown
        self.why = ""
        self.reasons: list[str] = []
        self._now = checkpoint.stamp(identity.checkpoint)
        self._verdict: checkpoint.Verdict | None = None
        self._broken: set[str] = set()

    def choose(self) -> Candidate | None:
        """The edition to attach, or None with :attr:`reasons`."""
        self.reasons = []
        if self.unknown:
            self.reasons.append(f"could not be found out, so nothing kept can be trusted: {', '.join(self.unknown)}")
            return None
        found = self._client.find(self.key)
        for candidate in found.candidates:
            if candidate.edition in self._broken:
                continue
            kept = checkpoint.CheckpointIdentity.from_json(candidate.checkpoint)
            verdict = checkpoint.compare(self._now, kept)
            self._now = verdict.now
            if verdict.same:
                self.why, self._verdict = f"fingerprint {self.key.group[:12]} matches, {verdict.why}", verdict
                return candidate
            self.reasons.append(f"edition {candidate.edition} is of another checkpoint: {verdict.why}")
        self.reasons += [self._explain(near) for near in found.near]
        if not self.reasons:
            where = "in host memory" if self.key.gpu == HOST else f"on {self.key.gpu}"
            self.reasons.append(f"no edition is kept {where}")
        return None

    def _explain(self, near: Near) -> str:
        if near.gpu != self.key.gpu:
            return f"edition {near.edition} is held on {near.gpu}, this engine is on {self.key.gpu}"
        differences = fingerprint.explain(self._fingerprint, fingerprint.Fingerprint.from_json(near.fields))
        named = ", ".join(str(difference) for difference in differences[:_NAMED])
        more = f" and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        return f"edition {near.edition} differs in {named}{more}"

    def broken(self, edition: str, error: FerError) -> None:
        """An edition could not be attached: do not choose it again; where its memory is at fault, tell the keeper."""
        self._broken.add(edition)
        self.reasons.append(f"edition {edition} could not be attached: {error}")
        if isinstance(error, (SlabLost, IntegrityError)):
            self._client.report_lost(edition, str(error))
        elif not isinstance(error, KeeperError):
            self._client.release(edition)

    def refresh(self, chosen: Candidate) -> None:
        """Where the checkpoint was recognised by its bytes, keep its new file times: the next start reads nothing."""
        if self._verdict is not None and self._verdict.by == "full":
            self._client.annotate(chosen.edition, checkpoint=self._verdict.now.to_json())
