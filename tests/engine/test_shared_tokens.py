"""Token IDs of prefixes that begin alike, each page of which exists once."""

from __future__ import annotations

import gc
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from offload_rt.engine.shared_tokens import PAGE, TokenPages
from offload_rt.text.tokenize import common_beginning

BOOK = [(7 * at + at // 100) % 32000 for at in range(3 * PAGE)]


@st.composite
def sequences(draw: st.DrawFn) -> list[int]:
    kept = draw(st.integers(0, len(BOOK)))
    return [*BOOK[:kept], *draw(st.lists(st.integers(0, 31999), max_size=5))]


@given(first=sequences(), second=sequences(), start=st.integers(-900, 900), stop=st.integers(-900, 900))
def test_they_are_the_tokens(first: list[int], second: list[int], start: int, stop: int) -> None:
    pages = TokenPages()
    shared, other = pages.share(first), pages.share(second)
    assert list(shared) == first and len(shared) == len(first) and shared == first
    assert shared[start:stop] == first[start:stop] and shared[:stop] == first[:stop]
    assert all(shared[at] == first[at] for at in range(-len(first), len(first), 97))
    assert shared.common_beginning(other) == common_beginning(first, second)
    assert (shared == other) == (first == second)
    assert pages.share(shared) is shared


def test_many_questions_about_a_book_take_the_memory_of_one() -> None:
    pages, book = TokenPages(), BOOK * 20
    tracemalloc.start()
    try:
        kept = [pages.share([*book, number]) for number in range(700)]
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 2 * 2**20, "lists would take 80 MiB"
    del kept[:]
    gc.collect()
    assert len(pages) == 0
