"""The eviction bench on tiny traces: what its figures mean, and that every policy keeps to its capacity."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from bench.eviction import prefix_hits, read_trace, tiered
from bench.policies import POLICIES, Lru, Policy
from tests.worker_process import ROOT


def prompts(text: str) -> list[list[bytes]]:
    """Letters are blocks, words are prompts."""
    return [[letter.encode() for letter in word] for word in text.split()]


def test_hits_end_at_the_first_missing_block() -> None:
    assert prefix_hits(prompts("abc abc"), Lru(10)) == 3 / 6
    assert prefix_hits(prompts("abc axc"), Lru(10)) == 1 / 6
    assert prefix_hits(prompts("abc xbc"), Lru(10)) == 0


def test_of_one_prompt_the_beginning_stays() -> None:
    lru = Lru(2)
    prefix_hits(prompts("abcd"), lru)
    assert b"a" in lru
    assert b"b" in lru
    assert b"d" not in lru


@pytest.mark.parametrize("kind", POLICIES)
def test_capacity_is_kept_and_hits_are_hits(kind: type[Policy]) -> None:
    rng = random.Random(4)
    policy = kind(20)
    names = [n.to_bytes(2, "big") for n in range(60)]
    for _ in range(3000):
        key = rng.choice(names[: rng.choice((10, 60))])
        there = key in policy
        assert policy.use(key) == there
        assert sum(name in policy for name in names) <= 20


def test_second_sighting_writes_less() -> None:
    trace = prompts("abc def ghi abc jkl")
    assert tiered(trace, 3, twice=False).writes == 12 / 15
    assert tiered(trace, 3, twice=True).writes == 3 / 15


def test_from_file_to_json(tmp_path: Path) -> None:
    lines = [{"timestamp": 0, "hash_ids": ids} for ids in ([0, 1, 2], [0, 1, 3], [0, 1, 2])]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert [len(prompt) for prompt in read_trace(tmp_path / "mooncake_conversation_trace.jsonl")] == [3, 3, 3]
    command = [sys.executable, "-m", "bench.eviction", "--json", "--traces", str(tmp_path)]
    report = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert report["winner"] in {kind.name for kind in POLICIES}
    assert report["hits"]["mooncake_conversation_trace"]["0.5"]["lru"] == round(5 / 9, 4)
    lost = subprocess.run([*command[:-1], str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True)
    assert lost.returncode == 1
    assert "hint: " in lost.stderr
