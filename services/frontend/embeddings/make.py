"""A body of `/v1/embeddings` to the body of its answer: for a client, or for a line of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.frontend.asked import Api
from services.frontend.embeddings.answer import answer
from services.frontend.embeddings.body import Inputs, read_told
from services.frontend.embeddings.place import embed
from services.frontend.frontend import Frontend
from services.frontend.lately import AWAY_S
from services.frontend.receiving import read_as
from services.frontend.turn import Turn


async def read_inputs(frontend: Frontend, body: bytes | bytearray, away_s: float = AWAY_S) -> Inputs:
    """Raises BatonError when the body is not right, or not in time. `away_s`: of `Frontend.context_length`."""
    asked = await read_as(frontend, body, Api.EMBEDDINGS, away_s)
    return Inputs([prompt.ids for prompt in asked.prompts], asked.told)


async def make(
    frontend: Frontend, inputs: Inputs, uid: str, deadline: float, turns: Callable[[int], Turn] | None = None
) -> bytes:
    """The answer; see `embed`. Raises BatonError."""
    vectors = await embed(frontend.backend, uid, inputs.ids, frontend.context_length(), deadline, turns)
    return await asyncio.to_thread(answer, vectors, read_told(inputs.told), frontend.model.name, inputs.tokens)
