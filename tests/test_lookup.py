"""Prompt look-up against a search through the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.drafting.base import Round, TokenView
from offload_rt.drafting.shapes import DraftShape
from offload_rt.drafting.sources import NGrams, SourceDrafter
from offload_rt.passes import run_alone
from offload_rt.verification import Draft

ROUND = Round([], 0, 0, [], None, torch.empty(0))
"""What a look-up is told beside the text, and does not need."""


def prefilled(text: list[int], max_ngram: int, min_ngram: int) -> SourceDrafter:
    drafter = SourceDrafter("lookup", NGrams(max_ngram, min_ngram))
    run_alone(drafter.prefill(TokenView(text)))
    return drafter


def drafted(drafter: SourceDrafter, view: TokenView, count: int) -> Draft:
    return run_alone(drafter.proposal(view, DraftShape(depth=count)).complete())


def proposed(
    drafter: SourceDrafter, text: list[int], count: int, speculated: Sequence[int] = ()
) -> list[int]:
    return drafted(drafter, TokenView(text, speculated), count).tokens.known


def searched(settled: int, text: list[int], max_ngram: int, min_ngram: int, count: int) -> list[int]:
    """What followed the newest earlier occurrence, in the settled text, of the longest ending of `text`."""
    for size in range(max_ngram, min_ngram - 1, -1):
        if size > len(text):
            continue
        for end in range(settled - 1, size - 1, -1):
            if text[end - size : end] == text[len(text) - size :]:
                return text[end : end + count]
    return []


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(
    prompt=TOKENS,
    portions=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=8),
    speculated=st.lists(st.integers(0, 3), max_size=5),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
    count=st.integers(1, 12),
)
@settings(derandomize=True, deadline=None, max_examples=200)
def test_it_finds_what_a_search_finds(
    prompt: list[int], portions: list[list[int]], speculated: list[int], sizes: list[int], count: int
) -> None:
    smallest, largest = sizes
    text = list(prompt)
    drafter = prefilled(text, largest, smallest)
    for portion in [[], *portions]:
        text += portion
        drafter.observe(TokenView(text), ROUND)
        drafter.observe(TokenView(text), ROUND)  # twice says nothing new
        for grown in (TokenView(text), TokenView(text, speculated)):
            draft = drafted(drafter, grown, count)
            assert draft.probs is None and draft.tree.is_chain
            assert draft.tokens.known == searched(len(text), grown.part(0), largest, smallest, count)


def test_speculation_leaves_no_trace() -> None:
    drafter = prefilled([5, 6, 7], 2, 1)
    proposed(drafter, [5, 6, 7], 3, [8, 9, 8])
    drafter.observe(TokenView([5, 6, 7, 1]), ROUND)
    assert proposed(drafter, [5, 6, 7, 1], 3, [8]) == []


def test_the_longest_match_wins_over_the_newest() -> None:
    text = [1, 2, 3, 4, 0, 3, 9, 1, 2, 3]
    assert proposed(prefilled(text, 3, 1), text, 1) == [4]


def test_where_nothing_is_asked_for_nothing_is_looked_up() -> None:
    drafter = prefilled([1, 2, 1], 3, 1)
    assert proposed(drafter, [1, 2, 1], 0) == []
    assert [level.passes for level in drafter.levels] == [0]


def test_a_long_text_in_portions() -> None:
    source = random.Random(1)
    text = [source.randrange(20) for _ in range(2000)]
    drafter = prefilled(text[:700], 4, 1)
    at = 700
    while at < len(text):
        at = min(len(text), at + source.randint(1, 17))
        drafter.observe(TokenView(text[:at]), ROUND)
        assert proposed(drafter, text[:at], 5) == searched(at, text[:at], 4, 1, 5)
