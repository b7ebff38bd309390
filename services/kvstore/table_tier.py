"""What tiers have in common whose blocks lie in the slots of a `SlotTable`: what is here, as the table says."""

from __future__ import annotations

import time

from services.kvstore.table import SlotTable
from services.kvstore.tier import Placed, Tier


class TableTier(Tier):
    """A tier over `_table`, which a new layout replaces."""

    _table: SlotTable

    def holds(self, key: bytes) -> bool:
        return key in self._table.index

    def keys(self) -> list[bytes]:
        return list(self._table.index)

    def placed(self, key: bytes) -> Placed | None:
        entry = self._table.index.get(key)
        return Placed(entry.facts, entry.readers, time.monotonic() - entry.used) if entry else None
