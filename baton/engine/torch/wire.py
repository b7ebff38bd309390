"""Between the port's types and the messages that carry them."""

from __future__ import annotations

from baton.engine.port import FinishReason, FirstToken, PrefillDone, TokenEvent, TokenLogprob
from baton.engine.torch import messages as m
from baton.errors import Reason


def logprob_to(entry: TokenLogprob) -> m.Logprob:
    """As (id, logprob, most likely ones)."""
    return entry.token_id, entry.logprob, list(entry.top)


def token_message(event: TokenEvent) -> m.Token:
    """One event of a step."""
    return m.Token(
        event.uid,
        event.attempt,
        event.choice,
        event.offset,
        list(event.token_ids),
        [logprob_to(entry) for entry in event.logprobs],
        event.finish or "",
        event.error.name if event.error else "",
        event.message,
    )


def prefilled_message(job: int, done: PrefillDone) -> m.Prefilled:
    """The end of a prefill; what was cached the worker knows."""
    first = [
        (f.choice, f.token_id, str(f.finish or ""), logprob_to(f.logprob) if f.logprob else None) for f in done.first
    ]
    return m.Prefilled(job, first, [logprob_to(e) if e else None for e in done.prompt_logprobs])


def logprob_from(entry: m.Logprob | None) -> TokenLogprob | None:
    """The reverse of `logprob_to`."""
    if entry is None:
        return None
    token, value, top = entry
    return TokenLogprob(token, value, tuple((t, v) for t, v in top))


def token_event(token: m.Token) -> TokenEvent:
    """The reverse of `token_message`."""
    return TokenEvent(
        token.uid,
        token.attempt,
        token.choice,
        token.offset,
        tuple(token.ids),
        tuple(entry for entry in map(logprob_from, token.logprobs) if entry is not None),
        FinishReason(token.finish) if token.finish else None,
        Reason.from_name(token.error) if token.error else None,
        token.message,
    )


def prefill_done(message: m.Prefilled, cached_tokens: int) -> PrefillDone:
    """The reverse of `prefilled_message`."""
    first = tuple(
        FirstToken(choice, token, logprob_from(entry), FinishReason(finish) if finish else None)
        for choice, token, finish, entry in message.first
    )
    return PrefillDone(first, cached_tokens, tuple(map(logprob_from, message.prompt_logprobs)))
