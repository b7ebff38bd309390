"""What a prompt takes when its turn comes: what is in place, what is loaded and from where, what is computed."""

from __future__ import annotations

from typing import NamedTuple

from bench.sim.fleet import Job, Prefill, Setting
from bench.sim.tiers import NVME, Tiers


class Work(NamedTuple):
    """Of the prompt's tokens `cached` need not be computed; of these `loaded` come from `source`, in `load_s`, and of
    these `disk` from its disk. `seconds` is all of it, the computing of the others with it."""

    cached: int
    loaded: int
    disk: int
    load_s: float
    seconds: float
    source: Prefill | None


def work(setting: Setting, block: int, node: Prefill, source: Prefill | None, job: Job, now: float) -> Work:
    """Of `job` if `node` started it now. `source` is the node that its placement names, None when it names none or that
    one is down: then nothing is loaded that the plan counted on."""
    own = min(job.prompt - 1, node.cache.prefix(job.request.keys) * block)
    nothing = Work(own, 0, 0, 0.0, (job.prompt - own) / setting.prefill_tok_s, None)
    if setting.tiers is None:
        return (_from_cache(setting, block, own, source, job, now) if source else None) or nothing
    if source is None and job.source >= 0:
        return nothing
    loading = _from_store(setting, setting.tiers, block, own, node, source or node, job, now)
    if job.upto is None:
        return min(nothing, *loading, key=lambda option: option.seconds) if loading else nothing
    return loading[0] if loading else nothing


def transfer_s(setting: Setting, tokens: int) -> float:
    """Seconds to move the KV of so many tokens over a link."""
    return tokens * setting.kv_bytes / setting.link_bytes_s


def _from_cache(setting: Setting, block: int, own: int, source: Prefill, job: Job, now: float) -> Work | None:
    """Without tiers: all that the other node's cache has."""
    there = min(job.prompt - 1, source.cache.prefix(job.request.keys) * block)
    loaded = there - own
    if loaded <= 0:
        return None
    load_s = max(0.0, source.link_free - now) + transfer_s(setting, loaded)
    return Work(there, loaded, 0, load_s, load_s + (job.prompt - there) / setting.prefill_tok_s, source)


def _from_store(
    setting: Setting, tiers: Tiers, block: int, own: int, node: Prefill, source: Prefill, job: Job, now: float
) -> list[Work]:
    """Up to where the placement says. Else the two ends that a node may choose from: all that is there, and what comes
    before the first block on disk."""
    if source.store is None or job.upto == 0:
        return []
    keys, first = job.request.keys, own // block
    run = source.store.run(keys if job.upto is None else keys[: -(-job.upto // block)])
    ends = {len(run)}
    if job.upto is None and NVME in run[first:]:
        ends.add(run.index(NVME, first))
    found = []
    for end in ends:
        there = min(job.prompt - 1, end * block)
        loaded = there - own
        if loaded > 0:
            disk = min(loaded, run[first:end].count(NVME) * block)
            load_s = _load_s(setting, tiers, node, source, loaded, disk, now)
            seconds = load_s + (job.prompt - there) / setting.prefill_tok_s
            found.append(Work(there, loaded, disk, load_s, seconds, source))
    return found


def _load_s(
    setting: Setting, tiers: Tiers, node: Prefill, source: Prefill, loaded: int, disk: int, now: float
) -> float:
    """The disk is read while what is there already moves; what waits for a link or a disk waits for those before."""
    if source is node:
        seconds = loaded * setting.kv_bytes / tiers.local_bytes_s
    else:
        seconds = max(0.0, source.link_free - now) + transfer_s(setting, loaded)
    if disk and source.store:
        disk_s = max(0.0, source.store.disk_free - now) + disk * setting.kv_bytes / tiers.nvme_bytes_s
        seconds = max(seconds, disk_s)
    return tiers.read_s + seconds


def occupy(setting: Setting, node: Prefill, begun: Work, now: float) -> None:
    """The load has begun: link and disk of its source are taken for as long as they are needed."""
    source = begun.source
    if source is None:
        return
    if source is not node:
        source.link_free = max(source.link_free, now) + transfer_s(setting, begun.loaded)
    if begun.disk and source.store and setting.tiers:
        disk_s = begun.disk * setting.kv_bytes / setting.tiers.nvme_bytes_s
        source.store.disk_free = max(source.store.disk_free, now) + disk_s
