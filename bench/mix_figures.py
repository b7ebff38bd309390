"""From the answers of a turn to figures, and from turns to the ratios that are quoted."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.load import Answer, quantile
from bench.mixes import Idle


@dataclass(frozen=True)
class Turn:
    """One measured stretch of one setup. `gaps` are seconds between two pieces of text of one answer, both within it;
    `good` of `sent` requests met the SLO; `placed` counts them by kind, mode and workers."""

    seconds: float
    sent: int
    good: int
    errors: int
    tokens: int
    gaps: tuple[float, ...]
    chat_ttfts: tuple[float, ...]
    document_ttfts: tuple[float, ...]
    placed: Mapping[str, int]


def good(answer: Answer, idle: Idle) -> bool:
    """Whether a request met the SLO. A refusal or an error did not, and neither did an answer that never began."""
    return not answer.error and answer.ttft <= idle.slo_ttft_s and answer.tpot <= idle.slo_tpot_s


def turn_of(
    chats: Sequence[Answer],
    documents: Sequence[Answer],
    before: Sequence[Answer],
    start: float,
    stop: float,
    idle: Idle,
) -> Turn:
    """Figures of one turn. `chats` and `documents` are those sent within it, `before` those sent earlier: of them only
    what they did within it counts. `start` and `stop` are on the clock of `Answer.times`."""
    sent = [*chats, *documents]
    everyone = [*before, *sent]
    placed = Counter(f"chat; {_place(answer)}" for answer in chats)
    placed.update(f"document; {_place(answer)}" for answer in documents)
    return Turn(
        seconds=stop - start,
        sent=len(sent),
        good=sum(good(answer, idle) for answer in sent),
        errors=sum(bool(answer.error) for answer in everyone),
        tokens=sum(start <= time <= stop for answer in everyone for time in answer.times),
        gaps=tuple(
            later - earlier
            for answer in everyone
            for earlier, later in pairwise(answer.times)
            if start <= earlier and later <= stop
        ),
        chat_ttfts=tuple(answer.ttft for answer in chats),
        document_ttfts=tuple(answer.ttft for answer in documents),
        placed=placed,
    )


def _place(answer: Answer) -> str:
    return "error" if answer.error else answer.route.partition("; reasons=")[0]


def figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Of all turns of one setup together: gaps and requests are pooled."""
    seconds = sum(turn.seconds for turn in turns)
    gaps = [gap for turn in turns for gap in turn.gaps]
    return {
        "itl_p50_ms": round(quantile(gaps, 0.5) * 1e3, 1),
        "itl_p99_ms": round(quantile(gaps, 0.99) * 1e3, 1),
        "chat_ttft_p50_s": round(quantile([t for turn in turns for t in turn.chat_ttfts], 0.5), 3),
        "document_ttft_p50_s": round(quantile([t for turn in turns for t in turn.document_ttfts], 0.5), 3),
        "goodput": round(sum(turn.good for turn in turns) / seconds, 3),
        "good_share": round(sum(turn.good for turn in turns) / sum(turn.sent for turn in turns), 3),
        "tok_s": round(sum(turn.tokens for turn in turns) / seconds, 1),
        "errors": sum(turn.errors for turn in turns),
        "itl_p99_ms_turns": [round(quantile(turn.gaps, 0.99) * 1e3, 1) for turn in turns],
        "good_turns": [f"{turn.good}/{turn.sent}" for turn in turns],
        "placed": dict(sum((Counter(turn.placed) for turn in turns), Counter())),
    }


METRICS = {"itl_p99": "itl_p99_ms", "goodput": "goodput"}
"""A ratio's name, and that of the figure."""


def compare(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """The ratios of one mix, from the turns of `pd`, `merged` and `ours`, as many of each and with the same arrivals.

    Of `itl_p99` below 1 is good, of `goodput` above 1. Each is the median of the turns' ratios: one slow moment of the
    machine, in a turn of one setup, does not decide it. Those ending in `_pooled` are of the pooled figures.
    `ours_over_best` compares each metric with whichever of the two is better in it, so its two denominators may be of
    different setups; `ours_over_better` compares both with the one of the better goodput (of equal ones, the lower ITL
    p99), which `better` names. Which is better is by the pooled figures.
    """
    pooled = {name: figures(of) for name, of in turns.items()}
    fastest = min(("pd", "merged"), key=lambda name: pooled[name]["itl_p99_ms"])
    better = min(("pd", "merged"), key=lambda name: (-pooled[name]["goodput"], pooled[name]["itl_p99_ms"]))
    best = {"itl_p99": fastest, "goodput": better}
    versus = {
        "pd_over_merged": ("pd", dict.fromkeys(METRICS, "merged")),
        "ours_over_best": ("ours", best),
        "ours_over_better": ("ours", dict.fromkeys(METRICS, better)),
    }
    result: dict[str, Any] = {"better": better}
    for ratio, (one, others) in versus.items():
        result[ratio] = {m: _median_ratio(m, turns[one], turns[other]) for m, other in others.items()}
        result[f"{ratio}_pooled"] = {m: _ratio(METRICS[m], pooled[one], pooled[other]) for m, other in others.items()}
    return result


def _median_ratio(metric: str, one: Sequence[Turn], other: Sequence[Turn]) -> float | None:
    """Of the turns in which there is something to divide by; None without any."""
    pairs = [(figures([a]), figures([b])) for a, b in zip(one, other, strict=True)]
    found = [ratio for a, b in pairs if (ratio := _ratio(METRICS[metric], a, b)) is not None]
    return round(statistics.median(found), 3) if found else None


def _ratio(key: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> float | None:
    return round(one[key] / other[key], 3) if 0.0 < other[key] < float("inf") else None
