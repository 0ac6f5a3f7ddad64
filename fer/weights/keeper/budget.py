"""What may stay without anybody using it."""

from __future__ import annotations

from dataclasses import dataclass

from fer.weights.keeper.editions import Store, leased
from fer.weights.keeper.records import Edition


@dataclass(frozen=True, kw_only=True)
class Budget:
    """For each GPU: how many unleased editions may stay (the ranks of one group count as one), and their bytes.

    ``grace_s`` seconds after its last lease an edition still counts as leased: engines that die together come back to
    all of their editions, however few may stay for good.
    """

    editions: int = 1
    bytes: int | None = None
    grace_s: float = 0.0

    def enforce(self, store: Store, now: float) -> None:
        """Evict what is over the budget at ``now`` (monotonic seconds), least recently used first.

        What is leased or within its grace is not even counted.
        """
        for gpu in sorted({edition.key.gpu for edition in store.state.editions.values()}):
            unused = [batch for batch in store.batches(gpu) if not leased(batch) and self._end_of_grace(batch) <= now]
            while unused and self._exceeded(unused, gpu):
                store.drop(unused.pop(0), "evicted", f"over the budget of {gpu}")

    def next_end(self, store: Store, now: float) -> float | None:
        """The next end of an edition's grace after ``now``, None where no grace runs: time to :meth:`enforce` again."""
        ends = [self._end_of_grace(batch) for batch in store.batches() if not leased(batch)]
        return min((end for end in ends if end > now), default=None)

    def _end_of_grace(self, batch: list[Edition]) -> float:
        return max(edition.freed for edition in batch) + self.grace_s

    def _exceeded(self, unused: list[list[Edition]], gpu: str) -> bool:
        if len(unused) > self.editions:
            return True
        if self.bytes is None:
            return False
        return sum(e.size for batch in unused for e in batch if e.key.gpu == gpu) > self.bytes
