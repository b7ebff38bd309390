"""What a client's program knows of the server that it speaks to: its command line, and what `/v1/models` says."""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

WAIT_S = 60.0


@dataclass(frozen=True)
class Server:
    """`url` is without `/v1`. `exact`: one greedy request has one text, however often and beside whatever it is asked.

    In float32 it has. In bfloat16 sums differ by what is computed together, and where two tokens are about equally
    likely texts part: there only what is true of every right answer can be checked.
    """

    url: str
    model: str
    exact: bool

    @classmethod
    def of_command_line(cls, program: str) -> Server:
        """`URL MODEL [--exact]`; `program` is the program's own description."""
        parser = argparse.ArgumentParser(description=program)
        parser.add_argument("url", help="where Baton listens, as http://127.0.0.1:8000")
        parser.add_argument("model", help="the name that it serves")
        parser.add_argument("--exact", action="store_true", help="the model computes in float32: texts are compared")
        return cls(**vars(parser.parse_args()))

    @cached_property
    def context(self) -> int:
        """How many tokens prompt and output may have together."""
        with urllib.request.urlopen(f"{self.url}/v1/models/{self.model}", timeout=WAIT_S) as reply:
            return int(json.load(reply)["max_model_len"])

    def too_long(self) -> str:
        """A prompt over the context: a word is a token at least."""
        return "word " * self.context

    def same(self, *answers: Any) -> bool:
        """Whether answers to one greedy request are all the same; of a server that is not exact nobody can ask that."""
        return not self.exact or all(answer == answers[0] for answer in answers)


def refusal(kind: type[Any], ask: Callable[[], object]) -> str | None:
    """The code with which `ask` is refused, which must be with this kind of `openai.APIStatusError`."""
    try:
        ask()
    except kind as error:
        code: str | None = error.code
        return code
    raise AssertionError(f"no {kind.__name__}")


@contextmanager
def check(what: str) -> Iterator[None]:
    """Says that it passed and how long it took, or that it did not."""
    began, verdict = time.monotonic(), "FAILED"
    try:
        yield
        verdict = "ok"
    finally:
        print(f"{verdict:6} {time.monotonic() - began:5.1f} s  {what}", flush=True)
