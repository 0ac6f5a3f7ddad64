"""The cache from one engine to the next: its memory, and what each of its rows holds, by way of the service's keeper.

Whoever is promoted takes the memory that the engine before left, if that served the same weights over a cache of the
same layout, at the same places. Answers that were under way go on after the last token that was made: nothing is read
or made again. In every other case the memory is given back, and the engine's own is left to the next one.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from fer.errors import FerError
from fer.weights.wire import Estate, Process, SlabInfo
from fer.weights.wire_parts import ESTATE_SLABS

if TYPE_CHECKING:
    from fer.memory.kept import KeptMemory
    from fer.standby.duty import Parking
    from fer.standby.ledger import Ledger
    from fer.standby.scheduler import SlotRows
    from fer.weights.services import Inherited, Tenure

log = logging.getLogger("fer.standby")


class CacheEstate:
    """One engine's side of it.

    Args:
        guardian: the process that starts engines of this service; when it ends, nobody will want the memory.
    """

    def __init__(self, engine: Parking, rows: SlotRows, guardian: Process | None) -> None:
        self._engine, self._rows, self._guardian = engine, rows, guardian
        self._ledger: Ledger | None = None
        self._aside: dict[int, int] = {}

    def take(self, tenure: Tenure, *, trust: bool) -> KeptMemory | None:
        """Memory that the engine before left, if this one can go on with it; else it is given back.

        Args:
            trust: the engine before did not end by an error of its own, after which nobody knows what it wrote.
        """
        from fer.standby.ledger import Ledger

        self._ledger, self._aside = None, {}
        inherited = tenure.take_estate()
        if inherited is None:
            return None
        why = self._unfit(inherited) if trust else "the engine before ended by an error"
        if not why:
            try:
                self._ledger = Ledger(inherited.fds[-1], self._rows.count, self._rows.length)
                # Whoever dies before settle() may have written anywhere: the self-test to one row, a capture to all.
                self._aside = {row: self._ledger.set_aside(row) for row in self._ledger.held()}
            except FerError as error:
                why = str(error)
        if why:
            log.warning("the cache that was left is given back: %s", why)
            inherited.close()
            self._leave(tenure, None, None)
            return None
        return _memory(inherited)

    def settle(self, tenure: Tenure, kept: KeptMemory | None) -> None:
        """After the cache has its memory: know what rows hold, and leave the memory to the next one."""
        if kept is not None and self._ledger is not None and self._engine.intact:
            for row, filled in self._aside.items():
                self._ledger.put_back(row, filled)
            self._rows.ledger, self._rows.kept = self._ledger, set(self._ledger.held())
            log.info("the cache goes on as it was left, with %d rows that hold something", len(self._rows.kept))
            return
        self._rows.ledger, self._rows.kept = None, set()
        own = self._engine.keep() if self._engine.cache is not None and tenure.by == "keeper" else None
        if own is None:
            if kept is not None:
                self._leave(tenure, None, None)  # it is of no use to this engine, nor to one after it
            return
        from fer.standby.ledger import Ledger

        try:
            ledger = Ledger.create(self._rows.count, self._rows.length)
        except OSError as error:
            log.warning("the cache ends with this engine: %s", error)
        else:
            if self._leave(tenure, own, ledger):
                self._rows.ledger = ledger
        finally:
            own.close()

    @property
    def left(self) -> bool:
        """Whether the cache is left to the engine after this one."""
        return self._rows.ledger is not None

    @property
    def kept(self) -> set[int]:
        """Rows that hold what the engine before left."""
        return self._rows.kept

    def forget(self) -> None:
        """The engine is parked: what rows hold is the next one's business."""
        self._rows.ledger, self._rows.kept = None, set()

    def _unfit(self, inherited: Inherited) -> str:
        """Why this engine cannot go on with that cache, ``""`` if it can."""
        try:
            left = json.loads(inherited.estate.about)
            mine = json.loads(json.dumps(self._engine.cache))
        except ValueError as error:
            return f"what is said of it cannot be read: {error}"
        if not isinstance(left, dict) or mine is None:
            return "this engine's cache has no rows to go on with"
        if differing := [name for name in {*left, *mine} if left.get(name) != mine.get(name)]:
            return f"it is that of another engine: {', '.join(sorted(differing))} differ"
        return "" if len(inherited.fds) >= 2 else "it is not whole"

    def _leave(self, tenure: Tenure, memory: KeptMemory | None, ledger: Ledger | None) -> bool:
        try:
            if memory is None or ledger is None:
                return tenure.bequeath(None, [])
            if len(memory.parts) >= ESTATE_SLABS:
                log.warning("the cache ends with this engine: it has %d parts, too many to pass on", len(memory.parts))
                return False
            slabs = [SlabInfo(memory.kind, size) for size, _ in memory.parts] + [SlabInfo("host", ledger.size)]
            about = json.dumps(self._engine.cache).encode()
            estate = Estate(gpu=memory.gpu, slabs=slabs, about=about, guardian=self._guardian)
            return tenure.bequeath(estate, [*(fd for _, fd in memory.parts), ledger.fd])
        except (FerError, ValueError) as error:
            log.warning("the cache ends with this engine: %s", error)
            return False


def _memory(inherited: Inherited) -> KeptMemory:
    from fer.memory.kept import KeptMemory

    *parts, ledger = zip(inherited.estate.slabs, inherited.fds, strict=True)
    ledger[1].close()
    held = [(info.size, fd) for info, fd in parts]
    return KeptMemory(inherited.estate.gpu, "host" if parts[0][0].kind == "host" else "cuda", held)
