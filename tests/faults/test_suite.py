"""The suite itself: its schedule replays, its judge is strict, and a short run of it finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.faults.suite.inject import Done
from tests.faults.suite.load import Stream
from tests.faults.suite.moves import moves
from tests.faults.suite.report import pauses
from tests.faults.suite.requests import Ask, Reference, Step, Verdict, is_prefix, judge
from tests.faults.suite.schedule import Fault, Kind, Menu, schedule

MENU = Menu(
    targets={Kind.KILL: ["a", "b"], Kind.STOP: ["c"], Kind.COMPACT: ["etcd"]},
    weights={Kind.KILL: 5, Kind.STOP: 2, Kind.COMPACT: 1},
    every_s=1.0,
)
ANSWER = Reference(["abcdef"], ["length"], tokens=6, prompt_tokens=3, steps=[Step(i, 1.0) for i in range(6)])


def test_a_seed_gives_the_same_faults_again() -> None:
    assert schedule(5, 50, MENU) == schedule(5, 50, MENU)
    assert schedule(5, 50, MENU) != schedule(6, 50, MENU)
    assert schedule(5, 20, MENU) == schedule(5, 50, MENU)[:20]


def test_every_kind_comes_before_any_comes_twice() -> None:
    for seed in range(20):
        assert {fault.kind for fault in schedule(seed, 3, MENU)} == set(MENU.weights)


def test_what_is_spared_is_never_ended() -> None:
    spared = [f for f in schedule(5, 200, MENU.sparing({"a", "c"})) if f.target in ("a", "c")]
    assert {fault.kind for fault in spared} == {Kind.STOP}
    with pytest.raises(ValueError, match="kill"):
        MENU.sparing({"a", "b"})


def test_a_menu_without_targets_is_refused() -> None:
    with pytest.raises(ValueError, match="kill"):
        Menu(targets={}, weights={Kind.KILL: 1}, every_s=1)


@pytest.mark.parametrize(
    ("text", "finish", "tokens", "verdict", "amount"),
    [
        ("abcdef", "length", 6, Verdict.RIGHT, 0),
        ("abdef", "length", 5, Verdict.LOST, 1),
        ("abccdef", "length", 7, Verdict.DOUBLED, 1),
        ("abcxyz", "length", 6, Verdict.WRONG, 0),
        ("abcdef", "stop", 6, Verdict.WRONG, 0),
        ("abcdef", "length", 5, Verdict.LOST, 1),
        ("", "length", 0, Verdict.LOST, 6),
    ],
)
def test_answers_are_judged(text: str, finish: str, tokens: int, verdict: Verdict, amount: int) -> None:
    judged = judge(ANSWER, [text], [finish], tokens)
    assert (judged.verdict, judged.amount) == (verdict, amount)


def test_only_a_departure_at_a_tie_is_a_tie() -> None:
    steps = [Step(i, 1e-5 if i == 3 else 1.0) for i in range(6)]
    tied = Reference(["abcdef"], ["length"], tokens=6, prompt_tokens=3, steps=steps)
    assert judge(tied, ["abcxyz"], ["length"], 6).verdict is Verdict.NEAR_TIE
    assert judge(tied, ["axcdef"], ["length"], 6).verdict is Verdict.WRONG
    assert judge(tied, ["abcdex"], ["length"], 6).verdict is Verdict.WRONG


def test_a_cut_answer_is_a_beginning() -> None:
    assert is_prefix(ANSWER, ["abc"])
    assert not is_prefix(ANSWER, ["abd"])


def test_a_pause_belongs_to_the_fault_of_the_worker_that_was_lost(tmp_path: Path) -> None:
    def done(number: int, kind: Kind, target: str, began: float, ended: float) -> Done:
        return Done(Fault(number, 0.0, kind, target, 0.0), [target], began, ended)

    def stream(uid: str, *times: float) -> Stream:
        return Stream(Ask("x", {}), 0.0, None, "", 0, 0, True, uid, 60, times)

    now = time.monotonic()
    faults = [
        done(0, Kind.STOP, "d1", now + 1.0, now + 3.0),
        done(1, Kind.KILL, "d2", now + 31.4, now + 35.0),
        done(2, Kind.KILL, "d1", now + 20.0, now + 22.0),
        done(3, Kind.KILL, "d1", now + 50.0, now + 52.0),
        done(4, Kind.STOP, "router", now + 49.5, now + 52.0),
        done(5, Kind.STOP, "frontend-2", now + 31.4, now + 35.0),
        done(6, Kind.FREEZE, "d3", now + 60.0, now + 61.3),
        done(7, Kind.KILL, "d3", now + 61.35, now + 62.0),
    ]
    log = tmp_path / "frontend.log"
    lines = [
        ("a", 2.0, "d1"),
        ("b", 50.1, "d1"),
        ("c", 31.42, "d2"),
        ("d", 10.0, "d1"),
        ("e", 61.4, "d3"),
        ("f", 61.4, "d3"),
    ]
    log.write_text(
        "not JSON\n"
        + "".join(
            json.dumps(
                {
                    "event": "output moves",
                    "uid": uid,
                    "lost": lost,
                    "error": "gone",
                    "id": "frontend-1",
                    "timestamp": _iso(now + at),
                }
            )
            + "\n"
            for uid, at, lost in lines
        )
    )
    streams = [
        stream("a", now, now + 0.9, now + 2.5),
        stream("b", now + 49.9, now + 51.3),
        stream("c", now + 31.3, now + 31.4, now + 31.9, now + 36.0),  # nothing moved it in its second gap
        stream("d", now + 9.9, now + 10.4),
        stream("e", now + 60.1, now + 61.8),  # it stood still before it was killed
        stream("f", now + 61.33, now + 61.8),
    ]
    found = pauses(faults, streams, moves([log]), prefill_tok_s=1000.0)
    work = [0.062, 0.061, 0.062, 0.061, 0.061, 0.061]  # prompt and tokens so far, at 1000 tokens a second
    assert [pause.way for pause in found] == ["stop", "several", "kill", "none", "several", "kill"]
    assert [pause.work_s for pause in found] == pytest.approx(work)
    gaps = [pause.seconds + pause.work_s for pause in found]
    assert gaps == pytest.approx([1.6, 1.4, 0.5, 0.5, 1.7, 0.47], abs=1e-3)
    assert "lost again" in str(found[1])


def _iso(monotonic: float) -> str:
    return datetime.fromtimestamp(monotonic - time.monotonic() + time.time(), tz=UTC).isoformat()


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_short_run_finds_nothing() -> None:
    command = [sys.executable, "-m", "tests.faults.suite", "--seed", "3", "--parts", "processes,network"]
    command += ["--faults", "8,5", "--streams", "20"]  # each kind once
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] in (8, 13)  # without network namespaces the second part is left out
    assert result["streams"] >= 20
