"""The suite itself: its schedule replays, its judge is strict, and a short run of it finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.suite.requests import Reference, Step, Verdict, is_prefix, judge
from tests.faults.suite.schedule import Kind, Menu, schedule

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


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_short_run_finds_nothing() -> None:
    command = [sys.executable, "-m", "tests.faults.suite", "--seed", "3", "--parts", "processes,network"]
    command += ["--faults", "10,6", "--streams", "20"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["faults"] in (10, 16)  # without network namespaces the second part is left out
    assert result["streams"] >= 20
