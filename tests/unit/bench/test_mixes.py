"""What is sent: the same for the same seed, as much of it as a mix says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.mixes import (
    CHAT_PROMPT,
    CHAT_TOKENS,
    DOCUMENT_PROMPT,
    DOCUMENT_TOKENS,
    MIXES,
    Arrival,
    Idle,
    Mix,
    Prompts,
    arrivals,
)

IDLE = Idle(document_s=1.0, token_s=0.025, stream_s=0.0)


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.name)
def test_arrivals_are_those_of_the_seed_and_as_many_as_expected(mix: Mix) -> None:
    found = arrivals(mix, IDLE, 40.0, 7)
    assert found == arrivals(mix, IDLE, 40.0, 7)
    assert found != arrivals(mix, IDLE, 40.0, 8)
    assert [a.at for a in found] == sorted(a.at for a in found)
    assert all(0.0 <= a.at < 40.0 for a in found)
    documents = sum(a.document for a in found)
    assert documents == round(40.0 * IDLE.documents_s(mix))
    assert len(found) - documents == round(40.0 * mix.chats / (CHAT_TOKENS * 0.025))


def test_as_many_chats_are_under_way_as_the_mix_says() -> None:
    """Little's law, with the time that a token takes beside as many: eight take 45 ms, four 25."""
    idle = replace(IDLE, stream_s=0.005)
    assert idle.chats_s(MIXES[0]) * CHAT_TOKENS * 0.045 == pytest.approx(8.0)
    assert idle.chats_s(MIXES[1]) * CHAT_TOKENS * 0.025 == pytest.approx(4.0)
    assert idle.slo_tpot_s == IDLE.slo_tpot_s


def test_two_mixes_do_not_share_their_arrivals() -> None:
    one, other = MIXES[0], replace(MIXES[0], name="other")
    assert arrivals(one, IDLE, 40.0, 7) != arrivals(other, IDLE, 40.0, 7)


def test_both_kinds_come_in_the_shortest_turn() -> None:
    found = arrivals(Mix("rare", chats=0.01, documents=0.01), IDLE, 1.0, 0)
    assert sorted(a.document for a in found) == [False, True]


def test_documents_take_the_share_of_a_core_that_the_mix_says() -> None:
    plain = Mix("plain", chats=1.0, documents=0.3)
    assert IDLE.documents_s(plain) * IDLE.document_s == pytest.approx(0.3)
    shared = replace(plain, shared=750)
    assert IDLE.documents_s(shared) * IDLE.document_s * 0.25 == pytest.approx(0.3), "only the rest is computed"


def test_slo_is_twice_the_idle_figure() -> None:
    assert (IDLE.slo_ttft_s, IDLE.slo_tpot_s) == (2.0, 0.05)


def test_prompts_have_their_lengths_and_share_what_the_mix_shares() -> None:
    mix = Mix("shared", chats=1.0, documents=0.5, shared=768)
    prompts = Prompts(mix)
    chat, tokens = prompts.of(Arrival(0.0, document=False))
    assert (len(chat), tokens) == (CHAT_PROMPT, CHAT_TOKENS)
    documents = [prompts.of(Arrival(0.0, document=True)) for _ in range(50)]
    assert {(len(prompt), tokens) for prompt, tokens in documents} == {(DOCUMENT_PROMPT, DOCUMENT_TOKENS)}
    first = {tuple(prompt[:768]) for prompt in prompts.first()}
    assert {tuple(prompt[:768]) for prompt, _ in documents} <= first
    assert len({tuple(prompt[768:]) for prompt, _ in documents}) == 50


def test_without_a_shared_prefix_no_two_documents_are_alike() -> None:
    prompts = Prompts(Mix("plain", chats=1.0, documents=0.5))
    assert prompts.first() == []
    assert len({tuple(prompts.of(Arrival(0.0, document=True))[0][:8]) for _ in range(50)}) == 50
