"""How much of a tier each tenant may take. `TENANT=GIB,...`; `*` stands for every tenant that is not named.

A tenant above its quota makes room out of its own blocks, the least recently used first; nobody else's go for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

OTHERS = "*"


def parse_quotas(text: str) -> dict[str, int]:
    """Bytes by tenant from `a=1.5,b=2,*=0.5` (GiB). Raises ValueError that says which part is wrong."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        tenant, sign, size = part.rpartition("=")
        try:
            limit = int(float(size) * 2**30)
        except (ValueError, OverflowError):
            limit = -1
        if not sign or not tenant or limit <= 0:
            raise ValueError(f"{part!r} is not TENANT=GIB")
        if tenant in found:
            raise ValueError(f"{tenant!r} has two quotas")
        found[tenant] = limit
    return found


class Quotas:
    """One tier's use by tenant, in slots. A slot counts from `take` to `give`; its block can go from `add` to
    `remove`."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self._limits = dict(limits)
        self._slot_bytes = 1
        self._used: Counter[str] = Counter()
        self._order: dict[str, OrderedDict[bytes, None]] = {}

    def resize(self, slot_bytes: int) -> None:
        """Slots have this size from now on; none is in use."""
        self._slot_bytes = slot_bytes

    def used(self, tenant: str) -> int:
        """Slots that the tenant has now."""
        return self._used[tenant]

    def limit(self, tenant: str) -> int | None:
        """Slots that the tenant may have; None: as many as there are."""
        limit = self._limits.get(tenant, self._limits.get(OTHERS))
        return None if limit is None else limit // self._slot_bytes

    def surplus(self, tenant: str, wanted: int) -> int:
        """How many of its slots must go so that `wanted` more are within its quota."""
        limit = self.limit(tenant)
        return 0 if limit is None else max(0, self._used[tenant] + wanted - limit)

    def take(self, tenant: str) -> None:
        """One more slot is the tenant's."""
        self._used[tenant] += 1

    def give(self, tenant: str) -> None:
        """One of the tenant's slots is nobody's any more."""
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]

    def add(self, tenant: str, key: bytes) -> None:
        """A block of the tenant's has come in. Only tenants with a quota are kept in order."""
        if self.limit(tenant) is not None:
            self._order.setdefault(tenant, OrderedDict())[key] = None

    def use(self, tenant: str, key: bytes) -> None:
        """The block was used now."""
        order = self._order.get(tenant)
        if order is not None and key in order:
            order.move_to_end(key)

    def remove(self, tenant: str, key: bytes) -> None:
        """The block has gone."""
        order = self._order.get(tenant)
        if order is not None:
            order.pop(key, None)
            if not order:
                del self._order[tenant]

    def oldest(self, tenant: str) -> Iterator[bytes]:
        """The tenant's blocks, least recently used first."""
        return iter(tuple(self._order.get(tenant, ())))

    def check(self, slots: Sequence[str]) -> list[str]:
        """Findings, given the tenant of each slot that is in use."""
        counted = Counter(slots)
        return [] if counted == self._used else [f"quota: {dict(self._used)} are counted, {dict(counted)} are there"]
