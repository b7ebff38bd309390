"""What a turn of a chat costs the frontend before any engine sees it: body to token ids and block keys, turn by turn.

A client sends the whole conversation each time. Three ways on the same bodies: every turn with an empty cache, with
the cache of token ids (`services/frontend/token_cache.py`) as turns follow one another, and the tokenizer alone on the
whole rendered text. CPU milliseconds of the process (the tokenizer has threads), the median of `--repeat` chats.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from baton.cli.home import project_root
from baton.model.card import Model, load_model
from services.frontend.asked import Api, Reading, Unread
from services.frontend.token_cache import TokenCache

TURNS = (1, 10, 25, 50)
WORDS = 45
"""Of each message: fifty turns fit a context of 8,192 tokens."""


def main() -> None:
    """`baton bench turns [--model PATH] [--repeat N] [--json]`."""
    parser = argparse.ArgumentParser(prog="baton bench turns", description=__doc__)
    parser.add_argument("--model", default=str(project_root() / ".baton" / "models" / "smollm2-135m-instruct.gguf"))
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    report = measure(load_model(Path(args.model)), args.repeat)
    table = Table("turn", "tokens", "reused", "without, ms", "with, ms", "tokenizer alone, ms", box=None)
    for turn, row in report.items():
        table.add_row(turn, *(f"{value:g}" for value in row.values()))
    Console(highlight=False).print(table)
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")


def measure(model: Model, repeat: int) -> dict[str, dict[str, float]]:
    """For each of TURNS: tokens, tokens reused, and CPU milliseconds of the three ways."""
    rows: dict[str, list[tuple[float, ...]]] = {str(turn): [] for turn in TURNS}
    for seed in range(repeat):
        reading = Reading(model)
        for turn in range(1, max(TURNS) + 1):
            messages = conversation(turn, seed)
            body = json.dumps({"model": model.name, "messages": messages}).encode()
            unread = Unread(body, Api.CHAT, 1 << 20)
            with_cache, asked = _cpu_ms(functools.partial(reading.read, unread))
            if turn not in TURNS:
                continue
            without, _ = _cpu_ms(functools.partial(Reading(model).read, unread))
            (prompt,) = asked.prompts
            alone, ids = _cpu_ms(functools.partial(model.tokenizer.encode, prompt.text, add_special=False))
            assert list(prompt.ids) == ids == list(TokenCache(model.tokenizer).encode(prompt.text)[0])
            rows[str(turn)].append((len(ids), prompt.reused, without, with_cache, alone))
    names = ("tokens", "reused", "without_ms", "with_ms", "tokenizer_ms")
    return {
        turn: {
            name: round(statistics.median(values), 2)
            for name, values in zip(names, zip(*found, strict=True), strict=True)
        }
        for turn, found in rows.items()
    }


def conversation(turns: int, seed: int) -> list[dict[str, str]]:
    """The messages that a client sends at that turn: the same beginning at each."""
    words = (project_root() / "README.md").read_text(encoding="utf-8").split()
    draw = random.Random(seed)
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    for _ in range(turns):
        for role in ("user", "assistant"):
            messages.append({"role": role, "content": " ".join(draw.choices(words, k=WORDS))})
    return messages[:-1]


def _cpu_ms(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = work()
    return (time.process_time() - began) * 1000, result


if __name__ == "__main__":
    main()
