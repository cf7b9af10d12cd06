"""Prompt look-up against a search through the whole text."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from offload_rt.drafting.base import Text
from offload_rt.drafting.lookup import LookupDrafter


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
    drafter = LookupDrafter(largest, smallest)
    text = list(prompt)
    drafter.prefill(Text(text))
    for portion in [[], *portions]:
        text += portion
        drafter.settle(Text(text))
        drafter.settle(Text(text))  # twice says nothing new
        for grown in (Text(text), Text(text, speculated)):
            draft = drafter.propose(grown, count)
            assert draft.laws is None and draft.is_chain
            assert list(draft.tokens) == searched(len(text), grown.part(0), largest, smallest, count)


def test_a_prefill_forgets_the_text_before() -> None:
    drafter = LookupDrafter(3, 1)
    drafter.prefill(Text([1, 2, 3, 1, 2]))
    assert list(drafter.propose(Text([1, 2, 3, 1, 2]), 2).tokens) == [3, 1]
    drafter.prefill(Text([9, 1, 2]))
    assert list(drafter.propose(Text([9, 1, 2]), 2).tokens) == []


def test_speculation_leaves_no_trace() -> None:
    drafter = LookupDrafter(2, 1)
    text = [5, 6, 7]
    drafter.prefill(Text(text))
    drafter.propose(Text(text, [8, 9, 8]), 3)
    drafter.settle(Text([5, 6, 7, 1]))
    assert list(drafter.propose(Text([5, 6, 7, 1], [8]), 3).tokens) == []


def test_the_longest_match_wins_over_the_newest() -> None:
    drafter = LookupDrafter(3, 1)
    text = [1, 2, 3, 4, 0, 3, 9, 1, 2, 3]
    drafter.prefill(Text(text))
    assert list(drafter.propose(Text(text), 1).tokens) == [4]


def test_a_long_text_in_portions() -> None:
    source = random.Random(1)
    text = [source.randrange(20) for _ in range(2000)]
    drafter = LookupDrafter(4, 1)
    drafter.prefill(Text(text[:700]))
    at = 700
    while at < len(text):
        at = min(len(text), at + source.randint(1, 17))
        drafter.settle(Text(text[:at]))
        assert list(drafter.propose(Text(text[:at]), 5).tokens) == searched(at, text[:at], 4, 1, 5)
