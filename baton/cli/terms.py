"""What the words of `baton explain` mean, in a line each. How each term is computed: services/router/README.md."""

from __future__ import annotations

MODES = {
    "disaggregated": "one worker computes the prompt, another streams the answer",
    "merged": "one merged worker does both",
    "local": "the decode worker that streams computes the prompt itself",
}

TERMS = {
    "queue": "waiting for prompts that are ahead, for a free place, and for workers that share the core",
    "prefill": "computing the part of the prompt that is not cached",
    "load": "reading the part of it that the KV store has",
    "transfer": "handing its KV over from the prefill to the decode worker",
    "stall": "how long streams there, and one that may join, stand still or are slowed while it is computed, weighted",
    "batch": "what the other streams there add to the steps of this one, and it to theirs",
    "interference": "how long later prompts there will hold this stream up, and it prompts of workers on its core",
    "waking": "what the first stream on a resting core costs the streams on other cores of the host",
}
"""In seconds of cost each, shown as milliseconds; `batch` and what follows it are for the whole expected answer."""

MORE = "services/router/README.md"


def explain_help() -> str:
    """The help of `baton explain`."""
    modes, terms = (
        "\n".join(f"- **{name}**: {meaning}" for name, meaning in words.items()) for words in (MODES, TERMS)
    )
    return f"""Ask the router where this prompt would run, and why: every candidate with its predicted milliseconds.

Modes:

{modes}

A candidate's total is the sum of its terms, and the lowest wins:

{terms}

{MORE} has the formulas."""
