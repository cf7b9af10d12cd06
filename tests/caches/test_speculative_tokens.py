"""The speculative tokens of a cache behave like a plain forest."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forest import Forest

from offload_rt.caches.speculative import SpeculativeTokens
from offload_rt.sampling.tokens import Tokens

TEXTS = [list(text) for length in (1, 2, 3) for text in product((0, 1), repeat=length)]


def check(held: SpeculativeTokens, plain: Forest[tuple[int, Tokens]]) -> None:
    assert len(held) == len(plain)
    lines = [plain.line(entry) for entry in range(len(plain))]
    assert held.parents == plain.parents
    assert held.sees == [sum(1 << above for above in line) for line in lines]
    # Ids from below the text on; -1 where the host does not know one.
    known = [token if tokens.arrived else -1 for token, tokens in plain.tokens]
    paths = [[known[above] for above in line] for line in lines]
    for entry in range(len(plain)):
        assert held.below(entry) == [e for e, line in enumerate(lines) if entry in line[:-1]]
        for token in (0, 1):
            below = [e for e, parent in enumerate(plain.parents) if parent == entry and known[e] == token]
            assert held.child(entry, token) == (below[0] if below else None)
    for text in TEXTS:
        found = held.match(text)
        assert len(found) == max((len(path) for path in paths if path == text[: len(path)]), default=0)
        if found:
            assert found == lines[found[-1]] and paths[found[-1]] == text[: len(found)]


OPERATIONS = st.one_of(
    # A token below one of the newest entries.
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 4), st.booleans()),
    st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 4), st.just(True)),
    st.tuples(st.just("arrive"), st.integers(0, 9), st.none(), st.none()),
    st.tuples(st.just("keep"), st.lists(st.booleans(), max_size=12), st.none(), st.none()),
    st.tuples(st.just("keep below"), st.integers(0, 9), st.none(), st.none()),
)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=30))
def test_entries_are_those_of_a_forest(operations: list[tuple[str, Any, int, bool]]) -> None:
    held, plain = SpeculativeTokens(), Forest[tuple[int, Tokens]]()
    for name, argument, step, known in operations:
        changes, length = held.changes, len(plain)
        if name == "add":
            above = max(-1, length - 1 - step)
            tokens = Tokens([argument]) if known else Tokens(tensor=torch.tensor([argument]))
            held.add((tokens, 0), above)
            plain = plain.with_new([(argument, tokens)], [above])
            assert held.changes != changes
        elif name == "arrive" and length:
            _, tokens = plain.tokens[argument % length]
            tokens.arrive(tokens.pending())
        elif name.startswith("keep"):
            if name == "keep":
                left = plain.closed(argument)
            else:
                left = [e for e in range(length) if argument % length in plain.line(e)[:-1]]
            held.keep(left)
            plain = plain.only(left)
            assert held.changes != changes
        check(held, plain)
    held.clear()
    check(held, Forest())
