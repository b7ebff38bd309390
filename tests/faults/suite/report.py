"""What a run of faults and streams comes to: a table for people, a line of JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from tests.faults.suite.inject import Done
from tests.faults.suite.load import Stream
from tests.faults.suite.moves import Move
from tests.faults.suite.requests import Verdict
from tests.faults.suite.schedule import NETWORK, Kind

GAP_S = 0.05
SHOWN = 3
"""Pauses shown one by one: the longest after each way to break a worker."""
AFTER_S = 3.0
"""A worker that was broken until so long ago may be lost because of it still: a backlog, an old epoch."""
KNOWN_S = {"kill": 0.3, "drain": 0.3, "stop": 2.0, "network": 2.0}
"""Everybody knows of such a fault after so long."""
_NEVER_NEEDED = ("etcd", "kvstore", "frontend")
_WAYS = ("network", "stop", "drain", "kill", "several", "none")
_AFTER = {
    Kind.KILL: "kill",
    Kind.RESTART: "kill",
    Kind.STOP: "stop",
    Kind.FREEZE: "stop",
    Kind.TERM: "drain",
    **dict.fromkeys(NETWORK, "network"),
}


@dataclass(frozen=True)
class Pause:
    """A stream stood still for `seconds`, and for `work_s` more while it was prefilled, because of its `moves`."""

    way: str
    seconds: float
    work_s: float
    moves: Sequence[Move]

    def __str__(self) -> str:
        moves = "; ".join(map(str, self.moves))
        return f"{self.seconds:.2f} s after {self.way}, and {self.work_s:.2f} s of prefill: {moves}"


@dataclass
class Part:
    """One stack's share of the suite."""

    name: str
    faults: list[Done] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    cut_texts_wrong: int = 0
    pauses: list[Pause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, verdict: Verdict) -> int:
        """Streams of that verdict."""
        return sum(s.judgement is not None and s.judgement.verdict is verdict for s in self.streams)

    def amount(self, verdict: Verdict) -> int:
        """Tokens lost or doubled."""
        return sum(s.judgement.amount for s in self.streams if s.judgement and s.judgement.verdict is verdict)

    def paused(self, way: str) -> list[float]:
        """Seconds of its pauses after that."""
        return [pause.seconds for pause in self.pauses if pause.way == way]

    @property
    def failed(self) -> list[Stream]:
        """Requests that ended with neither an answer nor an early refusal."""
        return [s for s in self.streams if s.failure]

    @property
    def wrong(self) -> list[Stream]:
        """Streams with lost, doubled or wrong tokens."""
        bad = (Verdict.WRONG, Verdict.LOST, Verdict.DOUBLED)
        return [s for s in self.streams if s.judgement and s.judgement.verdict in bad]


def pauses(
    faults: Sequence[Done], streams: Iterable[Stream], moves: Mapping[str, Sequence[Move]], prefill_tok_s: float
) -> list[Pause]:
    """The times that streams stood still because they lost their worker, by what had been done to that worker.

    `moves` are theirs by uid, from the frontends' logs. "none" is a worker that nothing had been done to, "several" a
    gap that met another fault as well: of the next worker, or of a process that a stream on the way to it may need. The
    predicted prefill of what was resumed (prompt and tokens so far) is taken off: it is work, not waiting.
    """
    found = []
    for stream in streams:
        for emitted, (before, after) in enumerate(pairwise(stream.times), start=1):
            inside = [move for move in moves.get(stream.uid, ()) if before <= move.at <= after]
            if not inside or after - before < GAP_S:
                continue
            ways = {_way(move, faults, before) for move in inside}
            way = ways.pop() if len(ways) == 1 and not _others(inside, faults, before, after) else "several"
            work = (stream.prompt_tokens + emitted) / prefill_tok_s
            found.append(Pause(way, max(0.0, after - before - work), work, inside))
    return found


def _way(move: Move, faults: Sequence[Done], before: float) -> str:
    """What was done last to the worker that `move` lost, if it had not long been undone; "several" when it already
    stood still, from `before` on, because of something else."""
    theirs = [d for d in faults if move.lost in d.places and d.began <= move.at <= d.ended + AFTER_S]
    if len([d for d in theirs if d.ended >= before]) > 1:
        return "several"
    return _AFTER.get(theirs[-1].fault.kind, "none") if theirs else "none"


def _others(inside: Sequence[Move], faults: Sequence[Done], before: float, after: float) -> bool:
    """Whether something else that the stream may have needed broke at a time when nobody could know it yet."""
    theirs = {inside[0].frontend, *(move.lost for move in inside)}
    for done in faults:
        unknown_s = KNOWN_S.get(_AFTER.get(done.fault.kind, ""), 0.0)
        new = unknown_s > 0 and before - unknown_s <= done.began <= after
        own = done.fault.target == inside[0].frontend
        needed = own or not ({*done.places} <= theirs or done.fault.target.startswith(_NEVER_NEEDED))
        if new and needed:
            return True
    return False


def _slowest(part: Part) -> list[Pause]:
    shown: list[Pause] = []
    for way in _WAYS:
        theirs = [pause for pause in part.pauses if pause.way == way]
        shown += sorted(theirs, key=lambda pause: -pause.seconds)[:SHOWN]
    return shown


def p99(values: Sequence[float]) -> float:
    """Nearest rank; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def summary(parts: Sequence[Part]) -> dict[str, object]:
    """The whole suite."""
    ways = sorted({pause.way for part in parts for pause in part.pauses})
    pauses = {way: [seconds for part in parts for seconds in part.paused(way)] for way in ways}
    return {
        "faults": sum(len(part.faults) for part in parts),
        "streams": sum(len(part.streams) for part in parts),
        "lost_tokens": sum(part.amount(Verdict.LOST) for part in parts),
        "doubled_tokens": sum(part.amount(Verdict.DOUBLED) for part in parts),
        "wrong_texts": sum(part.count(Verdict.WRONG) + part.cut_texts_wrong for part in parts),
        "leaked_blocks": sum(len(part.findings) for part in parts),
        "failed_requests": sum(len(part.failed) for part in parts),
        "near_ties": sum(part.count(Verdict.NEAR_TIE) for part in parts),
        "pause_p99_s": round(p99(pauses.get("kill", [])), 3),
        "pause_p99_s_after": {way: round(p99(values), 3) for way, values in pauses.items()},
        "pauses": {way: len(values) for way, values in pauses.items()},
        "resumed": sum(s.resumed for part in parts for s in part.streams),
        "refused": sum(s.refused for part in parts for s in part.streams),
        "retried": sum(s.retried for part in parts for s in part.streams),
        "faults_by_kind": dict(Counter(str(d.fault.kind) for part in parts for d in part.faults)),
    }


def good(result: dict[str, object]) -> bool:
    """Whether nothing is wrong but ties, and those are few."""
    zero = ("lost_tokens", "doubled_tokens", "wrong_texts", "leaked_blocks", "failed_requests")
    ties, streams = result["near_ties"], result["streams"]
    assert isinstance(ties, int)
    assert isinstance(streams, int)
    return not any(result[key] for key in zero) and ties <= 0.01 * streams


def show(console: Console, parts: Sequence[Part]) -> None:
    """The table, and a line for everything that went wrong."""
    table = Table(title="faults")
    table.add_column("")
    for part in parts:
        table.add_column(part.name, justify="right")
    rows: dict[str, Callable[[Part], int]] = {
        "faults": lambda p: len(p.faults),
        "streams": lambda p: len(p.streams),
        "resumed": lambda p: sum(s.resumed for s in p.streams),
        "retried on another frontend": lambda p: sum(s.retried for s in p.streams),
        "refused with 429 or 503": lambda p: sum(s.refused for s in p.streams),
        "failed": lambda p: len(p.failed),
        "lost tokens": lambda p: p.amount(Verdict.LOST),
        "doubled tokens": lambda p: p.amount(Verdict.DOUBLED),
        "wrong texts": lambda p: p.count(Verdict.WRONG) + p.cut_texts_wrong,
        "near ties": lambda p: p.count(Verdict.NEAR_TIE),
        "leaked": lambda p: len(p.findings),
    }
    for title, count in rows.items():
        table.add_row(title, *(str(count(part)) for part in parts))
    for way in sorted({pause.way for part in parts for pause in part.pauses}):
        values = [part.paused(way) for part in parts]
        table.add_row(f"pause p99 after {way}, s", *(f"{p99(v):.2f} of {len(v)}" if v else "" for v in values))
    console.print(table)
    for part in parts:
        for stream in part.failed:
            console.print(f"{part.name}: {stream.ask.name} failed: {stream.failure}", style="red", markup=False)
        for stream in part.wrong:
            assert stream.judgement is not None
            verdict = stream.judgement
            text = f"{part.name}: {stream.ask.name}: {verdict.verdict}: {verdict.detail}"
            console.print(text, style="red", markup=False)
        for line in (*part.findings, *part.notes, *_slowest(part)):
            console.print(f"{part.name}: {line}", markup=False, highlight=False)
