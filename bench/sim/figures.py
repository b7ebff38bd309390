"""What came of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.sim.fleet import Job


@dataclass(frozen=True)
class Slo:
    """A request is good when its first token comes in time and its others flow. 0 s per token: not asked."""

    ttft_s: float = 10.0
    tpot_s: float = 0.0


@dataclass(frozen=True)
class Figures:
    """Seconds; shares of 0 to 1. TTFT is over those that were served; `goodput` is the share of all that came, so a
    refusal is a failure like a late answer. Of the prompt tokens `hit` were not computed, of these `loaded` from
    another node's cache or a store, of these `disk` from its disk."""

    requests: float
    refused: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    tpot_mean: float
    hit: float
    loaded: float
    disk: float
    goodput: float
    good_per_s: float
    resumed: float


def figures(jobs: Sequence[Job], slo: Slo) -> Figures:
    """The figures of a run."""
    served = [job for job in jobs if not job.refused]
    ttfts = sorted(job.first_token - job.request.at for job in served)
    tpots = [
        (j.done - j.first_token) / (j.request.output - 1) for j in served if j.decode >= 0 and j.request.output > 1
    ]
    prompts = sum(job.request.prompt for job in served)
    good = sum(_good(job, slo) for job in served)
    seconds = max(job.request.at for job in jobs) - min(job.request.at for job in jobs)
    return Figures(
        requests=len(jobs),
        refused=len(jobs) - len(served),
        ttft_mean=sum(ttfts) / max(1, len(ttfts)),
        ttft_p50=ttfts[len(ttfts) // 2] if ttfts else 0.0,
        ttft_p99=ttfts[int(0.99 * len(ttfts))] if ttfts else 0.0,
        tpot_mean=sum(tpots) / max(1, len(tpots)),
        hit=sum(job.cached for job in served) / max(1, prompts),
        loaded=sum(job.loaded for job in served) / max(1, prompts),
        disk=sum(job.disk for job in served) / max(1, prompts),
        goodput=good / len(jobs),
        good_per_s=good / max(seconds, 1e-9),
        resumed=sum(job.attempts > 1 for job in jobs),
    )


def _good(job: Job, slo: Slo) -> bool:
    if job.first_token - job.request.at > slo.ttft_s:
        return False
    if not slo.tpot_s or job.decode < 0 or job.request.output < 2:
        return True
    return (job.done - job.first_token) / (job.request.output - 1) <= slo.tpot_s
