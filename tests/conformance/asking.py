"""A worker asked for a text: tokens and text are the same to whoever asks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.model.tokenizer import Tokenizer
from baton.v1 import worker_pb2 as pb
from tests.worker_process import Frontend, Result, WorkerProcess


@dataclass
class Answer:
    """One choice of an attempt: its text, how many tokens that is, how it ended, and what came with it."""

    text: str
    tokens: int
    finish: str
    route: pb.RouteTaken
    ids: list[int]
    logprobs: list[pb.Logprob]


def merged(worker: WorkerProcess) -> pb.Plan:
    """On a worker that computes the prompt itself."""
    return pb.Plan(mode=pb.MODE_MERGED, worker=pb.Target(id=worker.id), reasons=["MERGED_CHEAPEST"])


def local(worker: WorkerProcess) -> pb.Plan:
    """The same on a decode worker."""
    return pb.Plan(mode=pb.MODE_LOCAL, worker=pb.Target(id=worker.id), reasons=["LOCAL_CHEAPEST"])


def disaggregated(prefill: WorkerProcess, decode: WorkerProcess) -> pb.Plan:
    """Prefill there, decode here; nothing else will do."""
    target = pb.Target(id=prefill.id, address=prefill.address)
    return pb.Plan(mode=pb.MODE_DISAGGREGATED, worker=pb.Target(id=decode.id), prefill=target)


def answers(result: Result, tokenizer: Tokenizer) -> dict[int, Answer]:
    """What came, by choice. Fails when the attempt did."""
    assert not result.failure, result
    assert result.handback is None, result
    assert result.route is not None
    out = {}
    for choice, finish in result.finish.items():
        ids = list(result.tokens.get(choice, []))
        text = result.text[choice] if choice in result.text else tokenizer.decode(ids)
        counted = result.text_tokens.get(choice, len(ids))
        out[choice] = Answer(text, counted, finish, result.route, ids, result.logprobs.get(choice, []))
    return out


async def complete(
    client: Frontend, tokenizer: Tokenizer, uid: str, prompt: list[int], plan: pb.Plan, **options: Any
) -> Answer:
    """The answer of an attempt with one choice."""
    result = await client.run(uid, prompt, plan, fallback=pb.FALLBACK_STRICT, **options)
    (answer,) = answers(result, tokenizer).values()
    return answer
