"""Which kept edition is this engine's, and if none, why not."""

from __future__ import annotations

from contextlib import suppress

from fer import fingerprint
from fer.engines.base import EngineIdentity
from fer.environment import environment
from fer.errors import FerError, IntegrityError, KeeperError, LeasesStand, SlabLost, StructureDiffers
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
        unusable: editions that matched and could not be attached.
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
        self.unusable: list[str] = []
        self._passed_over: list[str] = []
        self._lacked: list[str] = []  # there was no memory to attach them with
        self._sound: list[str] = []  # those, and what another rank could not attach its part of

    def choose(self) -> Candidate | None:
        """The edition to attach, or None with :attr:`reasons`."""
        self.reasons = list(self._passed_over)
        if self.unknown:
            self.reasons.append(f"could not be found out, so nothing kept can be trusted: {', '.join(self.unknown)}")
            return None
        found = self._client.find(self.key)
        for candidate in found.candidates:
            if candidate.edition in (*self.unusable, *self._lacked):
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
        self.passed_over(edition, f"edition {edition} could not be attached: {error}")
        with suppress(KeeperError):
            if isinstance(error, (SlabLost, IntegrityError)) and not isinstance(error, StructureDiffers):
                self._client.report_lost(edition, str(error))
            else:
                self._client.release(edition)

    def lacked(self, edition: str, error: FerError) -> None:
        """There was no memory to attach an edition with: do not choose it again, but it stays, since it is sound."""
        self._lacked.append(edition)
        self._sound.append(edition)
        self._note(f"edition {edition} could not be attached: {error}")

    def gave_way(self) -> bool:
        """Whether a sound edition that was not attached has been evicted since, to load instead."""
        if not self._sound:
            return False
        try:
            left = {candidate.edition for candidate in self._client.find(self.key).candidates}
        except KeeperError:
            return False
        return not left.issuperset(self._sound)

    def passed_over(self, edition: str, why: str, *, sound: bool = False) -> None:
        """Do not choose an edition again; where it is sound, it is another rank that could not."""
        self.unusable.append(edition)
        if sound:
            self._sound.append(edition)
        self._note(why)

    def _note(self, why: str) -> None:
        self._passed_over.append(why)
        self.reasons.append(why)

    def clear_the_way(self) -> None:
        """Evict editions this engine could not attach though everything matched: they would forbid it to publish."""
        for edition in self.unusable:
            try:
                self._client.evict(edition)
            except LeasesStand as error:
                self.reasons.append(f"{error}; it stands in the way of publishing until then: fer evict {edition}")
            except KeeperError:
                pass  # it is gone already, or the keeper is, which publishing will say

    def refresh(self, chosen: Candidate) -> None:
        """Where the checkpoint was recognised by its bytes, keep its new file times: the next start reads nothing."""
        if self._verdict is not None and self._verdict.by == "full":
            self._client.annotate(chosen.edition, checkpoint=self._verdict.now.to_json())
