"""SGLang's `HiCacheStorage` over Baton's KV store. SGLang loads this by `--hicache-storage-backend dynamic`.

SGLang calls from threads of its own and waits. Whatever goes wrong behind these methods is a miss with a counted
reason: an exception would end SGLang's thread, which it never restarts. Only what is wrong with the set-up raises, and
as ValueError while SGLang starts.

    exists   -> find                                a prefix that can be read, or soon
    get      -> read into bounce slots, verified -> copied into SGLang's page by the calling thread
    set      -> sum the page where it lies       -> offer; the store READs it from SGLang's own pool

A page is copied by the thread that SGLang waits for and by nobody else: once a method has returned, nothing of ours
writes into the pool any more.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import xxhash
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolName, PoolTransferResult

from baton.engine.sglang.bridge import Bridge
from baton.engine.sglang.client import Fetched, Identity, Side, StoreClient
from baton.engine.sglang.counters import Counters
from baton.engine.sglang.keys import PageKeys
from baton.engine.sglang.options import Options, StorageConfig, refuse_unsupported
from baton.engine.sglang.pages import Page, Pages, fill, take, views
from baton.errors import BatonError, Reason
from baton.kv.arena import Arena
from baton.kv.handle import Handle, Segment

START_S = 60.0
"""Registering a large pool with the transports takes seconds."""
FIND_S = 1.0
BATCH_S = 2.0
BATCH_BYTES_S = 2e8
"""A batch may take BATCH_S and as long as its bytes take at BATCH_BYTES_S: ten times what a slow network gives."""
MARGIN_S = 2.0
"""How much longer than the deadline of its work a call waits for Baton's thread."""
CLOSE_S = 5.0

T = TypeVar("T")
_log = logging.getLogger(__name__)


class BatonStorage(HiCacheStorage):  # type: ignore[misc]
    """One rank's pages in the store. SGLang makes one in each scheduler process; `register_mem_pool_host` starts it."""

    def __init__(self, storage_config: StorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Raises ValueError for options that are wrong and for kinds of KV that we do not take."""
        refuse_unsupported(storage_config)
        extra = storage_config.extra_config
        self._options = Options.parse(extra)
        if not (extra or {}).get("interface_v1"):
            raise ValueError('extra config: "interface_v1": 1 is missing; without it SGLang copies each page itself')
        self._config = storage_config
        self._owner = f"sglang-{secrets.token_hex(4)}-tp{storage_config.tp_rank}-pp{storage_config.pp_rank}"
        self._generations = itertools.count(1)
        self._bridge: Bridge | None = None
        self.counters = Counters()

    # ---- set-up

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take SGLang's host pool and start. Raises ValueError for a pool that we do not take."""
        super().register_mem_pool_host(mem_pool_host)
        pool = getattr(mem_pool_host, "anchor_entry", None)
        self._start(mem_pool_host if pool is None else pool.host_pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Pools of hybrid models. Raises ValueError for every other than the KV pool."""
        if str(host_pool_name) != PoolName.KV.value:
            raise ValueError(f"pool {host_pool_name}: Baton's store takes the KV of plain attention only")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._start(host_pool)

    def close(self) -> None:
        """Stop. Idempotent; every later call is a miss."""
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            try:
                bridge.call(self._client.close(), CLOSE_S)
            except (BatonError, TimeoutError) as error:
                _log.warning("Baton: closing failed: %s", error)
            bridge.close()

    # ---- v1: the pool's own pages

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages, from the first on, can be loaded."""
        found = self._safely(lambda: self._find(keys), self._failed_lookup, 0)
        self.counters.found.inc(found)
        return found

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Load pages into the pool; for each whether its bytes are there, verified. A prefix: after one that is not
        there, none is."""
        return self._get(keys, lambda: self._pages.of(host_indices))

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages of the pool; for each whether the store has it."""
        return self._set(keys, lambda: self._set_from_pool(keys, self._pages.of(host_indices)))

    # ---- v2: the same for each of several pools, of which we have one

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """As `batch_exists`; nothing, when pages of another pool are needed too."""
        others = [str(t.name) for t in pool_transfers or [] if str(t.name) != PoolName.KV.value]
        hit = 0 if others else self.batch_exists(keys, extra_info)
        return PoolTransferResult(hit, dict.fromkeys(others, 0))

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_get_v1` for the KV pool; nothing for another."""
        return self._each_pool(transfers, self.batch_get_v1)

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_set_v1` for the KV pool; nothing for another."""
        return self._each_pool(transfers, self.batch_set_v1)

    # ---- the oldest face: flat pages in memory of their own

    def exists(self, key: str) -> bool:
        """Whether the page can be loaded."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The page in `target_location`, a flat page; None when it is not to be had."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """For each key its target, filled, or None."""
        there = self._get(keys, lambda: [self._pages.flat(target) for target in target_locations])
        return [target if ok else None for target, ok in zip(target_locations or [], there, strict=False)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store a flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat pages; whether the store has all of them."""
        return all(self._set(keys, lambda: self._set_flat(keys, values)))

    def clear(self) -> None:
        """Forget this layout's pages of our tenant in the store, those of other instances too."""
        self._safely(lambda: self._call(self._client.clear(self._end(FIND_S)), FIND_S), self._failed_lookup, 0)

    # ---- how

    def _start(self, pool: Any) -> None:
        if self._bridge is not None:
            return
        options, config = self._options, self._config
        self._pages = Pages(pool)
        fingerprint = self._pages.layout(options.weights, config.tp_size, config.pp_size).digest()
        self._identity = Identity(fingerprint, self._pages.page_bytes, self._pages.tokens)
        self._keys = PageKeys(options.weights, options.tenant, fingerprint, config.tp_rank, config.pp_rank)
        arena = Arena.over(self._pages.address, self._pages.size)
        self._client = StoreClient(options, self._identity, arena, self._owner)
        bridge = Bridge("baton-storage")
        try:
            bridge.call(self._client.start(), START_S)
        except (BatonError, TimeoutError) as error:
            bridge.close()
            raise ValueError(f"Baton's storage cannot start: {error}") from error
        self._bridge = bridge

    def _find(self, keys: Sequence[str]) -> int:
        return self._call(self._client.find(self._keys.keys(keys), self._end(FIND_S)), FIND_S) if keys else 0

    def _get(self, keys: Sequence[str], pages: Callable[[], list[Page]]) -> list[bool]:
        """Load a prefix of `keys` into the pages."""
        began = time.monotonic()
        loaded: list[int] = []
        self._safely(lambda: self._load(self._keys.keys(keys), pages(), loaded), self._miss(len(keys), loaded), None)
        self.counters.loaded.inc(len(loaded))
        self.counters.loaded_bytes.inc(sum(loaded))
        self.counters.load_seconds.inc(time.monotonic() - began)
        return [n < len(loaded) for n in range(len(keys))]

    def _load(self, keys: Sequence[bytes], pages: Sequence[Page], loaded: list[int]) -> None:
        """Notes in `loaded` the bytes of each page that is in place. Raises BatonError for the first that is not."""
        _same_number(keys, pages)
        wait = BATCH_S + len(pages) * self._identity.page_bytes / BATCH_BYTES_S
        end = self._end(wait)
        while len(loaded) < len(keys):
            fetched = self._call(self._client.read(keys[len(loaded) :], end), wait, self._discard)
            try:
                for offset in fetched.offsets:
                    fill(pages[len(loaded)], self._client.inward.arena.address + offset)
                    loaded.append(self._identity.page_bytes)
            finally:
                self._discard_on_loop(fetched)
            if fetched.reason is not None:
                raise BatonError(fetched.reason, f"{len(loaded)} of {len(keys)} pages")

    def _set(self, keys: Sequence[str], store: Callable[[], None]) -> list[bool]:
        began = time.monotonic()
        done: list[bool] = []

        def all_of_it() -> None:
            store()
            done.append(True)

        self._safely(all_of_it, self._drop(len(keys)), None)
        self.counters.store_seconds.inc(time.monotonic() - began)
        if done:
            self.counters.stored.inc(len(keys))
        return [bool(done)] * len(keys)

    def _set_from_pool(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        """Offer pages where they lie. Raises BatonError unless the store has all."""
        _same_number(keys, pages)
        side = self._client.pool
        handles = [
            self._seal(side, key, page, self._pages.segments(page))
            for key, page in zip(self._keys.keys(keys), pages, strict=True)
        ]
        self._offer(side, handles)

    def _set_flat(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Copy flat pages to slots that peers can read and offer them from there. Raises BatonError."""
        _same_number(keys, values)
        pages = [self._pages.flat(value) for value in values]
        names, done, side = self._keys.keys(keys), 0, self._client.inward
        while done < len(pages):
            wait = BATCH_S
            ask = self._client.slots(len(pages) - done, self._end(wait))
            offsets = self._call(ask, wait, lambda late: self._client.bounce.give_back(late))
            try:
                handles = []
                for offset in offsets:
                    take(pages[done], side.arena.address + offset)
                    segments = (Segment(0, offset, self._identity.page_bytes),)
                    handles.append(self._seal(side, names[done], pages[done], segments))
                    done += 1
                self._offer(side, handles)
            finally:
                self._discard_on_loop(Fetched(offsets, None))

    def _seal(self, side: Side, key: bytes, page: Page, segments: tuple[Segment, ...]) -> Handle:
        """A handle on a page that stays as it is while it is offered. What a store reads after that does not verify,
        because the sum holds a generation of its own for each offer."""
        generation = next(self._generations)
        sum = xxhash.xxh3_64(key + side.epoch.to_bytes(8, "little") + generation.to_bytes(8, "little"))
        for run in views(page):
            sum.update(run)
        return Handle(
            key=key,
            fingerprint=self._identity.fingerprint,
            owner=side.owner,
            epoch=side.epoch,
            generation=generation,
            tokens=self._identity.tokens,
            segments=segments,
            checksum=sum.intdigest(),
        )

    def _offer(self, side: Side, handles: Sequence[Handle]) -> None:
        if not handles:
            return
        wait = BATCH_S + len(handles) * self._identity.page_bytes / BATCH_BYTES_S
        reply = self._call(self._client.offer(side, handles, self._end(wait)), wait)
        self.counters.stored_bytes.inc(reply.stored * self._identity.page_bytes)
        for name, count in reply.refused.items():
            reason = Reason.__members__.get(name, Reason.INTERNAL)
            raise BatonError(reason, f"the store refused {count} of {len(handles)} pages: {name}")

    def _each_pool(
        self, transfers: Sequence[Any], move: Callable[[list[str], Any], list[bool]]
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        for transfer in transfers:
            keys = transfer.keys or []
            ours = str(transfer.name) == PoolName.KV.value and transfer.host_indices is not None
            results[transfer.name] = move(keys, transfer.host_indices) if ours else [False] * len(keys)
        return results

    def _call(self, work: Coroutine[Any, Any, T], wait_s: float, discard: Callable[[T], None] | None = None) -> T:
        """Run on Baton's thread. Raises BatonError, TimeoutError."""
        bridge = self._bridge
        if bridge is None:
            work.close()
            raise BatonError(Reason.STORE_UNAVAILABLE, "the storage is not started, or closed")
        return bridge.call(work, wait_s + MARGIN_S, discard)

    def _discard(self, fetched: Fetched) -> None:
        self._client.bounce.give_back(fetched.offsets)

    def _discard_on_loop(self, fetched: Fetched) -> None:
        if self._bridge is not None:
            self._bridge.post(lambda: self._discard(fetched))

    def _safely(self, work: Callable[[], T], on_failure: Callable[[str], None], otherwise: T) -> T:
        """What `work` returns, or `otherwise` with the failure's reason counted and told. Never raises."""
        try:
            return work()
        except BatonError as error:
            on_failure(error.reason.name)
            _log.debug("Baton: %s", error)
        except TimeoutError as error:
            on_failure(Reason.DEADLINE_EXCEEDED.name)
            _log.warning("Baton: %s", error)
        except Exception:  # SGLang's thread must not end, whatever we have got wrong
            on_failure(Reason.INTERNAL.name)
            _log.exception("Baton: storage call failed")
        return otherwise

    def _failed_lookup(self, reason: str) -> None:
        self.counters.failed.labels(reason).inc()

    def _miss(self, wanted: int, loaded: Sequence[int]) -> Callable[[str], None]:
        return lambda reason: self.counters.missed.labels(reason).inc(wanted - len(loaded))

    def _drop(self, pages: int) -> Callable[[str], None]:
        return lambda reason: self.counters.dropped.labels(reason).inc(pages)

    @staticmethod
    def _end(wait_s: float) -> float:
        return time.monotonic() + wait_s


def _same_number(keys: Sequence[Any], pages: Sequence[Any]) -> None:
    if len(keys) != len(pages):
        raise ValueError(f"{len(keys)} keys and {len(pages)} pages")
