"""What may stay without anybody using it."""

from __future__ import annotations

from dataclasses import dataclass

from fer.weights.keeper.editions import Store, leased
from fer.weights.keeper.records import Edition


@dataclass(frozen=True, kw_only=True)
class Budget:
    """For each GPU: how many unleased editions may stay (the ranks of one group count as one), and their bytes."""

    editions: int = 1
    bytes: int | None = None

    def enforce(self, store: Store) -> None:
        """Evict what is over the budget, least recently used first; whatever is leased is not even counted."""
        for gpu in sorted({edition.key.gpu for edition in store.state.editions.values()}):
            unused = [batch for batch in store.batches(gpu) if not leased(batch)]
            while unused and self._exceeded(unused, gpu):
                store.drop(unused.pop(0), "evicted", f"over the budget of {gpu}")

    def _exceeded(self, unused: list[list[Edition]], gpu: str) -> bool:
        if len(unused) > self.editions:
            return True
        if self.bytes is None:
            return False
        return sum(e.size for batch in unused for e in batch if e.key.gpu == gpu) > self.bytes
